"""Replaces the functions of ``torch.cuda`` that the package uses by those of the fake devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_graphs import FakeCapture, FakeCudaGraph
from tests.gpu_emulated.fake_streams import FakeEvent, FakeStream, on_stream

MEMORY = 80 << 30


@contextmanager
def fake_cuda(n_devices: int = 2, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeCuda]:
    """Make ``cuda:0`` to ``cuda:{n_devices - 1}`` usable in this context."""
    cuda = FakeCuda(n_devices, capability)
    lifts_cpu_tensors = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _runtime(cuda).items():
            patch.setattr(torch.cuda, name, value)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes a host tensor, and copies it through the mode
        try:
            with cuda:
                yield cuda
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts_cpu_tensors)


def _runtime(cuda: FakeCuda) -> dict[str, Any]:
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: cuda.n_devices,
        "current_device": lambda: cuda.current,
        "set_device": lambda device: setattr(cuda, "current", cuda.indexed(device).index),
        "synchronize": lambda device=None: cuda.note("wait", "synchronize"),
        "empty_cache": lambda: cuda.note("empty_cache", ""),
        "get_device_name": lambda device=None: "fake",
        "get_device_capability": lambda device=None: cuda.capability,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "is_current_stream_capturing": lambda: cuda.capture is not None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "Stream": lambda *_, **__: FakeStream(cuda),
        "current_stream": lambda device=None: cuda.stream,
        "stream": lambda stream: on_stream(cuda, stream),
        "Event": lambda *_, **__: FakeEvent(cuda),
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": partial(FakeCudaGraph, cuda),
        "graph": FakeCapture,
    }
