"""The machine description of a GPU, by the name and the memory that its driver reports."""

import re
from dataclasses import dataclass

NEAREST = "h100"
"""The description of a GPU without a similar one."""


@dataclass(frozen=True)
class GPU:
    """A device as its driver describes it: ``name`` such as ``NVIDIA H100 80GB HBM3``, and its memory in bytes."""

    name: str
    memory: float


@dataclass(frozen=True)
class _Kind:
    """The GPUs that a file of ``machines/`` describes: names with ``family``, memory in bytes between bounds.

    Names that match ``variant`` are other products of the family, with slower memory or links.
    """

    machine: str
    family: str
    memory: tuple[float, float]
    variant: str


KINDS = (
    _Kind("a100", r"\bA100\b", (75e9, 90e9), r"PCI"),
    _Kind("h200", r"\bH200\b", (135e9, 155e9), r"NVL|\bGH"),
    _Kind("h100", r"\bH100\b", (75e9, 90e9), r"PCI|NVL"),
)


@dataclass(frozen=True)
class GPUMatch:
    """The machine file of a GPU; ``note`` says how the GPU differs from it, and is empty if it does not."""

    machine: str
    note: str = ""


def match_gpu(gpu: GPU) -> GPUMatch:
    """Return the machine of a GPU, or the most similar one with a note on what to set."""
    described = f"{gpu.name} with {gpu.memory / 1e9:.3g} GB"
    advice = "set planner.hardware=FILE.yaml for its own limits"
    for kind in KINDS:
        if re.search(kind.family, gpu.name):
            low, high = kind.memory
            if low <= gpu.memory <= high and not re.search(kind.variant, gpu.name):
                return GPUMatch(kind.machine)
            return GPUMatch(kind.machine, f"{described} is another variant of {kind.machine}; {advice}")
    return GPUMatch(NEAREST, f"{described} is not known, {NEAREST} is assumed; {advice}")
