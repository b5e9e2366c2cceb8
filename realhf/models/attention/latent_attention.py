"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are products of a latent.

The cache stores latents. In training and prefill, keys and values are computed from them. In decoding, the products are
moved to the queries and to the result instead (section 2.1.2): attention over latents with one key head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import Latent, ModelConfig
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.column_parallel import column_parallel
from realhf.models.low_rank import Dropout, LowRank, linear
from realhf.ops.norms import rms_norm

NORM_EPS = 1e-6
"""Of the norms of latents, in every version of transformers."""


@dataclass(frozen=True)
class LatentProducts:
    """The weights that make queries, keys and values; ``wq`` and ``wkv`` are sharded by heads.

    ``wq`` is ``[H * d, q_rank]``, or ``[H * d, D]`` without ``q_a`` ``[q_rank, D]``; ``kv_a`` is
    ``[kv_rank + rotary, D]``, ``wkv`` ``[H * (d - rotary + value_dim), kv_rank]``.
    """

    wq: Tensor
    kv_a: Tensor
    kv_norm: Tensor
    wkv: Tensor
    q_a: Tensor | None = None
    q_norm: Tensor | None = None
    b_q_a: Tensor | None = None
    b_kv_a: Tensor | None = None
    q_adapter: LowRank | None = None
    q_a_adapter: LowRank | None = None
    kv_a_adapter: LowRank | None = None
    kv_adapter: LowRank | None = None

    def project(
        self, x: Tensor, config: ModelConfig, region: TensorParallelRegion, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        """Return this shard's queries ``[T, H, d]`` and the latents ``[T, kv_rank + rotary]`` of normalised tokens."""
        latent = latent_of(config)
        stored = linear(x, self.kv_a, self.b_kv_a, self.kv_a_adapter, dropout)
        inner, rotary = stored.split((latent.kv_rank, config.rotary_dims), 1)
        stored = torch.cat((rms_norm(inner, self.kv_norm, NORM_EPS), rotary), 1)
        if self.q_a is None or self.q_norm is None:
            q = column_parallel(region, x, self.wq, None, self.q_adapter, dropout)
            return q.unflatten(1, (-1, config.head_dim)), region.copy_to_tp(stored)
        low = rms_norm(linear(x, self.q_a, self.b_q_a, self.q_a_adapter, dropout), self.q_norm, NORM_EPS)
        low, stored = region.copy_to_tp(torch.cat((low, stored), 1)).split((low.shape[1], stored.shape[1]), 1)
        return linear(low, self.wq, None, self.q_adapter, dropout).unflatten(1, (-1, config.head_dim)), stored

    def expand(self, q: Tensor, stored: Tensor, config: ModelConfig, dropout: Dropout | None) -> Tensor:
        """Return queries, keys and values ``[T, 3 * H, d]``, values with zeros up to the size of a head."""
        latent, n_heads = latent_of(config), q.shape[1]
        inner, rotary = stored.split((latent.kv_rank, config.rotary_dims), 1)
        kv = linear(inner.contiguous(), self.wkv, None, self.kv_adapter, dropout).unflatten(1, (n_heads, -1))
        plain, v = kv.split((config.head_dim - config.rotary_dims, latent.value_dim), 2)
        k = torch.cat((rotary.unsqueeze(1).expand(-1, n_heads, -1), plain), 2)
        return torch.cat((q, k, F.pad(v, (0, config.head_dim - latent.value_dim))), 1)

    def absorb(self, q: Tensor, config: ModelConfig) -> Tensor:
        """Return rotated queries ``[T, H, d]`` as queries of latents, ``[T, H, kv_rank + rotary]``."""
        rotary, plain = q.split((config.rotary_dims, config.head_dim - config.rotary_dims), 2)
        keys, _ = self._by_head(q.shape[1], config)
        return torch.cat((torch.einsum("thn,hnr->thr", plain, keys), rotary), 2)

    def release(self, mixed: Tensor, config: ModelConfig) -> Tensor:
        """Return the values ``[T, H, value_dim]`` of mixed latents ``[T, H, kv_rank + rotary]``."""
        _, values = self._by_head(mixed.shape[1], config)
        return torch.einsum("thr,hvr->thv", mixed[..., : latent_of(config).kv_rank], values)

    def _by_head(self, n_heads: int, config: ModelConfig) -> tuple[Tensor, Tensor]:
        """Return the products of keys and values, ``[H, d - rotary, kv_rank]`` and ``[H, value_dim, kv_rank]``."""
        weight = self.wkv if self.kv_adapter is None else self.kv_adapter.merged(self.wkv)
        sizes = config.head_dim - config.rotary_dims, latent_of(config).value_dim
        keys, values = weight.detach().unflatten(0, (n_heads, -1)).split(sizes, 1)
        return keys, values


def latent_of(config: ModelConfig) -> Latent:
    assert config.latent is not None, "the model has no latent attention"
    return config.latent
