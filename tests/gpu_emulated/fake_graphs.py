"""CUDA graphs that are recorded and replayed for real.

During a capture nothing is computed, as on a GPU: memory is as before afterwards, and outputs contain garbage. A graph
refers to memory by address: a replay raises if memory that it reads was released or has moved since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_emulated.device_tensor import fill_with_garbage, leaves, mapped

if TYPE_CHECKING:
    from tests.gpu_emulated.fake_cuda import FakeCuda


class ForeignMemory:
    """A tensor in memory that is not the graph's own: it does not keep it alive."""

    def __init__(self, tensor: Tensor, cuda: FakeCuda) -> None:
        storage = tensor.untyped_storage()
        self.storage, self.number, self.address = StorageWeakRef(storage), storage._cdata, storage.data_ptr()
        self.moves, self.cuda = cuda.moves[storage._cdata], cuda
        self.dtype, self.view = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError("illegal memory access: a graph uses memory that was released after its capture")
        if (self.cuda.moves[self.number], storage.data_ptr()) != (self.moves, self.address):
            raise RuntimeError("illegal memory access: a graph uses memory that has moved since its capture")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)


def _found(x: Any) -> Any:
    return x.tensor() if isinstance(x, ForeignMemory) else x


class FakeCudaGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save foreign memory that an operation writes."""
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in named:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in leaves(value):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.own and storage._cdata not in self.saved:
                        self.saved[storage._cdata] = storage, storage.clone()

    def record(self, compute: Any, args: Any, kwargs: Any, out: Any, ours: list[Tensor], is_launched: bool) -> None:
        """Record an operation on ``ours``, and on scalars of the host, whose values are constants of the graph."""
        written = {x.untyped_storage()._cdata for x in leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in leaves(out):
            if isinstance(x, Tensor) and (number := x.untyped_storage()._cdata) not in written:
                self.own[number] = x.untyped_storage()
        device_tensors = {id(x) for x in (*ours, *leaves(out))}

        def by_address(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.untyped_storage()._cdata in self.own:
                return x
            return ForeignMemory(x, self.cuda) if id(x) in device_tensors else x.clone()

        if is_launched:
            self.steps.append((compute, *mapped(by_address, (args, kwargs, out))))

    def begin(self) -> None:
        assert self.cuda.capture is None and not self.steps, "captures do not nest"
        self.cuda.capture = self
        self.cuda.note("graph capture", "")

    def end(self) -> None:
        self.cuda.capture = None
        for storage, values in self.saved.values():
            storage.copy_(values)
        for storage in self.own.values():
            fill_with_garbage(storage)
        self.saved.clear()

    def replay(self) -> None:
        self.cuda.note("graph replay", "")
        self.cuda.note("launch", "graph replay")
        with _disable_current_modes(), torch.no_grad():
            for compute, *recorded in self.steps:
                args, kwargs, out = mapped(_found, recorded)
                again = compute(*args, **kwargs)
                for new, old in zip(leaves(again), leaves(out), strict=True):
                    if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        self.steps.clear()
        self.own.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class FakeCapture:
    """Stands for ``torch.cuda.graph``, which also empties the allocator's cache."""

    def __init__(self, graph: FakeCudaGraph, pool: object = None, stream: object = None, **_: Any) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        self.graph.cuda.note("empty_cache", "")
        self.graph.begin()

    def __exit__(self, *_: object) -> None:
        self.graph.end()
