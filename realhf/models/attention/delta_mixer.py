"""The gated delta rule as what a block has instead of attention (Yang et al. 2024, arXiv 2412.06464, section 3.4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import GatedDelta, ModelConfig
from realhf.api.param_box import box_shape
from realhf.arch.decode_kernel import fits_delta
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.flat_params import FlatParams
from realhf.models.low_rank import LowRank
from realhf.models.quantized_matrix import Matrix
from realhf.ops import extension
from realhf.ops.activations import activate
from realhf.ops.delta.convolution import activated_convolution, convolution_step
from realhf.ops.delta.delta_rows import DeltaRows
from realhf.ops.delta.gated_delta_rule import delta_step, mixed_delta_rule
from realhf.ops.norms import rms_norm


@dataclass(frozen=True)
class DeltaMixer:
    """The weights of this shard, which has Hk key and Hv value heads.

    ``w_in`` ``[2 * Hk * dk + 2 * Hv * dv + 2 * Hv, D]`` makes queries, keys, values, gates, rates and decays. ``conv``
    is ``[2 * Hk * dk + Hv * dv, 1, kernel]``, ``a_log`` and ``dt_bias`` are ``[Hv]``, ``norm`` of heads is ``[dv]``.
    """

    w_in: Matrix
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    adapter: LowRank | None = None

    def mix(
        self,
        projected: Tensor,
        config: ModelConfig,
        region: TensorParallelRegion,
        rows: DeltaRows,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the gated outputs of packed rows ``[T, Hv * dv]``, of products ``projected`` with ``w_in``.

        ``before`` are the last inputs of the convolution and the states before the rows, ``[B, kernel - 1, C]`` and
        ``[B, Hv, dk, dv]``; None: zeros. With them, also returns those behind the rows.
        """
        mixed, gates, rates, decays = self._split(projected, delta_of(config))
        tails, states = before or (None, None)
        mixed, tails = activated_convolution(mixed, self.conv, config.activation, rows, tails)
        sizes = delta_of(config).key_dim, delta_of(config).value_dim
        outputs, states = mixed_delta_rule(mixed, decays, rates, sizes, rows, states)
        return self._gated(outputs, gates, config, region), None if tails is None else (tails, states)

    def step(
        self, projected: Tensor, config: ModelConfig, region: TensorParallelRegion, tails: Tensor, states: Tensor
    ) -> Tensor:
        """Return ``mix`` of one token per slot ``[S, Hv * dv]``; ``tails`` and ``states`` change in place."""
        if (kernel := self._step_kernel(projected, config)) is not None:
            weights = self.conv, self.a_log, self.dt_bias, self.norm
            return kernel(projected.contiguous(), *weights, tails, states, config.norm_eps)
        mixed, gates, rates, decays = self._split(projected, delta_of(config))
        heads = self._heads(convolution_step(mixed, self.conv, tails), config)
        return self._gated(delta_step(*heads, decays, rates, states), gates, config, region)

    def _step_kernel(self, projected: Tensor, config: ModelConfig) -> Callable[..., Tensor] | None:
        delta = delta_of(config)
        fits = config.activation == "silu" and fits_delta(delta.key_dim, delta.value_dim)
        fits = fits and projected.dtype == self.conv.dtype and projected.dtype in (torch.float32, torch.bfloat16)
        return extension.kernel("delta_step", projected.device.type) if fits else None

    def _split(self, projected: Tensor, delta: GatedDelta) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs of the convolution, gates ``[T, Hv * dv]``, and rates and log-decays ``[T, Hv]``."""
        n_values = len(self.a_log)
        sizes = len(self.conv), n_values * delta.value_dim, n_values, n_values
        mixed, gates, rates, decays = projected.split(sizes, 1)
        decays = -self.a_log.float().exp() * F.softplus(decays.float() + self.dt_bias.float())
        return mixed, gates, rates.sigmoid(), decays

    def _heads(self, mixed: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
        delta, n_values = delta_of(config), len(self.a_log)
        mixed = activate(mixed, config.activation, gated=False)
        keys = n_values * delta.key_heads // delta.value_heads * delta.key_dim
        q, k, v = mixed.split((keys, keys, n_values * delta.value_dim), 1)
        return (
            q.unflatten(1, (-1, delta.key_dim)),
            k.unflatten(1, (-1, delta.key_dim)),
            v.unflatten(1, (n_values, delta.value_dim)),
        )

    def _gated(self, outputs: Tensor, gates: Tensor, config: ModelConfig, region: TensorParallelRegion) -> Tensor:
        """Normalise the outputs of heads ``[T, Hv, dv]`` and multiply them by their gates.

        The norm is replicated, but each rank sees only its heads: as in ``blocks``, gradients are summed here or, with
        sequence parallelism, with those of all replicated parameters.
        """
        weight = self.norm if region.sequence else region.copy_to_tp(self.norm)
        normed = rms_norm(outputs.to(gates.dtype).reshape(-1, outputs.shape[-1]), weight, config.norm_eps)
        return (normed.view(gates.shape) * F.silu(gates.float())).to(gates.dtype)


class DeltaCache:
    """The rule's memory of the rows in the slots of a stage's blocks with it.

    ``tails`` are the last inputs of convolutions, ``[L, n_slots, kernel - 1, C]``; ``states`` are
    ``[L, n_slots, Hv, dk, dv]`` float32. Both are behind all cached tokens of a slot.
    """

    def __init__(self, delta: GatedDelta, n_layers: int, n_slots: int, like: Tensor) -> None:
        channels = 2 * delta.keys + delta.values
        self.tails = like.new_zeros(n_layers, n_slots, delta.kernel - 1, channels)
        sizes = n_layers, n_slots, delta.value_heads, delta.key_dim, delta.value_dim
        self.states = torch.zeros(sizes, device=like.device)

    @property
    def nbytes(self) -> int:
        return self.tails.nbytes + self.states.nbytes

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return tails and states of slots in one of the blocks."""
        return self.tails[layer].index_select(0, slots), self.states[layer].index_select(0, slots)

    def write(self, layer: int, slots: Tensor, values: tuple[Tensor, Tensor]) -> None:
        for store, new in zip((self.tails, self.states), values, strict=True):
            store[layer].index_copy_(0, slots, new.detach().to(store.dtype))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots; a target may be the source of another copy."""
        for store in (self.tails, self.states):
            store.index_copy_(1, targets, store.index_select(1, sources))

    def clone(self) -> tuple[Tensor, Tensor]:
        return self.tails.clone(), self.states.clone()

    def restore(self, saved: tuple[Tensor, Tensor]) -> None:
        for store, value in zip((self.tails, self.states), saved, strict=True):
            store.copy_(value)


def new_delta_cache(config: ModelConfig, params: FlatParams, layers: Sequence[int], n_slots: int) -> DeltaCache | None:
    """Return the cache of a stage's ``layers`` for the heads that ``params`` has; None if none of them needs it."""
    if not (own := [layer for layer in layers if layer in config.delta_layers]):
        return None
    delta = delta_of(config)
    n_keys = box_shape(params.box(f"layers.{own[0]}.delta.q"))[0] // delta.key_dim
    local = replace(delta, key_heads=n_keys, value_heads=n_keys * delta.value_heads // delta.key_heads)
    return DeltaCache(local, len(own), n_slots, params.data)


def rows_of_states(
    config: ModelConfig, lengths: Sequence[int], prefixes: Sequence[int], device: torch.device
) -> DeltaRows | None:
    """Return the packed rows of a pass for the blocks with states, None for a model without them."""
    if config.delta is None or not config.delta_layers:
        return None
    return DeltaRows(tuple(lengths), tuple(prefixes), config.delta.kernel, device)


def delta_of(config: ModelConfig) -> GatedDelta:
    assert config.delta is not None, "the model has no gated delta rule"
    return config.delta
