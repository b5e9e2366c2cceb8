"""AdamW on this worker's equal range of the flat parameters (ZeRO-1 and 2), or on its share of them (ZeRO-3)."""

import math
from collections.abc import Callable
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
from realhf.models.flat_params import FlatParams
from realhf.ops.adamw import AdamWStep, adamw_


def _multiplicity(params: FlatParams, name: str, context: ParallelContext) -> int:
    """Return the number of workers of one data-parallel replica that hold this worker's slice of a parameter."""
    strategy, spec, dp = context.layout.strategy, params.spec(name), context.coord.dp
    stages = 2 if spec.shared_layer is not None and strategy.pp > 1 else 1
    numbers = (strategy.shard_number(dp, tp) for tp in range(strategy.tp))
    boxes = [numbered_box(spec, strategy.tp, strategy.n_shards, number) for number in numbers]
    return boxes.count(params.box(name)) * stages


class SharedGradients:
    """Sums the partial gradients of parameters that several members of a replica hold.

    There are four kinds: key/value heads on several tensor-parallel ranks (each rank has its own query heads), a tied
    embedding on the first and last stage, unsharded halves of adapters (each rank has its share of the other half), and
    with sequence parallelism all unsharded parameters (each rank has its own tokens). Other replicated parameters have
    the full gradient already.
    """

    def __init__(self, params: FlatParams, context: ParallelContext, sequence_parallel: bool) -> None:
        self.params, self.context = params, context
        self.grad_view: Callable[[str], Tensor] = params.grad_view
        strategy = context.layout.strategy
        specs = [params.spec(name) for name in params.names]
        self.replicated_units = [
            s for s in specs if s.tp_dim is not None and (s.tp_units or s.shape[s.tp_dim]) < strategy.tp
        ]
        # the scalar head reads all tokens on every rank
        self.replicated = [
            s for s in specs
            if s.tp_dim is None and strategy.tp > 1
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


class ShardedAdamW:
    """The optimizer of one model on one data-parallel rank. State lives in float32, for this rank's range only.

    With ``overlap``, gradients are reduced during the backward pass by ``reduction``. With ``zero_stage`` 2 they are in
    ``owned``, and only the gradient of this range is kept. In a ZeRO-3 layout ``params`` are this rank's share, and all
    of it is its range. With ``config.offload`` the state of a GPU is in host memory, in ``offloaded``.
    """

    can_overlap = True

    def __init__(
        self, params: FlatParams, config: OptimizerConfig, context: ParallelContext, sequence: bool,
        overlap: bool = False, zero_stage: int = 1,
    ) -> None:  # fmt: skip
        self.params, self.config, self.context = params, config, context
        has_share = context.layout.strategy.zero3
        self.group = group = Group((context.rank,), context.rank) if has_share else context.group("dp")
        self.shared = SharedGradients(params, context, sequence)
        size = params.data.numel() // group.size
        assert size * group.size == params.data.numel(), "flat parameters are padded to a multiple of dp"
        self.start, self.stop = group.index * size, (group.index + 1) * size
        local = params.data[self.start : self.stop]
        is_offloaded = config.offload and local.is_cuda
        new = partial(torch.empty, size, device="cpu" if is_offloaded else local.device, pin_memory=is_offloaded)
        self.master = local if self._is_float32 else new(dtype=torch.float32).copy_(local)
        self.owned = owned_gradients(params, self.shared.names, group) if zero_stage == 2 else None
        if self.owned is not None:
            self.grad, self.shared.grad_view = self.owned.total, self.owned.late.view
        else:
            self.whole_grad = params.enable_grad()
            self.grad = self.whole_grad[self.start : self.stop]
        self.first, self.second = (new(dtype=torch.float32).zero_() for _ in range(2))
        hosted = [self.first, self.second] if self._is_float32 else [self.first, self.second, self.master]
        self.offloaded = ChunkedState(hosted, local.device) if is_offloaded else None
        self.steps = 0
        overlap = overlap and self.can_overlap and group.size > 1 and self.owned is None
        late = self.shared.names
        self.reduction = OverlappedReduction(params, self.whole_grad, group, late) if overlap else None
        self._repeats = [
            (slice(max(span.start, self.start) - self.start, min(span.stop, self.stop) - self.start), 1 - 1 / count)
            for name in params.names
            if (count := _multiplicity(params, name, context)) > 1
            and (span := params.span(name)).start < self.stop
            and span.stop > self.start
        ]
        self._n_decayed = min(max(params.n_matrix - self.start, 0), size)

    @property
    def _is_float32(self) -> bool:
        """Whether the weights are float32; they are their own master copy then."""
        return self.params.data.dtype == torch.float32

    @property
    def state(self) -> dict[str, Tensor]:
        """The state tensors of this range; the float32 master copy only for bfloat16 weights."""
        if self.offloaded is not None:
            self.offloaded.synchronize()
        return {"first": self.first, "second": self.second, **({} if self._is_float32 else {"master": self.master})}

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
            self.steps, lr, config.beta1, config.beta2, config.eps, config.weight_decay, self._n_decayed,
            scale=limit / norm if 0 < limit < norm else 1.0,
        ))  # fmt: skip
        return norm

    def discard(self) -> None:
        """Drop the accumulated gradient instead of a step. Collective."""
        if self.reduction is not None:
            self.reduction.finish()

    def _reduce(self) -> None:
        if self.reduction is not None:
            self.reduction.finish()
            return
        if self.owned is not None:
            self.owned.reduce_late()
            return
        self.group.reduce_scatter(self.grad, self.whole_grad)

    def _update(self, step: AdamWStep) -> None:
        local = self.params.data[self.start : self.stop]
        rounded = None if self._is_float32 else local
        if self.offloaded is None:
            adamw_(self.master, self.grad, self.first, self.second, step, rounded)
        else:
            for span, (first, second, *master) in self.offloaded.chunks():
                part = replace(step, n_decayed=min(max(step.n_decayed - span.start, 0), span.stop - span.start))
                weights = master[0] if master else local[span]
                adamw_(weights, self.grad[span], first, second, part, None if rounded is None else rounded[span])
        self.group.all_gather(self.params.data, local)

    def _global_norm(self) -> float:
        """Return the gradient norm of the whole model; elements that several workers hold count once."""

        parts = [self.grad, *(self.grad[part] for part, _ in self._repeats)]
        chunks = [part.split(CHUNK) for part in parts]
        norms = torch._foreach_norm([chunk for some in chunks for chunk in some], dtype=torch.float64)
        whole, *repeated = (some.square().sum() for some in torch.stack(norms).split([len(some) for some in chunks]))
        squares = whole - sum(some * excess for some, (_, excess) in zip(repeated, self._repeats, strict=True))
        for axis in ("dp", "tp", "pp"):
            squares = self.context.group(axis).all_reduce(squares.reshape(1))
        return float(squares.sqrt())
