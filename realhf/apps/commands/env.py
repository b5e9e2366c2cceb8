"""``realhf env``: versions and devices, to paste into an issue."""

import importlib.metadata
import os
import platform
import sys

from realhf.base.errors import UserError
from realhf.base.version import __version__

LIBRARIES = ("torch", "transformers", "huggingface_hub", "tokenizers", "safetensors", "hydra-core", "omegaconf", "rich",
             "pyzmq", "msgspec", "cattrs", "numpy", "math-verify", "tensorboard", "httpx", "jinja2")  # fmt: skip
EXTRAS = {"serve": "fastapi", "ray": "ray", "megatron": "megatron-core", "flash": "flash-attn", "parquet": "pyarrow",
          "quantization": "torchao", "wandb": "wandb"}  # fmt: skip


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"invalid arguments: {' '.join(arguments)}\nusage: realhf env")
    print(f"realhf        {__version__}")
    print(f"python        {sys.version.split()[0]} on {platform.platform()}")
    print(f"cores         {os.cpu_count()}")
    for name in LIBRARIES:
        print(f"{name:<13} {_version(name)}")
    for extra, name in EXTRAS.items():
        print(f"extra {extra:<12} {_version(name)}")
    import torch

    from realhf.ops import extension, varlen
    from realhf.rewards.sandbox.sandbox import describe_sandbox

    print(f"kernels       {' '.join(extension.kernels()) or 'none: the PyTorch reference implementations are used'}")
    print(f"sandbox       {describe_sandbox()}")
    if torch.cuda.is_available():
        print(f"attention     {' '.join(kernel.module for kernel in varlen.kernels()) or 'none: plain torch'}")
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            print(f"cuda:{i}        {torch.cuda.get_device_name(i)}, {free >> 30} of {total >> 30} GiB free")
    else:
        print("cuda          none")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
