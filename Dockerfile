# docker build -t realhf .                                     for CPUs
# docker build -t realhf:cuda --build-arg CUDA=1 .             for NVIDIA GPUs; compiles the CUDA kernels
# docker run --rm realhf demo --dir /tmp/demo
ARG CUDA=0

FROM python:3.11-slim-bookworm AS base-0
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base-1
FROM base-${CUDA}
ARG CUDA
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/realhf
ENV PATH=/opt/realhf/bin:$PATH
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --upgrade "setuptools>=77" wheel \
 && if [ "$CUDA" = 1 ]; then pip install --no-cache-dir "torch>=2.13"; else \
    pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu; fi
# Without isolation the build finds torch, and compiles the kernels into the package.
RUN REALHF_BUILD_CUDA=$CUDA pip install --no-cache-dir --no-build-isolation ".[ray,parquet,serve]"
WORKDIR /work
ENTRYPOINT ["realhf"]
CMD ["--help"]
