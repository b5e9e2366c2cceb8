"""AdamW on this worker's equal range of the flat parameters (ZeRO-1 and 2), or on its share of them (ZeRO-3).

Experts that are divided over data-parallel ranks have a range of their own, among the ranks with the same experts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from realhf.api.config import OptimizerConfig
from realhf.api.param_box import numbered_box, relative, whole
from realhf.arch.lora import is_adapter, other_half
from realhf.comm.p2p import P2PChannel
from realhf.comm.process_groups import Group, ParallelContext
from realhf.models.engine.grad_reduction import OverlappedReduction
from realhf.models.engine.optimizer_offload import ChunkedState
from realhf.models.engine.zero_stages import owned_gradients
from realhf.models.flat_params import FlatParams, Segment
from realhf.ops.adamw import AdamWStep, adamw_


def _multiplicity(params: FlatParams, name: str, context: ParallelContext) -> int:
    """Return the number of workers of one data-parallel replica that hold this worker's slice of a parameter."""
    stages = 2 if params.spec(name).shared_layer is not None and context.layout.strategy.pp > 1 else 1
    return _tp_holders(params, name, context) * stages


def _tp_holders(params: FlatParams, name: str, context: ParallelContext) -> int:
    """Return the number of tensor-parallel ranks that hold this worker's slice of a parameter."""
    strategy, spec, dp = context.layout.strategy, params.spec(name), context.coord.dp
    numbers = (strategy.shard_number(dp, tp) for tp in range(strategy.cuts.tp))
    return [numbered_box(spec, strategy.cuts, number) for number in numbers].count(params.box(name))


