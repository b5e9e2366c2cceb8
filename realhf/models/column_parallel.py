"""Column-parallel products whose communication overlaps with the gradients of their weights.

The gradient of the input is summed over the tensor-parallel group while the gradient of the weight is computed
(Megatron-LM, Narayanan et al. 2021). With sequence parallelism only this rank's tokens are saved, and all of them are
gathered again while the gradient of the input is computed (Korthikanti et al. 2022, section 4.2.2).
"""

from typing import Any

import torch
from torch import Tensor

from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.low_rank import Dropout, LowRank, linear
from realhf.models.quantized_matrix import Matrix, product


def column_parallel(
    region: TensorParallelRegion,
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    adapter: LowRank | None,
    dropout: Dropout | None,
) -> Tensor:
    """Return ``x @ weight.T + bias`` of all tokens ``[T, out]``; ``x`` has this rank's tokens ``[t, in]``.

    Frozen weights have no gradient that communication could overlap with; neither has a pass without gradients.
    """
    is_trained = isinstance(weight, Tensor) and weight.requires_grad and torch.is_grad_enabled()
    if not region.overlaps or region.group.size == 1 or not is_trained or adapter is not None:
        return linear(region.copy_to_tp(x), weight, bias, adapter, dropout)
    inputs = _SavedInputs.apply(x, weight)
    return _ColumnParallel.apply(inputs, weight, bias, region)


class _SavedInputs(torch.autograd.Function):
    """Saves the inputs of a product before it is computed. Selective recomputation stops here, before the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ColumnParallel(torch.autograd.Function):
    """The product of the output of ``_SavedInputs``, in whose node it finds its inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, region: TensorParallelRegion) -> Tensor:
        ctx.saved, ctx.has_bias, ctx.region = x.grad_fn, bias is not None, region
        return product(region.all_gather_tokens(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (grad,), (x, weight) = grads, ctx.saved.saved_tensors
        gathering = ctx.region.start_all_gather_tokens(x)
        input_grad = grad.mm(weight)
        tokens = gathering.wait()
        reduction = ctx.region.start_reduce_scatter_tokens(input_grad)
        weight_grad = grad.t().mm(tokens)
        bias_grad = grad.sum(0) if ctx.has_bias else None
        return reduction.wait(), weight_grad, bias_grad, None
