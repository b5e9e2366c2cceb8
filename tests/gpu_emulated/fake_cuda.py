"""A CUDA device without a GPU: a dispatch mode that applies the device's rules and counts what a host would wait for.

Refused as on a GPU: operations on tensors of different devices, host code that reads device memory, memory that was
released, and waits or host copies while a graph is captured. New memory contains garbage. A copy to pinned memory that
does not block arrives at the next wait.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu_emulated.device_tensor import DeviceTensor, fill_with_garbage, leaves, mapped
from tests.gpu_emulated.fake_attention import varlen_backward, varlen_forward
from tests.gpu_emulated.fake_graphs import FakeCudaGraph
from tests.gpu_emulated.fake_streams import Clock, FakeStream, RaceDetector, merge

aten = torch.ops.aten
HOST = torch.device("cpu")
WAITING = {
    aten.nonzero.default, aten.masked_select.default, aten._local_scalar_dense.default, aten.is_nonzero.default,
    aten.equal.default, aten.unique_consecutive.default, aten._unique2.default, aten.unique_dim.default,
    aten.bincount.default,
}  # fmt: skip
"""Operations whose result, or its size, the host reads."""
INDEXING = {
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default,
}  # fmt: skip
ALLOCATING = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
WAITS = ("wait", "copy to host", "copy from pageable memory")
"""The kinds of events for which the host waits."""


class Event(NamedTuple):
    """A counted event: a wait, a copy or a launch by a line of the package."""

    kind: str
    what: str
    line: str


class FakeCuda(TorchDispatchMode):
    """``n_devices`` fake devices; ``events`` counts waits, copies and launches. See ``fake_cuda`` for torch.cuda."""

    def __init__(self, n_devices: int = 2, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()
        self.n_devices, self.capability, self.current = n_devices, capability, 0
        self.events: Counter[Event] = Counter()
        self.moves: defaultdict[int, int] = defaultdict(int)  # by storage: how often its memory was allocated again
        self.capture: FakeCudaGraph | None = None
        self.n_streams, self.host_clock = 0, Clock()
        self.stream = FakeStream(self)
        self.races: RaceDetector | None = None  # tests of code with several streams set it
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.kernels: dict[Any, Callable[..., Any]] = {}
        from torch.nn.attention import varlen  # registers its operations

        assert varlen
        self.kernels[torch.ops.torch_attn._varlen_attn.default] = varlen_forward
        self.kernels[torch.ops.torch_attn._varlen_attn_backward.default] = varlen_backward
        self.kernels[aten.index_copy_.default] = _index_copy
        self._pinned: dict[int, torch.UntypedStorage] = {}

    def count(self, kind: str) -> int:
        return sum(n for event, n in self.events.items() if event.kind == kind)

    @property
    def n_waits(self) -> int:
        return sum(map(self.count, WAITS))

    @property
    def n_launches(self) -> int:
        return self.count("launch")

    def report(self) -> str:
        """Return the waits and copies by line, most frequent first."""
        found = [(n, *event) for event, n in self.events.items() if event.kind != "launch"]
        return "\n".join(f"{n:5d} {kind}: {what} at {line}" for n, kind, what, line in sorted(found, reverse=True))

    def indexed(self, device: Any) -> torch.device:
        """Return the device with its number; RuntimeError if there is none with this number."""
        device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", self.current)
        if device.type == "cuda" and device.index >= self.n_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {device.index}")
        return device

    def note(self, kind: str, what: object) -> None:
        """Count an event by the innermost line of the package; RuntimeError for a wait in a capture."""
        event = Event(kind, str(what).removeprefix("aten."), _line())
        self.events[event] += 1
        if kind in WAITS or kind == "copy from pinned memory":
            if self.capture is not None:
                raise RuntimeError(f"operation not permitted when stream is capturing: {event}")
            if kind in ("wait", "copy to host"):
                if what not in ("stream", "event"):  # these have clocks of their own
                    merge(self.host_clock, self.stream.clock)
                self.complete()

    def complete(self) -> None:
        """Complete the copies to pinned memory, as a wait does."""
        for target, values in self.pending:
            target.copy_(values)
        self.pending.clear()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def to_host(self, source: DeviceTensor, dtype: torch.dtype, non_blocking: bool = False) -> Tensor:
        assert not (source.requires_grad and torch.is_grad_enabled()), "a copy to the host is not differentiable here"
        self.note("copy to host", "to(cpu)")
        return source.inner.detach().to(dtype, copy=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._dispatch(func, args, kwargs)
        tensors = leaves((args, kwargs, out))
        if self.races is not None and _is_launched(func) and any(isinstance(x, DeviceTensor) for x in tensors):
            self.races.operation(func, args, kwargs, out)
        return out

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat = list(leaves((args, kwargs)))
        ours = [x for x in flat if isinstance(x, DeviceTensor)]
        named = kwargs.get("device")
        named = None if named is None else self.indexed(named)
        if ours and func is aten.new_zeros.default and torch._C._current_graph_task_id() >= 0:
            named = ours[0].where  # autograd passes the device that C++ sees
        if not ours and (named is None or named.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func in (aten.copy_.default, aten._to_copy.default):
            return self._copy(func, args, kwargs, named)
        if named is not None and named.type == "cpu" and func not in (aten.is_pinned.default,):
            return self._on_host(func, *mapped(lambda x: x.inner if isinstance(x, DeviceTensor) else x, (args, kwargs)))
        where = named or ours[0].where
        self._check(func, args, flat, where)
        self._count(func, args, kwargs)
        inner_args = mapped(_inner, args)
        inner_kwargs = {k: mapped(_inner, v) for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        return self._run(func, inner_args, inner_kwargs, ours, where)

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ours: list[DeviceTensor], where: torch.device
    ) -> Any:
        """Compute on the inner tensors, and record in a capture; return device tensors."""
        if self.capture is not None:
            self.capture.before(func, args, kwargs)
        compute = self.kernels.get(func, func)
        out = compute(*args, **kwargs)
        if func in ALLOCATING:
            fill_with_garbage(out.untyped_storage())
        if self.capture is not None:
            self.capture.record(compute, args, kwargs, out, [x.inner for x in ours], is_launched=_is_launched(func))
        known = {id(x.inner): x for x in ours}

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            found = known.get(id(x))
            if found is None:
                return DeviceTensor(x, where, self)
            assert (found.shape, found.stride()) == (x.shape, x.stride()), f"{func} changes the shape of its argument"
            return found

        return mapped(wrap, out)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self._pin(args[0].clone())
        pin = kwargs.get("pin_memory")
        out = func(*args, **{**kwargs, "pin_memory": False} if "pin_memory" in kwargs else kwargs)
        return self._pin(out) if pin else out

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage  # keeps it: its number is not given to another storage
        return tensor

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: torch.device | None) -> Tensor:
        """Copy between devices, or on one; autograd names the CPU for a type conversion on a device."""
        in_place = func is aten.copy_.default
        source: Tensor = args[1] if in_place else args[0]
        non_blocking = bool(kwargs.get("non_blocking", args[2] if in_place and len(args) > 2 else False))
        target = args[0].device if in_place else named
        if not in_place and isinstance(source, DeviceTensor) and (target is None or target.type == "cpu"):
            target = source.where
        assert target is not None
        if not isinstance(source, DeviceTensor) and source.numel():
            is_async = non_blocking and self.is_pinned(source)
            self.note("copy from pinned memory" if is_async else "copy from pageable memory", func)
        elif target.type == "cpu":
            return self._copy_to_host(args[0], source, non_blocking)
        elif isinstance(source, DeviceTensor):
            self._check_memory(func, [source])
            self.note("launch" if source.where == target else "copy between devices", func)
        values = _inner(source)
        if in_place:
            self._check_memory(func, [args[0]])
            return self._run(func, (args[0].inner, values), {}, [args[0]], args[0].where)
        options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
        return self._run(_converted, (values,), options, [source] if isinstance(source, DeviceTensor) else [], target)

    def _copy_to_host(self, target: Tensor, source: Any, non_blocking: bool) -> Tensor:
        if non_blocking and self.is_pinned(target):
            self.note("copy to pinned memory", "copy_")
            self.pending.append((target, source.inner.clone()))
            return target.copy_(torch.empty_like(source.inner))
        self.note("copy to host", "copy_")
        return target.copy_(source.inner)

    def _check(self, func: Any, args: tuple[Any, ...], flat: list[Any], where: torch.device) -> None:
        if func.namespace not in ("aten", "prims") and func not in self.kernels:
            raise RuntimeError(f"{func} has no kernel for CUDA")
        tensors = [x for x in flat if isinstance(x, Tensor)]
        others = {x.device for x in tensors if x.device != where and (x.dim() or isinstance(x, DeviceTensor))}
        if func in INDEXING and isinstance(args[0], DeviceTensor):
            others.discard(HOST)
        is_written_on_host = func._schema.is_mutable and isinstance(args[0], Tensor) and args[0].device == HOST
        if others or is_written_on_host:
            found = ", ".join(str(x.device) for x in tensors)
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} has {found} at {_line()}")
        if _is_launched(func):
            self._check_memory(func, tensors)

    def _check_memory(self, func: Any, tensors: list[Any]) -> None:
        for x in tensors:
            if isinstance(x, DeviceTensor) and x.numel() and not x.inner.untyped_storage().nbytes():
                raise RuntimeError(f"{func} uses device memory that was released, at {_line()}")

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in WAITING or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.note("wait", func)
        if func in INDEXING:
            indices = [x for x in args[1] if isinstance(x, Tensor)]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.note("wait", f"{func} by a mask")
            elif any(x.device == HOST and x.dim() for x in indices):
                self.note("copy from pageable memory", f"{func} by an index on the host")
        if _is_launched(func) and func is not aten._local_scalar_dense.default:
            self.note("launch", func)


def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if len(index.unique()) != len(index):
        raise RuntimeError("index_copy_ writes one place twice, on a GPU in any order")
    return x.index_copy_(dim, index, source)


_index_copy._schema = aten.index_copy_.default._schema  # type: ignore[attr-defined]


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, DeviceTensor) else x


def _converted(x: Tensor, **options: Any) -> Tensor:
    return x.detach().to(options.get("dtype") or x.dtype, copy=True)


_converted._schema = aten.clone.default._schema  # type: ignore[attr-defined]


@cache
def _is_launched(func: Any) -> bool:
    """Return True unless the operation only makes a view, or only allocates."""
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not is_view and func not in ALLOCATING and func not in (aten._unsafe_view.default, aten.lift_fresh.default)


def _line() -> str:
    """Return the innermost line of the package on the stack."""
    frame = sys._getframe(2)
    while frame is not None and "/realhf/" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "outside the package"
    return f"{frame.f_code.co_filename.rsplit('/realhf/', 1)[1]}:{frame.f_lineno}"
