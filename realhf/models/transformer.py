"""The decoder of every family, on packed rows. A whole model on one device: engines combine devices, not this file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.api.model import ModelConfig
from realhf.api.params import whole
from realhf.models.cache import KVCache
from realhf.models.flat import FlatParams
from realhf.models.specs import param_specs
from realhf.ops.attention import decode_attention, decode_bias, packed_attention
from realhf.ops.logprobs import packed_logprobs
from realhf.ops.norms import Rotary, layer_norm, rms_norm, rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _Block:
    """Weights of one layer; query, key and value are one matrix, and so are gate and up."""

    attn_norm: _Norm
    wqkv: Tensor
    bqkv: Tensor | None
    wo: Tensor
    bo: Tensor | None
    mlp_norm: _Norm
    up: Tensor
    b_up: Tensor | None
    down: Tensor
    b_down: Tensor | None


@dataclass(frozen=True)
class _Weights:
    embed: Tensor
    positions: Tensor | None
    blocks: tuple[_Block, ...]
    final_norm: _Norm
    head: Tensor


class Transformer:
    """Computes with the weights in ``params``, which must hold the whole model.

    ``bind`` collects the views of the weights; it happens by itself, again when gradients are enabled, and not at
    every call, where the views of all layers would cost as much as a small model's decoding step. Bound views do not
    keep memory alive: ``params.free`` releases it under them.
    """

    def __init__(self, config: ModelConfig, params: FlatParams, checkpoint_activations: bool = False) -> None:
        for spec in param_specs(config):
            assert params.box(spec.name) == whole(spec.shape), f"{spec.name}: a part of a parameter cannot compute"
        self.config = config
        self.params = params
        self.checkpoint_activations = checkpoint_activations
        self._activation = ACTIVATIONS[config.activation]
        self._rotary = None
        if not config.learned_positions:
            self._rotary = Rotary(config.head_dim, config.rotary_base, dict(config.rotary_scaling), params.data.device)
        self._weights: _Weights | None = None
        self._bound_with_grad = False

    def bind(self) -> None:
        """Fetch the weights' views (leaves, when gradients are enabled) from ``params``."""
        leaf, names = self.params.leaf, self.params.names
        layers = range(self.config.n_layers)
        self._weights = _Weights(
            embed=leaf("embed.weight"),
            positions=leaf("embed.positions") if "embed.positions" in names else None,
            blocks=tuple(self._bind_block(f"layers.{i}.") for i in layers),
            final_norm=self._bind_norm("final_norm"),
            head=leaf("head.weight" if "head.weight" in names else "embed.weight"),
        )
        self._bound_with_grad = self.params.grad is not None

    def _bind_norm(self, name: str) -> _Norm:
        leaf = self.params.leaf
        return _Norm(leaf(f"{name}.weight"), leaf(f"{name}.bias") if self.config.norm == "layer" else None)

    def _bind_block(self, prefix: str) -> _Block:
        def leaf(*names: str) -> Tensor:
            return self.params.leaf(*(prefix + name for name in names))

        config = self.config
        gated, plain_bias = config.mlp == "gated", config.proj_bias and config.mlp == "plain"
        return _Block(
            attn_norm=self._bind_norm(prefix + "attn_norm"),
            wqkv=leaf("wq", "wk", "wv"),
            bqkv=leaf("bq", "bk", "bv") if config.qkv_bias else None,
            wo=leaf("wo"),
            bo=leaf("bo") if config.proj_bias else None,
            mlp_norm=self._bind_norm(prefix + "mlp_norm"),
            up=leaf("gate", "up") if gated else leaf("up"),
            b_up=leaf("b_up") if plain_bias else None,
            down=leaf("down"),
            b_down=leaf("b_down") if plain_bias else None,
        )

    @property
    def weights(self) -> _Weights:
        assert not self.params.is_free, "a model computes while its parameters are released"
        if self._weights is None or self._bound_with_grad != (self.params.grad is not None):
            self.bind()
        assert self._weights is not None
        return self._weights

    def hidden(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        cache: KVCache | None = None,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Run packed rows and return ``[T, D]`` after the final norm; positions start at 0 in every row.

        With a cache, keys and values of row i are stored in slot ``slots[i]`` (prefill). Rows sorted by length run
        fastest. Raises ValueError for a row longer than learned positions reach.
        """
        device = tokens.device
        counts = torch.tensor(lengths, dtype=torch.int64, device=device)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=len(tokens))
        positions = torch.arange(len(tokens), device=device) - starts
        places = None
        if cache is not None:
            assert slots is not None and len(slots) == len(lengths)
            slot_of = torch.tensor(slots, dtype=torch.int64, device=device)
            places = cache.places(slot_of.repeat_interleave(counts, output_size=len(tokens)), positions)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if cache is not None and places is not None:
                cache.write(layer, places, k, v)
            return packed_attention(q, k, v, lengths)

        return self._run(tokens, positions, max(lengths, default=0), attend)

    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Run one token for each of the cache's first S slots and return ``[S, D]``.

        Slot s stores its key and value at ``positions[s]`` and attends to places 0 to there.
        """
        count = len(tokens)
        longest = int(positions.max()) + 1 if count else 0
        places = cache.places(torch.arange(count, device=tokens.device), positions)
        bias = decode_bias(positions, longest, self.config.n_kv_heads).to(cache.k.dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, places, k, v)
            return decode_attention(q, cache.k[layer, :count], cache.v[layer, :count], positions, bias)

        return self._run(tokens, positions, longest, attend)

    def _run(self, tokens: Tensor, positions: Tensor, longest: int, attend: Attend) -> Tensor:
        weights = self.weights
        x = F.embedding(tokens, weights.embed)
        angles = None
        if weights.positions is not None:
            if longest > len(weights.positions):
                raise ValueError(f"a row of {longest} tokens; this model has {len(weights.positions)} positions")
            x = x + F.embedding(positions, weights.positions)
        if self._rotary is not None:
            angles = self._rotary.rows(positions, longest, x.dtype)
        save_memory = self.checkpoint_activations and torch.is_grad_enabled() and weights.embed.requires_grad
        for layer in range(len(weights.blocks)):
            if save_memory:
                x = checkpoint(self._block, layer, x, angles, attend, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._block(layer, x, angles, attend)
        return self._norm(x, weights.final_norm)

    def _block(self, layer: int, x: Tensor, angles: Angles | None, attend: Attend) -> Tensor:
        config, block = self.config, self.weights.blocks[layer]
        n_q, n_kv = config.n_heads, config.n_kv_heads
        qkv = F.linear(self._norm(x, block.attn_norm), block.wqkv, block.bqkv)
        qkv = qkv.view(len(x), n_q + 2 * n_kv, config.head_dim)
        if angles is None:
            q, k, v = qkv.split((n_q, n_kv, n_kv), 1)
        else:
            qk, v = qkv.split((n_q + n_kv, n_kv), 1)
            q, k = rotate(qk, *angles).split((n_q, n_kv), 1)
        x = _add_product(x, attend(layer, q, k, v).flatten(1), block.wo, block.bo)
        inner = F.linear(self._norm(x, block.mlp_norm), block.up, block.b_up)
        if config.mlp == "gated":
            gate, up = inner.chunk(2, -1)
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        return _add_product(x, inner, block.down, block.b_down)

    def _norm(self, x: Tensor, norm: _Norm) -> Tensor:
        if norm.bias is None:
            return rms_norm(x, norm.weight, self.config.norm_eps)
        return layer_norm(x, norm.weight, norm.bias, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits of a few tokens, ``[S, V]`` float32: for sampling."""
        return F.linear(hidden, self.weights.head).float()

    def logprobs(self, hidden: Tensor, tokens: Tensor, lengths: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each token given those before it, ``[T]`` float32; 0 at a row's first token."""
        counts = torch.tensor(lengths, dtype=torch.int64, device=tokens.device)
        firsts = (counts.cumsum(0) - counts)[counts > 0]
        # every token predicts the next one; what a row's last token says of the following row is masked
        of_next = packed_logprobs(hidden, self.weights.head, tokens.roll(-1), temperature)
        return of_next.roll(1).index_fill(0, firsts, 0.0)

    def values(self, hidden: Tensor) -> Tensor:
        """Return the scalar head at every token, ``[T]`` float32 (computed in it: values need more than 8 bits)."""
        return hidden.float() @ self.weights.head[0].float()


def _add_product(x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x + inner @ weight.T + bias``, the sum inside the product where there is no bias."""
    if bias is None:
        return torch.addmm(x, inner, weight.t())
    return x + F.linear(inner, weight, bias)
