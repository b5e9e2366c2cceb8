"""Parameters that several workers of one replica hold: their gradients are summed and count once in the norm."""

import torch

from realhf.api.param_box import box_shape, relative, whole
from realhf.comm.p2p import P2PChannel
from realhf.comm.process_groups import ParallelContext
from realhf.models.flat_params import FlatParams


def multiplicity(params: FlatParams, name: str, context: ParallelContext) -> int:
    """Return the number of workers of one data-parallel replica that hold this worker's slice of a parameter."""
    strategy = context.layout.strategy
    stages = 2 if params.spec(name).shared_layer is not None and strategy.pp > 1 else 1
    return params.n_holders(name, strategy.tp) * stages


class SharedGradients:
    """Sums the partial gradients of parameters that several members of a replica hold.

    There are three kinds: key/value heads on several tensor-parallel ranks (each rank has its own query heads), a tied
    embedding on the first and last stage, and with sequence parallelism all unsharded parameters (each rank has its own
    tokens). Other replicated parameters have the full gradient already.
    """

    def __init__(self, params: FlatParams, context: ParallelContext, sequence_parallel: bool) -> None:
        self.params, self.context = params, context
        strategy = context.layout.strategy
        specs = [params.spec(name) for name in params.names]
        self.replicated_units = [
            s for s in specs if s.tp_dim is not None and (s.tp_units or s.shape[s.tp_dim]) < strategy.tp
        ]
        # the scalar head reads all tokens on every rank
        self.replicated = [s for s in specs if s.tp_dim is None and s.shape[0] > 1] if sequence_parallel else []
        self.tied = [s for s in specs if s.shared_layer is not None and strategy.pp > 1]
        stages = context.layout.axis("pp", context.rank)
        self.peer = stages[-1] if context.coord.pp == 0 else stages[0]
        self.p2p = P2PChannel(context.device, context.activity)

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Replace the gradients of shared parameters by their sums. Collective over the replica."""
        for spec in self.replicated_units:
            grad = self.params.grad_view(spec.name)
            total = torch.zeros(spec.shape, device=grad.device)
            local = relative(self.params.box(spec.name), whole(spec.shape))
            total[local] = grad
            grad.copy_(self.context.group("tp").all_reduce(total)[local])
        if self.replicated:
            grads = [self.params.grad_view(spec.name) for spec in self.replicated]
            total = self.context.group("tp").all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        for spec in self.tied:
            grad = self.params.grad_view(spec.name)
            self.p2p.send(grad, self.peer)
            other = self.p2p.receive(box_shape(self.params.box(spec.name)), grad.dtype, self.peer)
            self.p2p.flush()
            grad.add_(other)
