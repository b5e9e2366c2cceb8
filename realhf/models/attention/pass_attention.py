"""The attention of one pass through a stage: of packed rows, of one new token per slot, or of new tokens of one row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.attention.delta_mixer import DeltaCache, DeltaMixer
from realhf.models.attention.latent_attention import LatentProducts
from realhf.models.attention.stage_rotary import Rotation
from realhf.models.blocks import Attention, Block, LinearAttention
from realhf.models.kv_cache import KVCache
from realhf.models.low_rank import Dropout
from realhf.ops.attention import ScoreParams, attend_to_prefix, decode_attention, decode_bias, rotary_attention
from realhf.ops.cascade import SharedPrefixes
from realhf.ops.delta.delta_rows import DeltaRows
from realhf.ops.rows import RowLayout
from realhf.ops.varlen import CachedRows


@dataclass(frozen=True)
class StageAttention:
    """What all passes through a stage share: sizes of this shard, and the score rules and weights of its blocks."""

    config: ModelConfig
    n_q: int
    n_kv: int
    rules: tuple[ScoreParams, ...]
    blocks: tuple[Block, ...]
    places: tuple[int, ...]
    """The place of every block in its cache, among the blocks with attention or those with the gated delta rule."""

    def sinks(self, block: int) -> Tensor | None:
        return self._weights(block).sinks

    def latent(self, block: int) -> LatentProducts:
        found = self._weights(block).latent
        assert found is not None, "the model has no latent attention"
        return found

    def _weights(self, block: int) -> Attention:
        found = self.blocks[block].attention
        assert isinstance(found, Attention)
        return found

    def mixer(self, block: int) -> DeltaMixer:
        found = self.blocks[block].attention
        assert isinstance(found, LinearAttention)
        return found.mixer

    def mix_from(
        self, block: int, projected: Tensor, region: TensorParallelRegion, rows: DeltaRows, cache: DeltaCache,
        slots: Tensor, is_new: bool,
    ) -> Tensor:  # fmt: skip
        """Return a ``DeltaMixer``'s outputs of rows that continue what their slots store, or replace it."""
        place, mixer = self.places[block], self.mixer(block)
        before = cache.read(place, slots)
        if is_new:
            before = before[0].zero_(), before[1].zero_()
        mixed, behind = mixer.mix(projected, self.config, region, rows, before)
        assert behind is not None
        cache.write(place, slots, behind)
        return mixed

    def rotated(self, block: int, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, of ``qkv`` ``[T, n_q + 2 * n_kv, d]``."""
        qk, v = rotation.grow(qkv, self.n_q).split((self.n_q + self.n_kv, self.n_kv), 1)
        q, k = rotation(block, qk).split((self.n_q, self.n_kv), 1)
        return q, k, v

    def store_latents(self, block: int, latents: Tensor, rotation: Rotation, cache: KVCache, indices: Tensor) -> None:
        """Write latents ``[T, kv_rank + rotary]`` to a cache, the rotary part after the rotation."""
        inner, rotary = latents.unsqueeze(1).split(
            (latents.shape[1] - self.config.rotary_dims, self.config.rotary_dims), 2
        )
        cache.write(self.places[block], indices, torch.cat((inner, rotation(block, rotary)), 2))


@dataclass(frozen=True)
class PackedPass:
    """Attention within packed rows, whose keys and values (or latents) are stored in a ``cache`` if there is one."""

    stage: StageAttention
    layout: RowLayout
    rotation: Rotation
    cache: KVCache | None
    indices: Tensor | None
    dropout: Dropout | None
    delta_rows: DeltaRows | None = None
    slots: Tensor | None = None

    def __call__(self, block: int, qkv: Tensor) -> Tensor:
        n_q, n_kv = self.stage.n_q, self.stage.n_kv
        if self.cache is not None and self.indices is not None:
            _, k, v = qkv.split((n_q, n_kv, n_kv), 1)
            self.cache.write(self.stage.places[block], self.indices, self.rotation(block, k), v)
        return self._attend(block, self.rotation.grow(qkv, n_q))

    def _attend(self, block: int, qkv: Tensor) -> Tensor:
        rows, angles = self.layout, self.rotation.tables[block]
        return rotary_attention(
            qkv, self.stage.n_q, self.stage.n_kv, rows.lengths, self.stage.rules[block], rows.prefixes, angles, rows,
            self.stage.sinks(block),
        )  # fmt: skip

    def of_latents(self, block: int, q: Tensor, latents: Tensor) -> Tensor:
        if self.cache is not None and self.indices is not None:
            self.stage.store_latents(block, latents, self.rotation, self.cache, self.indices)
        config = self.stage.config
        qkv = self.stage.latent(block).expand(q, latents, config, self.dropout)
        return self._attend(block, qkv)[..., : config.value_dim]

    def of_delta(self, block: int, projected: Tensor, region: TensorParallelRegion) -> Tensor:
        rows, cache = self.delta_rows, None if self.cache is None else self.cache.delta
        assert rows is not None
        if cache is None or self.slots is None:
            return self.stage.mixer(block).mix(projected, self.stage.config, region, rows)[0]
        return self.stage.mix_from(block, projected, region, rows, cache, self.slots, is_new=True)


class DecodePass:
    """Attention of one token per slot, at ``positions`` ``[S]`` below ``longest``, to its slot's tokens.

    With a kernel (``rows``) only the used part of the cache is read, and common ``prefixes`` once.
    """

    def __init__(
        self,
        stage: StageAttention,
        rotation: Rotation,
        cache: KVCache,
        slots: Tensor,
        positions: Tensor,
        longest: int,
        rows: CachedRows | None,
        prefixes: Tensor | SharedPrefixes | None,
    ) -> None:
        self._stage, self._rotation, self._cache, self._rows, self._prefixes = stage, rotation, cache, rows, prefixes
        self._longest, self._count, self._positions = longest, len(positions), positions
        self._indices = cache.indices(slots, positions)
        self._biases: dict[int, Tensor] = {}

    def __call__(self, block: int, qkv: Tensor) -> Tensor:
        q, k, v = self._stage.rotated(block, qkv, self._rotation)
        place = self._stage.places[block]
        self._cache.write(place, self._indices, k, v)
        if self._rows is None:
            return self._attend(block, q)
        rule, keys, values = self._stage.rules[block], self._cache.k[place], self._cache.v[place]
        scale = rule.scale_for(self._stage.config.head_dim)
        if isinstance(self._prefixes, SharedPrefixes):
            used, kernel = self._rows.used, self._rows.kernel
            return self._prefixes.attend(kernel, q, keys, values, used, self._longest, scale, rule.softcap)
        return self._rows.attend(q, keys, values, self._longest, scale, rule.rule)

    def _attend(self, block: int, q: Tensor) -> Tensor:
        rule, place = self._stage.rules[block], self._stage.places[block]
        keys, values = (store[place, : self._count].to(q.dtype) for store in (self._cache.k, self._cache.v))
        return decode_attention(q, keys, values, self._bias(rule.window, q.dtype), rule, self._stage.sinks(block))

    def _bias(self, window: int, dtype: torch.dtype) -> Tensor:
        """Return the ``decode_bias`` that blocks with this window share."""
        if window not in self._biases:
            n_kv = 1 if self._stage.config.latent else self._stage.n_kv
            bias = decode_bias(self._positions, self._longest, n_kv, window)
            self._biases[window] = bias.to(dtype)
        return self._biases[window]

    def of_latents(self, block: int, q: Tensor, latents: Tensor) -> Tensor:
        self._stage.store_latents(block, latents, self._rotation, self._cache, self._indices)
        products, config = self._stage.latent(block), self._stage.config
        mixed = self._attend(block, products.absorb(self._rotation(block, q), config))
        return products.release(mixed, config)

    def of_delta(self, block: int, projected: Tensor, region: TensorParallelRegion) -> Tensor:
        place, cache, count = self._stage.places[block], self._cache.delta, self._count
        assert cache is not None
        tails, states = cache.tails[place, :count], cache.states[place, :count]
        return self._stage.mixer(block).step(projected, self._stage.config, region, tails, states)


@dataclass(frozen=True)
class ExtendPass:
    """Attention of new tokens of one row to all tokens of the row below ``stop``, which ``slot`` stores."""

    stage: StageAttention
    rotation: Rotation
    cache: KVCache
    indices: Tensor
    slot: int
    stop: int
    delta_rows: DeltaRows | None = None

    def __call__(self, block: int, qkv: Tensor) -> Tensor:
        q, k, v = self.stage.rotated(block, qkv, self.rotation)
        self.cache.write(self.stage.places[block], self.indices, k, v)
        return self._attend(block, q)

    def _attend(self, block: int, q: Tensor) -> Tensor:
        keys, values = self.cache.first(self.stage.places[block], self.slot, self.stop)
        keys, values = keys.to(q.dtype), values.to(q.dtype)
        return attend_to_prefix(q, keys, values, self.stage.rules[block], self.stage.sinks(block))

    def of_latents(self, block: int, q: Tensor, latents: Tensor) -> Tensor:
        self.stage.store_latents(block, latents, self.rotation, self.cache, self.indices)
        products, config = self.stage.latent(block), self.stage.config
        return products.release(self._attend(block, products.absorb(self.rotation(block, q), config)), config)

    def of_delta(self, block: int, projected: Tensor, region: TensorParallelRegion) -> Tensor:
        assert self.delta_rows is not None and self.cache.delta is not None
        slots = torch.full((1,), self.slot, device=projected.device)
        return self.stage.mix_from(block, projected, region, self.delta_rows, self.cache.delta, slots, is_new=False)
