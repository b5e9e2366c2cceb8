"""Parameters that several workers of one replica hold: whose gradients add up, how often each counts in the norm."""

from collections.abc import Sequence

import torch

from realhf.api.param_box import ParamSpec, box_shape, relative, shard_box, whole
from realhf.comm.p2p import P2PChannel
from realhf.comm.process_groups import ParallelContext
from realhf.models.flat_params import FlatParams


def multiplicity(spec: ParamSpec, context: ParallelContext) -> int:
    """Return how many workers of one data-parallel replica hold this worker's box of a parameter."""
    strategy, tp_rank = context.layout.strategy, context.coord.tp
    mine = shard_box(spec, strategy.tp, tp_rank)
    across = sum(shard_box(spec, strategy.tp, rank) == mine for rank in range(strategy.tp))
    stages = 2 if spec.shared_layer is not None and strategy.pp > 1 else 1
    return across * stages


class SharedGradients:
    """Adds up what members of a replica found for the same weights.

    Three kinds are shared in parts: key/value heads that several tensor-parallel ranks hold (each sees its own query
    heads), a tied embedding on the first and last stage, and with sequence parallelism whatever is not cut (each rank
    sees its own tokens). Other replicated weights have the full gradient already.
    """

    def __init__(self, params: FlatParams, context: ParallelContext, sequence_parallel: bool) -> None:
        self.params, self.context = params, context
        strategy = context.layout.strategy
        specs = [params.spec(name) for name in params.names]
        self.heads: Sequence[ParamSpec] = [
            s for s in specs if s.tp_dim is not None and (s.tp_units or s.shape[s.tp_dim]) < strategy.tp
        ]
        # the scalar head reads all tokens on every rank
        self.uncut = [s for s in specs if s.tp_dim is None and s.shape[0] > 1] if sequence_parallel else []
        self.tied = [s for s in specs if s.shared_layer is not None and strategy.pp > 1]
        stages = context.layout.axis("pp", context.rank)
        self.other_end = stages[-1] if context.coord.pp == 0 else stages[0]
        self.wires = P2PChannel(context.device, context.activity)

    @torch.no_grad()
    def add_up(self) -> None:
        """Replace the gradients of shared weights by their sums. Collective over the replica."""
        for spec in self.heads:
            mine, box = self.params.grad_view(spec.name), self.params.box(spec.name)
            total = torch.zeros(spec.shape, device=mine.device)
            place = relative(box, whole(spec.shape))
            total[place] = mine
            mine.copy_(self.context.group("tp").all_reduce(total)[place])
        if self.uncut:
            views = [self.params.grad_view(spec.name) for spec in self.uncut]
            total = self.context.group("tp").all_reduce(torch.cat([view.reshape(-1) for view in views]))
            for view, part in zip(views, total.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view_as(view))
        for spec in self.tied:
            mine = self.params.grad_view(spec.name)
            self.wires.send(mine, self.other_end)
            other = self.wires.receive(box_shape(self.params.box(spec.name)), mine.dtype, self.other_end)
            self.wires.flush()
            mine.add_(other)
