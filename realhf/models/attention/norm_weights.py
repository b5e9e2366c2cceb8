"""Norms of hidden states, and of the queries and keys of heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.ops.norms import rms_norm


@dataclass(frozen=True)
class Norm:
    """A layer norm or RMS norm over the last dimension; ``offset`` is added to the weight of an RMS norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float
    is_layer_norm: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_layer_norm:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, self.offset)


def normalise(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def norm_heads(norm: Norm, x: Tensor, region: TensorParallelRegion) -> Tensor:
    """Normalise each head of ``x`` ``[T, heads, d]``, or all of them together on a single rank (by the weight's size).

    The weight of a head is replicated, but each rank sees only its own heads: its gradient is summed over the group,
    here or, with sequence parallelism, together with those of all replicated parameters.
    """
    weight = norm.weight if region.sequence else region.copy_to_tp(norm.weight)
    return rms_norm(x.reshape(-1, len(weight)), weight, norm.eps, norm.offset).view(x.shape)


def norm_projections(
    norms: tuple[Norm, Norm], q: Tensor, k: Tensor, config: ModelConfig, region: TensorParallelRegion, kv_holders: int
) -> tuple[Tensor, Tensor]:
    """Normalise queries and keys ``[T, heads, d]`` over the heads of all tensor-parallel ranks.

    Sums of squares are all-reduced in both directions: outputs depend on all inputs. Repeated key heads count once.
    """
    sums = torch.stack((_sum_of_squares(q), _sum_of_squares(k) / kv_holders), 1)
    q_sum, k_sum = region.copy_to_tp(region.reduce_from_tp(sums)).unbind(1)
    return (
        _scaled(norms[0], q, q_sum / (config.n_heads * config.head_dim)),
        _scaled(norms[1], k, k_sum / (config.n_kv_heads * config.head_dim)),
    )


def _sum_of_squares(x: Tensor) -> Tensor:
    return x.float().square().sum((1, 2))


def _scaled(norm: Norm, x: Tensor, mean_square: Tensor) -> Tensor:
    scale = torch.rsqrt(mean_square + norm.eps)[:, None, None]
    return (x.float() * scale * (norm.weight.float() + norm.offset).view(x.shape[1:])).to(x.dtype)
