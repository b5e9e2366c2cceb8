"""Processor, cores and torch version of this machine, found without torch."""

import importlib.metadata
import os
import platform
from pathlib import Path

from realhf.base.host_memory import proc_field

GPUS = Path("/proc/driver/nvidia/gpus")


def processor_name(device: str, gpus: Path = GPUS) -> str:
    """Return the model of the CPU or of the first GPU; empty if the driver does not report it."""
    if device == "cuda":
        names = sorted(gpus.iterdir()) if gpus.is_dir() else []
        return proc_field(str(names[0] / "information"), "Model") if names else ""
    return proc_field("cpuinfo", "model name") or platform.processor() or platform.machine()


def has_bf16_products(cpuinfo: str = "cpuinfo") -> bool:
    """Return False if the CPU is known to have no instructions for products in bfloat16."""
    flags = {*proc_field(cpuinfo, "flags").split(), *proc_field(cpuinfo, "Features").split()}
    return not flags or not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def cores() -> frozenset[int]:
    """Return the cores on which this process may run."""
    return frozenset(os.sched_getaffinity(0))


def torch_version() -> str:
    """Return the version of the installed torch without its build, such as ``+cpu``; empty if there is none."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""
