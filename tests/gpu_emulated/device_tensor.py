"""Tensors with real values in host memory that say they are on ``cuda:N``.

C++ sees a CPU tensor, so autograd runs unchanged; Python sees the device. ``FakeCuda`` computes their operations.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.gpu_emulated.fake_cuda import FakeCuda


def leaves(x: Any) -> Iterator[Any]:
    """Yield the values in nested lists, tuples and dicts; torch's own trees take most of the time of an operation."""
    if type(x) in (list, tuple):
        for value in x:
            yield from leaves(value)
    elif type(x) is dict:
        yield from leaves(list(x.values()))
    else:
        yield x


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to the values in nested lists, tuples and dicts."""
    if type(x) in (list, tuple):
        return type(x)([mapped(function, value) for value in x])
    if type(x) is dict:
        return {key: mapped(function, value) for key, value in x.items()}
    return function(x)


ADDRESS_SPACE = 1 << 60
"""Added to addresses: one of a device never equals one of the host."""


class DeviceStorage:
    """The storage of a device tensor. ``resize_`` moves it, as an allocator may."""

    def __init__(self, host: torch.UntypedStorage, cuda: "FakeCuda") -> None:
        self.host, self.cuda = host, cuda

    def nbytes(self) -> int:
        return self.host.nbytes()

    def resize_(self, nbytes: int) -> None:
        if nbytes != self.host.nbytes():
            self.cuda.moves[self.host._cdata] += 1
            self.host.resize_(nbytes)
            fill_with_garbage(self.host)


class DeviceTensor(torch.Tensor):
    """A tensor on a fake device; ``inner`` has its values."""

    inner: Tensor
    where: torch.device
    cuda_: "FakeCuda"
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, where: torch.device, cuda: "FakeCuda") -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="cpu"
        )
        made.inner, made.where, made.cuda_ = inner, where, cuda
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(x for x in leaves((args, kwargs)) if isinstance(x, DeviceTensor)).cuda_.dispatch(
            func, args, kwargs or {}
        )

    device = property(lambda self: self.where)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return self.where.index

    def data_ptr(self) -> int:
        storage = self.inner.untyped_storage()
        return ADDRESS_SPACE + (self.cuda_.moves[storage._cdata] << 48) + self.inner.data_ptr()

    def untyped_storage(self) -> DeviceStorage:  # type: ignore[override]
        return DeviceStorage(self.inner.untyped_storage(), self.cuda_)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = self.cuda_.indexed(device or self.where), dtype or self.dtype
        if device.type == "cpu":
            return self.cuda_.to_host(self, dtype, non_blocking)
        if device == self.where and dtype == self.dtype and not copy:
            return self
        return torch.ops.aten._to_copy.default(self, dtype=dtype, device=device, non_blocking=non_blocking)

    def cpu(self, *_: Any) -> Tensor:  # type: ignore[override]
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        return self.to(self.where if device is None else device, non_blocking=non_blocking)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.where)

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert {self.where} device type tensor to numpy")

    def __array__(self, *_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert {self.where} device type tensor to numpy")

    def __dlpack__(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"host code reads the memory of a tensor on {self.where}")

    def pin_memory(self, *_: Any) -> Tensor:  # type: ignore[override]
        raise RuntimeError("only dense CPU tensors can be pinned")

    def share_memory_(self) -> Tensor:  # type: ignore[override]
        raise RuntimeError("device memory is not shared through files")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.inner}, {self.where})"


def fill_with_garbage(storage: torch.UntypedStorage) -> None:
    """Fill memory with bytes that are NaN in every float type and negative in every signed integer type."""
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