class SharedGradients:
    """Sums the partial gradients of parameters that several members of a replica hold.

    There are four kinds: key/value heads on several tensor-parallel ranks (each rank has its own query heads), a tied
    embedding on the first and last stage, unsharded halves of adapters (each rank has its share of the other half), and
    with sequence parallelism all unsharded parameters (each rank has its own tokens). Other replicated parameters have
    the full gradient already. Experts divided over tensor-parallel ranks differ between them, like key/value heads.
    """

    def __init__(self, params: FlatParams, context: ParallelContext, sequence_parallel: bool) -> None:
        self.params, self.context = params, context
        self.grad_view: Callable[[str], Tensor] = params.grad_view
        strategy, tp = context.layout.strategy, context.layout.strategy.cuts.tp
        specs = [params.spec(name) for name in params.names]
        divided = [s for s in specs if s.is_expert and strategy.ep > 1]
        self.replicated_units = [
            s for s in specs
            if s not in divided and s.tp_dim is not None and (s.tp_units or s.shape[s.tp_dim]) < tp
            or s in divided and _tp_holders(params, s.name, context) > 1
        ]  # fmt: skip
        # the scalar head reads all tokens on every rank
        self.replicated = [
            s for s in specs
            if s not in divided and s.tp_dim is None and tp > 1
            and (sequence_parallel and s.name != "head.weight" or self._is_half_of_sharded(s.name))
        ]  # fmt: skip
        self.tied = [s for s in specs if s.shared_layer is not None and strategy.pp > 1]
        stages = context.layout.axis("pp", context.rank)
        self.peer = stages[-1] if context.coord.pp == 0 else stages[0]
        self.p2p = P2PChannel(context.device, context.activity)

    def _is_half_of_sharded(self, name: str) -> bool:
        """Return True for an adapter's half whose other half is sharded; adapters of replicated products have none."""
        if not is_adapter(name):
            return False
        other = other_half(name)
        return other not in self.params.names or self.params.spec(other).tp_dim is not None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(spec.name for spec in (*self.replicated_units, *self.replicated, *self.tied))

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Replace the gradients of shared parameters by their sums. Collective over the replica."""
        for spec in self.replicated_units:
            grad = self.grad_view(spec.name)
            total = torch.zeros(spec.shape, device=grad.device)
            local = relative(self.params.box(spec.name), whole(spec.shape))
            total[local] = grad
            grad.copy_(self.context.group("tp").all_reduce(total)[local])
        if self.replicated:
            grads = [self.grad_view(spec.name) for spec in self.replicated]
            total = self.context.group("tp").all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        for spec in self.tied:
            grad = self.grad_view(spec.name)
            grad.add_(self.p2p.swap(grad, self.peer))


CHUNK = 1 << 18
"""Elements per chunk of the gradient norm, which converts to float64; a GPU computes many chunks in one launch."""
EXPERTS = "experts."
"""Prefix of the names of state tensors of the second range."""


class AdamWRange:
    """This worker's equal range of a segment of the flat parameters, which the members of ``group`` share.

    State is float32, on the device or, with ``config.offload`` on a GPU, in host memory and ``offloaded``.
    """

    def __init__(self, params: FlatParams, segment: Segment, group: Group, config: OptimizerConfig) -> None:
        self.group, self.whole = group, params.data[segment.start : segment.stop]
        size = len(self.whole) // group.size
        assert size * group.size == len(self.whole), "segments are padded to a multiple of their replicas"
        self.start = segment.start + group.index * size
        self.stop = self.start + size
        self.weights = params.data[self.start : self.stop]
        is_offloaded, is_float32 = config.offload and self.weights.is_cuda, self.weights.dtype == torch.float32
        new = partial(torch.empty, size, device="cpu" if is_offloaded else self.weights.device, pin_memory=is_offloaded)
        self.master = self.weights if is_float32 else new(dtype=torch.float32).copy_(self.weights)
        self.first, self.second = (new(dtype=torch.float32).zero_() for _ in range(2))
        self.hosted = [self.first, self.second] if is_float32 else [self.first, self.second, self.master]
        self.offloaded = ChunkedState(self.hosted, self.weights.device) if is_offloaded else None
        self.n_decayed = min(max(segment.n_matrix - self.start, 0), size)

    @property
    def state(self) -> dict[str, Tensor]:
        """The state tensors; the float32 master copy only for bfloat16 weights."""
        if self.offloaded is not None:
            self.offloaded.synchronize()
        return dict(zip(("first", "second", "master"), self.hosted, strict=False))

    def update(self, grad: Tensor, step: AdamWStep) -> None:
        """Make a step with the gradient of this range, and gather the weights of all ranges. Collective."""
        step = replace(step, n_decayed=self.n_decayed)
        rounded = None if self.master is self.weights else self.weights
        if self.offloaded is None:
            adamw_(self.master, grad, self.first, self.second, step, rounded)
        else:
            for span, (first, second, *master) in self.offloaded.chunks():
                part = replace(step, n_decayed=min(max(step.n_decayed - span.start, 0), span.stop - span.start))
                weights = master[0] if master else self.weights[span]
                adamw_(weights, grad[span], first, second, part, None if rounded is None else rounded[span])
        self.group.all_gather(self.whole, self.weights)


class ShardedAdamW:
    """The optimizer of one model on one data-parallel rank. State lives in float32, for this rank's ranges only.

    With ``overlap``, gradients are reduced during the backward pass by ``reduction``. With ``zero_stage`` 2 they are in
    ``owned``, and only the gradient of this range is kept. In a ZeRO-3 layout ``params`` are this rank's share, and all
    of it is its range. ``start``, ``stop``, ``group`` and the state are those of the first range; a second one is of
    experts.
    """

    can_overlap = True

    def __init__(
        self, params: FlatParams, config: OptimizerConfig, context: ParallelContext, sequence: bool,
        overlap: bool = False, zero_stage: int = 1,
    ) -> None:  # fmt: skip
        self.params, self.config, self.context = params, config, context
        has_share = context.layout.strategy.zero3
        self.group = group = Group((context.rank,), context.rank) if has_share else context.group("replicas")
        self.shared = SharedGradients(params, context, sequence)
        groups = [group, *([context.group("edp")] if len(params.segments) > 1 else [])]
        self.ranges = [AdamWRange(params, *pair, config) for pair in zip(params.segments, groups, strict=True)]
        main = self.ranges[0]
        self.start, self.stop, self.offloaded = main.start, main.stop, main.offloaded
        self.master, self.first, self.second = main.master, main.first, main.second
        self.owned = owned_gradients(params, self.shared.names, group) if zero_stage == 2 else None
        if self.owned is not None:
            assert len(self.ranges) == 1, "ZeRO-2 and experts divided over data-parallel ranks are refused together"
            self.grad, self.shared.grad_view = self.owned.total, self.owned.late.view
        else:
            whole_grad = params.enable_grad()
            self.whole_grad = whole_grad[: params.segments[0].stop]
            self.grad = whole_grad[self.start : self.stop]
        self.steps = 0
        overlap = overlap and self.can_overlap and group.size > 1 and self.owned is None
        late = self.shared.names
        self.reduction = OverlappedReduction(params, self.whole_grad, group, late) if overlap else None
        self._repeats = [
            (piece, 1 - 1 / count)
            for name in params.names
            if (count := _multiplicity(params, name, context)) > 1
            if (piece := self._owned_piece(params.span(name))) is not None
        ]

    def _owned_piece(self, span: range) -> slice | None:
        """Return the elements of the first range that belong to a parameter; experts have one holder."""
        start, stop = max(span.start, self.start), min(span.stop, self.stop)
        return slice(start - self.start, stop - self.start) if start < stop else None

    @property
    def grads(self) -> list[Tensor]:
        """The gradients of the ranges."""
        if len(self.ranges) == 1:
            return [self.grad]
        assert self.params.grad is not None
        return [self.grad, *(self.params.grad[some.start : some.stop] for some in self.ranges[1:])]

    @property
    def state(self) -> dict[str, Tensor]:
        """The state tensors of the ranges, those of experts as ``experts.first`` and so on."""
        state = self.ranges[0].state
        for some in self.ranges[1:]:
            state |= {f"{EXPERTS}{name}": tensor for name, tensor in some.state.items()}
        return state

    def zero_grad(self) -> None:
        if self.owned is not None:
            self.owned.zero()
        else:
            self.params.zero_grad()

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Make one step with the accumulated gradient and return its global norm before clipping. Collective."""
        self.shared.all_reduce()
        self._reduce()
        norm = self._global_norm()
        if not math.isfinite(norm):
            raise ValueError(f"the gradient norm is {norm}: lower the learning rate or check the rewards and data")
        limit, config = self.config.gradient_clipping, self.config
        self.steps += 1
        self._update(AdamWStep(
            self.steps, lr, config.beta1, config.beta2, config.eps, config.weight_decay, n_decayed=0,
            scale=limit / norm if 0 < limit < norm else 1.0,
        ))  # fmt: skip
        return norm

    @torch.no_grad()
    def balance_experts(self, loads: Mapping[int, Tensor], rate: float) -> None:
        """Move the bias of every expert's choice by ``rate`` towards equal loads (arXiv 2412.19437, section 2.1.2).

        ``loads`` are the tokens of the step per expert, ``[E]``, by routed layer. The weights of all replicas change
        with the step that follows.
        """
        main = self.ranges[0]
        for name in [name for name in self.params.names if name.endswith(".choice_bias") and rate]:
            load = loads[self.params.spec(name).layer - 1]
            ((first, last),) = self.params.box(name)
            moved = rate * torch.sign(load.mean() - load)[first:last].to(main.master)
            span = self.params.span(name)
            if (piece := self._owned_piece(span)) is not None:
                start = piece.start + main.start - span.start
                main.master[piece] += moved[start : start + piece.stop - piece.start]

    def discard(self) -> None:
        """Drop the accumulated gradient instead of a step. Collective."""
        if self.reduction is not None:
            self.reduction.finish()

    def _reduce(self) -> None:
        if self.reduction is not None:
            self.reduction.finish()
        elif self.owned is not None:
            self.owned.reduce_late()
        else:
            self.group.reduce_scatter(self.grad, self.whole_grad)
        for some, segment, grad in zip(self.ranges[1:], self.params.segments[1:], self.grads[1:], strict=True):
            assert self.params.grad is not None
            some.group.reduce_scatter(grad, self.params.grad[segment.start : segment.stop])

    def _update(self, step: AdamWStep) -> None:
        for some, grad in zip(self.ranges, self.grads, strict=True):
            some.update(grad, step)

    def _global_norm(self) -> float:
        """Return the gradient norm of the whole model; elements that several workers hold count once."""
        grads = self.grads
        parts = [*grads, *(self.grad[part] for part, _ in self._repeats)]
        chunks = [part.split(CHUNK) for part in parts]
        norms = torch._foreach_norm([chunk for some in chunks for chunk in some], dtype=torch.float64)
        sums = [some.square().sum() for some in torch.stack(norms).split([len(some) for some in chunks])]
        excess = sum(some * part for some, (_, part) in zip(sums[len(grads) :], self._repeats, strict=True))
        squares = sum(sums[1 : len(grads)], sums[0]) - excess
        for axis in ("dp", "tp", "pp"):
            squares = self.context.group(axis).all_reduce(squares.reshape(1))
        return float(squares.sqrt())
