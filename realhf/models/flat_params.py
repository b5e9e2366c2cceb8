"""All parameters of a shard in one flat tensor, so that transfers, optimizer steps and releases are one operation.

Matrices come first, then vectors (which have no weight decay). Each group is ordered by layer and then as declared, so
that a fused product reads its weights as one wider view of the same memory. Experts that fewer replicas hold than the
other parameters follow in a segment of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api.param_box import Box, ParamSpec, box_numel, box_shape, intersect, relative, shard_box, whole
from realhf.base.shared_buffer import SharedBuffer


@dataclass(frozen=True)
class _Entry:
    spec: ParamSpec
    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A part of the flat tensor: matrices from ``start`` to ``n_matrix``, vectors to ``end``, padding to ``stop``."""

    start: int
    n_matrix: int
    end: int
    stop: int


class FlatParams:
    """The parameters named in ``boxes``, of each the slice given by its box.

    ``data`` is the flat tensor, initially zero and padded to a multiple of ``pad_to`` elements; its first ``n_matrix``
    elements belong to matrices, those up to ``end`` to vectors. With ``experts_apart`` these are the first of two
    ``segments``, and experts are the second. ``grad``, after ``enable_grad``, is a float32 tensor of the same length;
    so is ``average``, after the first ``lerp_`` of bfloat16 parameters. With ``shared_name``, ``data`` is in shared
    host memory of that name, which other processes can map.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        boxes: Mapping[str, Box],
        dtype: torch.dtype,
        device: torch.device | str,
        pad_to: int = 1,
        shared_name: str = "",
        experts_apart: bool = False,
    ) -> None:
        local = [spec for spec in specs if spec.name in boxes]
        assert len(local) == len(boxes), f"boxes of unknown parameters: {sorted(set(boxes) - {s.name for s in local})}"
        self._entries: dict[str, _Entry] = {}
        experts = [spec for spec in local if experts_apart and spec.is_expert]
        first = self._place([spec for spec in local if spec not in experts], boxes, 0, pad_to)
        self.segments = (first, *([self._place(experts, boxes, first.stop, pad_to)] if experts else []))
        self.n_matrix, self.end, numel = first.n_matrix, first.end, self.segments[-1].stop
        self.shared = SharedBuffer(numel * dtype.itemsize, shared_name) if shared_name else None
        if self.shared is None:
            self.data = torch.zeros(numel, dtype=dtype, device=device)
        else:
            self.data = torch.frombuffer(self.shared.map, dtype=dtype, count=numel)
        self.grad: Tensor | None = None
        self.is_free = False
        self.n_allocations = 0  # changes when the weights may have moved in memory
        self.on_free: list[Callable[[], None]] = []
        self.average: Tensor | None = None
        self._host: Tensor | None = None
        self._grad_of: Callable[..., Tensor] | None = None
        self._leaves: dict[tuple[str, ...], Tensor] = {}
        self._boxes: dict[tuple[str, Box], Tensor] = {}

    def _place(self, specs: Sequence[ParamSpec], boxes: Mapping[str, Box], start: int, pad_to: int) -> Segment:
        """Place these parameters from ``start`` on, which is a multiple of ``pad_to``."""
        end = n_matrix = start
        for spec in sorted(specs, key=lambda spec: (not spec.is_matrix, spec.layer)):
            box = boxes[spec.name]
            assert intersect(box, whole(spec.shape)) == box, f"box {box} is not inside {spec}"
            self._entries[spec.name] = _Entry(spec, box, end, end + box_numel(box))
            end = self._entries[spec.name].stop
            if spec.is_matrix:
                n_matrix = end
        return Segment(start, n_matrix, end, -(-end // pad_to) * pad_to)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def box(self, name: str) -> Box:
        return self._entries[name].box

    def spec(self, name: str) -> ParamSpec:
        return self._entries[name].spec

    def n_holders(self, name: str, tp: int) -> int:
        """Return how many of ``tp`` tensor-parallel ranks hold the same slice of a parameter as this shard."""
        return sum(shard_box(self.spec(name), tp, tp_rank) == self.box(name) for tp_rank in range(tp))

    def view(self, *names: str) -> Tensor:
        """Return the slice of a parameter, or the concatenation of adjacent parameters along dimension 0."""
        return self.view_of(self.data, *names)

    def view_of(self, flat: Tensor, *names: str) -> Tensor:
        """Return ``view`` of another tensor with the same elements as ``data``."""
        assert not self.is_free, "parameters are used while their memory is released"
        entries = [self._entries[name] for name in names]
        shapes = [box_shape(entry.box) for entry in entries]
        for left, right in zip(entries, entries[1:], strict=False):
            assert left.stop == right.start, f"{left.spec.name} and {right.spec.name} are not adjacent"
        assert len({shape[1:] for shape in shapes}) == 1, f"{names} differ in their inner dimensions"
        rows = sum(shape[0] for shape in shapes)
        return flat[entries[0].start : entries[-1].stop].view(rows, *shapes[0][1:])

    def grad_view(self, *names: str) -> Tensor:
        """Return the float32 gradient of adjacent parameters, after ``enable_grad`` or ``use_grads``."""
        if self._grad_of is not None:
            return self._grad_of(*names)
        assert self.grad is not None, "gradients are not enabled"
        return self.view_of(self.grad, *names)

    def span(self, name: str) -> range:
        """Return the elements of ``data`` that store a parameter."""
        return range(self._entries[name].start, self._entries[name].stop)

    def leaf(self, *names: str) -> Tensor:
        """Return a weight for computation: the plain view, or its autograd leaf once gradients are enabled.

        The same names give the same leaf, so a tied embedding is one leaf used twice.
        """
        if not self.has_grad:
            return self.view(*names)
        if names not in self._leaves:
            with torch.inference_mode(False):
                self._leaves[names] = _new_leaf(self._detached(*names), self.grad_view(*names))
        return self._leaves[names]

    def _detached(self, *names: str) -> Tensor:
        """Return the tensor of a new leaf."""
        return self.view(*names).detach()

    @property
    def has_grad(self) -> bool:
        """Whether leaves accumulate gradients."""
        return self.grad is not None or self._grad_of is not None

    def use_grads(self, view: Callable[..., Tensor]) -> None:
        """Accumulate gradients in other memory from now on: ``view`` returns the gradient of adjacent parameters."""
        assert not self.has_grad, "gradients are enabled"
        self._grad_of = view

    def enable_grad(self) -> Tensor:
        """Allocate the gradient and return it. Leaves fetched from now on accumulate into it; earlier views do not."""
        if self.grad is None:
            with torch.inference_mode(False):
                self.grad = torch.zeros(self.data.shape, device=self.data.device)
        return self.grad

    def use_buffers(self, data: Tensor, grad: Tensor) -> None:
        """Use external memory from now on: ``data``, which has the same values, and ``grad``."""
        assert data.shape == grad.shape == self.data.shape and data.dtype == self.data.dtype and self.grad is None
        self.data, self.grad = data, grad
        self.n_allocations += 1
        self._boxes.clear()

    def share(self, name: str) -> None:
        """Move the parameters to shared host memory, if they are not in it."""
        if self.shared is not None:
            return
        assert self.grad is None and not self.data.is_cuda, "trained parameters are created in shared memory"
        with torch.inference_mode(False):
            self.shared = SharedBuffer(self.data.nbytes, name)
            data = torch.frombuffer(self.shared.map, dtype=self.data.dtype, count=len(self.data))
            data.copy_(self.data)
        self.data = data
        self.n_allocations += 1
        self._boxes.clear()

    def zero_grad(self) -> None:
        assert self.grad is not None, "gradients are not enabled"
        self.grad.zero_()

    def read(self, name: str, box: Box) -> Tensor:
        """Return a view of ``box``, in global coordinates, which must be inside this shard."""
        assert not self.is_free, "parameters are used while their memory is released"
        if (name, box) not in self._boxes:  # reallocation reads the same hundreds of boxes in every step
            local = self._entries[name].box
            assert intersect(box, local) == box, f"{name}: {box} is not inside this shard's {local}"
            with torch.inference_mode(False):
                self._boxes[name, box] = self.view(name)[relative(box, local)]
        return self._boxes[name, box]

    @torch.no_grad()
    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        """Copy ``tensor`` (of any type, on any device) to ``box``, in global coordinates."""
        self.read(name, box).copy_(tensor)

    @torch.no_grad()
    def lerp_(self, name: str, box: Box, tensor: Tensor, eta: float) -> None:
        """Update ``box`` to the moving average eta * tensor + (1 - eta) * box.

        For bfloat16 parameters, where small updates round away, a float32 copy of the shard stores the average.
        """
        if self.data.dtype == torch.float32:
            self.read(name, box).lerp_(tensor, eta)
            return
        if self.average is None:
            self.average = self.data.float()
        average = self.view_of(self.average, name)[relative(box, self._entries[name].box)]
        self.read(name, box).copy_(average.lerp_(tensor.float(), eta))

    def offload(self) -> None:
        """Move the parameters to host memory and free the device's; gradients are not kept."""
        if not self.is_free:
            self._host = torch.empty_like(self.data, device="cpu", pin_memory=self.data.is_cuda).copy_(self.data)
            self.free()

    def load(self) -> None:
        """Copy offloaded parameters back to the device."""
        if self._host is not None:
            self.allocate()
            self.data.copy_(self._host, non_blocking=True)
            self._host = None

    def free(self) -> None:
        """Release the memory of data and gradient, even if views of them exist; the contents are lost.

        Calls ``on_free`` first, which releases memory that is of no use without the parameters.
        """
        for release in self.on_free:
            release()
        if self.shared is not None:
            self.shared.release_pages()
        for flat in self._resizable():
            flat.untyped_storage().resize_(0)
        self.is_free = True

    def _resizable(self) -> Iterator[Tensor]:
        if self.shared is None:
            yield self.data
        if self.grad is not None:
            yield self.grad

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate memory again after ``free``. Parameters are uninitialised; the gradient is zero."""
        if not self.is_free:
            return
        for flat in self._resizable():
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())
        self.n_allocations += 1
        self.is_free = False
        for segment in self.segments:
            self.data[segment.end : segment.stop].zero_()
        if self.grad is not None:
            self.grad.zero_()


def _new_leaf(leaf: Tensor, total: Tensor) -> Tensor:
    """Return ``leaf`` as an autograd leaf that adds its gradient to ``total``, float32."""
    leaf.requires_grad_()
    if leaf.dtype == torch.float32:
        leaf.grad = total  # autograd adds to it in place
        return leaf

    def add_to_total(param: Tensor) -> None:
        if param.grad is not None:  # the log-probability head adds to the total itself
            total.add_(param.grad)
            param.grad = None

    leaf.register_post_accumulate_grad_hook(add_to_total)
    return leaf
