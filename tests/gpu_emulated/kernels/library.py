"""The emulated kernels as functions, and the controls of the emulation."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.gpu_emulated.kernels.build import NAMESPACE

HOST_ARGUMENTS = ("cu_seqlens", "intervals")
"""Tensors that operators take in host memory on every device."""


class Counts(ctypes.Structure):
    """What the kernels did since the counts were last taken; ``hottest``: atomics of one block to one address."""

    names = ("launches", "blocks", "barriers", "exchanges", "atomics", "hottest")
    _fields_ = [(name, ctypes.c_uint64) for name in names]


class EmulatedKernels:
    """Operators of a library of ``build``. A process can load one such library only."""

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(path)
        self._controls = ctypes.CDLL(str(path))
        self._controls.emulated_unchecked_launch.restype = ctypes.c_char_p
        self._controls.emulated_break_rule.restype = ctypes.c_char_p
        self._controls.emulated_break_rule.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._controls.emulated_stream.restype = ctypes.c_void_p
        self._controls.emulated_mark_host_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._controls.emulated_set_seed.argtypes = [ctypes.c_uint64]

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a kernel that fails if it breaks a rule, leaves another device current or does not check a launch."""
        kernel = getattr(getattr(torch.ops, NAMESPACE), name).default

        def checked(*args: object) -> Any:
            before = self._controls.emulated_current_device()
            for argument, value in zip(kernel._schema.arguments, args, strict=False):
                if argument.name in HOST_ARGUMENTS and isinstance(value, torch.Tensor):
                    self._controls.emulated_mark_host_memory(value.data_ptr(), value.nbytes)
            torch.use_deterministic_algorithms(True)  # new memory is NaN, or the largest integer
            try:
                result = kernel(*args)
            finally:
                torch.use_deterministic_algorithms(False)
                self._controls.emulated_forget_host_memory()
            assert self._controls.emulated_current_device() == before, f"{name} leaves another device current"
            assert self._controls.emulated_unchecked_launch() == b"", f"{name} does not check its launch"
            return result

        return checked

    @contextmanager
    def tensors_on(self, device: int) -> Iterator[None]:
        """Declare all tensors to be on another device than the current one, which is 0."""
        self._controls.emulated_set_device(device)
        try:
            yield
        finally:
            self._controls.emulated_set_device(0)

    def shuffle(self, seed: int) -> None:
        """Run the threads of a block in a random order between barriers; seed 0: in the order of their index."""
        self._controls.emulated_set_seed(seed)

    def break_rule(self, rule: int) -> str:
        """Run a kernel of ``rules.cu``; return the error, or an empty string."""
        return str(self._controls.emulated_break_rule(rule, self._controls.emulated_stream(0)).decode())

    def take_counts(self) -> Mapping[str, int]:
        counts = Counts()
        self._controls.emulated_take_counts(ctypes.byref(counts))
        return {name: getattr(counts, name) for name in Counts.names}
