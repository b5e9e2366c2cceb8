"""The decoder of every family, on packed rows: one shard of it, which may be a stage of layers and a cut of each layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.api.model import ModelConfig
from realhf.api.params import ParamSpec, shard_box
from realhf.comm.parallel import Group
from realhf.comm.tensor_parallel import Seams, gather_columns
from realhf.models.cache import KVCache
from realhf.models.flat import FlatParams
from realhf.ops.attention import decode_attention, decode_bias, packed_attention
from realhf.ops.logprobs import UNCUT, VocabularyCut, packed_logprobs
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
    embed: Tensor | None
    positions: Tensor | None
    blocks: tuple[_Block, ...]
    final_norm: _Norm | None
    head: Tensor | None


ALONE = Group((0,), 0)


class Transformer:
    """Computes with the weights in ``params``: the layers that it holds, cut over the tensor-parallel group ``tp``.

    The first stage embeds tokens, a later one takes the hidden states of the stage before; the last one has the heads.
    ``bind`` collects the views of the weights; it happens by itself, again when gradients are enabled, and not at
    every call, where the views of all layers would cost as much as a small model's decoding step. Bound views do not
    keep memory alive: ``params.free`` releases it under them.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: FlatParams,
        checkpoint_activations: bool = False,
        tp: Group = ALONE,
        sequence_parallel: bool = False,
    ) -> None:
        self.config, self.params, self.tp = config, params, tp
        self.checkpoint_activations, self.sequence_parallel = checkpoint_activations, sequence_parallel and tp.size > 1
        self.layers = [i for i in range(config.n_layers) if f"layers.{i}.wq" in params.names]
        assert self.layers, "a stage holds one layer or more"
        self.is_first, self.is_last = self.layers[0] == 0, "final_norm.weight" in params.names
        self.n_q, self.n_kv = (self._local_heads(name) for name in ("wq", "wk"))
        self._cut = self._vocabulary_cut()
        self._activation = ACTIVATIONS[config.activation]
        self._rotary = None
        if not config.learned_positions:
            self._rotary = Rotary(config.head_dim, config.rotary_base, dict(config.rotary_scaling), params.data.device)
        self._weights: _Weights | None = None
        self._bound_with_grad = False

    def _local_heads(self, name: str) -> int:
        start, stop = self.params.box(f"layers.{self.layers[0]}.{name}")[0]
        return (stop - start) // self.config.head_dim

    def seams(self, n_tokens: int) -> Seams:
        """Return how this pass crosses the cuts; tokens are shared out in training alone."""
        return Seams(self.tp, n_tokens, self.sequence_parallel and torch.is_grad_enabled())

    def new_cache(self, n_slots: int, max_len: int) -> KVCache:
        """Return an empty cache for this shard's layers and heads."""
        return KVCache(len(self.layers), self.n_kv, self.config.head_dim, n_slots, max_len, self.params.data)

    def bind(self) -> None:
        """Fetch the weights' views (leaves, when gradients are enabled) from ``params``."""
        leaf, names = self.params.leaf, self.params.names
        head = "head.weight" if "head.weight" in names else "embed.weight"
        self._weights = _Weights(
            embed=leaf("embed.weight") if self.is_first else None,
            positions=leaf("embed.positions") if "embed.positions" in names else None,
            blocks=tuple(self._bind_block(f"layers.{i}.") for i in self.layers),
            final_norm=self._bind_norm("final_norm") if self.is_last else None,
            head=leaf(head) if self.is_last else None,
        )
        self._bound_with_grad = self.params.grad is not None

    def _vocabulary_cut(self) -> VocabularyCut:
        """Which part of the vocabulary this member of the tensor-parallel group embeds and predicts."""
        if self.tp.size == 1:
            return UNCUT
        spec = ParamSpec("vocabulary", (self.config.vocab,), 0, 0, self.config.vocab)
        parts = [shard_box(spec, self.tp.size, rank)[0] for rank in range(self.tp.size)]
        widths = tuple(stop - start for start, stop in parts)
        return VocabularyCut(parts[self.tp.index][0], widths, self.tp.all_reduce, self.tp.all_max)

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
        x: Tensor | None = None,
    ) -> Tensor:
        """Run packed rows through this stage: ``[T, D]``, after the final norm on the last one.

        With sequence parallelism in training it is this worker's share of the tokens. ``x`` is what the stage before returned (None on the first). Positions start at 0 in every row. With a cache,
        keys and values of row i are stored in slot ``slots[i]`` (prefill). Rows sorted by length run fastest. Raises
        ValueError for a row longer than learned positions reach.
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

        return self._run(tokens, positions, max(lengths, default=0), attend, x)

    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache, x: Tensor | None = None) -> Tensor:
        """Run one token for each of the cache's first S slots through this stage and return ``[S, D]``.

        Slot s stores its key and value at ``positions[s]`` and attends to places 0 to there.
        """
        count = len(tokens)
        longest = int(positions.max()) + 1 if count else 0
        places = cache.places(torch.arange(count, device=tokens.device), positions)
        bias = decode_bias(positions, longest, self.n_kv).to(cache.k.dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, places, k, v)
            return decode_attention(q, cache.k[layer, :count], cache.v[layer, :count], positions, bias)

        return self._run(tokens, positions, longest, attend, x)

    def _run(self, tokens: Tensor, positions: Tensor, longest: int, attend: Attend, x: Tensor | None) -> Tensor:
        weights, seams = self.weights, self.seams(len(tokens))
        if x is None:
            x = self._embed(tokens, positions, longest, seams)
        angles = None if self._rotary is None else self._rotary.rows(positions, longest, x.dtype)
        save_memory = self.checkpoint_activations and torch.is_grad_enabled() and self.params.grad is not None
        for index in range(len(weights.blocks)):
            if save_memory:
                x = checkpoint(self._block, index, x, angles, attend, seams, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._block(index, x, angles, attend, seams)
        return x if weights.final_norm is None else self._norm(x, weights.final_norm)

    def _embed(self, tokens: Tensor, positions: Tensor, longest: int, seams: Seams) -> Tensor:
        weights = self.weights
        assert weights.embed is not None, "a later stage takes the hidden states of the stage before"
        if self.tp.size == 1:
            x = F.embedding(tokens, weights.embed)
        else:
            local, held = self._cut.mine(tokens, len(weights.embed))
            x = seams.leave(F.embedding(local, weights.embed) * held[:, None])
        if weights.positions is not None:
            if longest > len(weights.positions):
                raise ValueError(f"a row of {longest} tokens; this model has {len(weights.positions)} positions")
            x = x + F.embedding(positions[seams.mine], weights.positions)
        return x

    def _block(self, index: int, x: Tensor, angles: Angles | None, attend: Attend, seams: Seams) -> Tensor:
        block = self.weights.blocks[index]
        n_q, n_kv = self.n_q, self.n_kv
        qkv = F.linear(seams.enter(self._norm(x, block.attn_norm)), block.wqkv, block.bqkv)
        qkv = qkv.view(len(qkv), n_q + 2 * n_kv, self.config.head_dim)
        if angles is None:
            q, k, v = qkv.split((n_q, n_kv, n_kv), 1)
        else:
            qk, v = qkv.split((n_q + n_kv, n_kv), 1)
            q, k = rotate(qk, *angles).split((n_q, n_kv), 1)
        x = self._add_product(x, attend(index, q, k, v).flatten(1), block.wo, block.bo, seams)
        inner = F.linear(seams.enter(self._norm(x, block.mlp_norm)), block.up, block.b_up)
        if self.config.mlp == "gated":
            gate, up = inner.chunk(2, -1)
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        return self._add_product(x, inner, block.down, block.b_down, seams)

    def _add_product(self, x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, seams: Seams) -> Tensor:
        """``x + inner @ weight.T + bias``; the product is summed over the group where rows of the weight are cut."""
        if self.tp.size > 1:
            x = x + seams.leave(F.linear(inner, weight))
        elif bias is None:
            return torch.addmm(x, inner, weight.t())  # the sum inside the product
        else:
            return x + F.linear(inner, weight, bias)
        return x if bias is None else x + bias

    def _norm(self, x: Tensor, norm: _Norm) -> Tensor:
        if norm.bias is None:
            return rms_norm(x, norm.weight, self.config.norm_eps)
        return layer_norm(x, norm.weight, norm.bias, self.config.norm_eps)

    @property
    def head(self) -> Tensor:
        assert self.weights.head is not None, "only the last stage has a head"
        return self.weights.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits of a few tokens, ``[S, V]`` float32: for sampling. Collective over ``tp``."""
        return gather_columns(F.linear(hidden, self.head).float(), self.tp, self._cut.widths)

    def logprobs(self, hidden: Tensor, tokens: Tensor, lengths: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each token given those before it, ``[T]`` float32; 0 at a row's first token."""
        counts = torch.tensor(lengths, dtype=torch.int64, device=tokens.device)
        firsts = (counts.cumsum(0) - counts)[counts > 0]
        # every token predicts the next one; what a row's last token says of the following row is masked
        of_next = packed_logprobs(
            self.seams(len(tokens)).enter(hidden), self.head, tokens.roll(-1), temperature, cut=self._cut
        )
        return of_next.roll(1).index_fill(0, firsts, 0.0)

    def values(self, hidden: Tensor, n_tokens: int) -> Tensor:
        """Return the scalar head at every token, ``[T]`` float32 (computed in it: values need more than 8 bits)."""
        return self.seams(n_tokens).whole(hidden).float() @ self.head[0].float()
