"""Runs the checks of kernels in a process of its own: arguments LIBRARY SIZES SEED [OPERATOR ...]."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.gpu_emulated.kernels.cases import CASES, LARGE, QUICK, TINY
from tests.gpu_emulated.kernels.library import EmulatedKernels

SIZES = {"tiny": TINY, "quick": QUICK, "large": LARGE, "vocabulary": replace(TINY, sampled_vocabs=[151_937])}


def main(library: str, sizes: str, seed: int, names: list[str]) -> None:
    """Check kernels with the threads in the order of a seed, on another device than the current one."""
    torch.set_num_threads(1)
    kernels = EmulatedKernels(Path(library))
    kernels.shuffle(seed)
    with kernels.tensors_on(1):
        for name in names or list(CASES):
            CASES[name](kernels, SIZES[sizes], torch.Generator().manual_seed(seed))
            print(name, dict(kernels.take_counts()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
