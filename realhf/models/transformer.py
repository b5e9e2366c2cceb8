"""The decoder of every family on packed rows: one shard, which may be a stage of layers and a cut of each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import ParamSpec, shard_box
from realhf.comm.process_groups import Group
from realhf.comm.tensor_parallel import TensorParallelRegion, gather_columns
from realhf.models.blocks import Attend, Attention, Block, Experts, ForwardContext, Mlp, Norm, RouterLoss, run_block
from realhf.models.flat_params import FlatParams
from realhf.models.fused_decode import FusedBlocks, TiledBlocks, fused, pack_tiles, tiled_linear
from realhf.models.kv_cache import KVCache
from realhf.ops.attention import ScoreParams, decode_attention, decode_bias, positions_in_rows, rotary_attention
from realhf.ops.logprobs import FULL_VOCAB, VocabShard, packed_logprobs
from realhf.ops.norms import Rotary, rotate


@dataclass(frozen=True)
class _Weights:
    embed: Tensor | None
    positions: Tensor | None
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    head: Tensor | None
    fused: FusedBlocks | None


@dataclass(frozen=True)
class _Packed:
    """Copies of the weights in panels, for as long as the weights stay as they are."""

    blocks: TiledBlocks
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
        self._head_name = "head.weight" if "head.weight" in params.names else "embed.weight"
        self._cut = self._vocabulary_cut()
        self._scores = [
            ScoreParams(config.attention_scale, config.window(i), config.attention_softcap) for i in self.layers
        ]
        self._rotary = None
        if not config.learned_positions:
            turning, scaling = config.rotary_dims or config.head_dim, dict(config.rotary_scaling)
            self._rotary = Rotary(turning, config.rotary_base, scaling, params.data.device)
        self._weights: _Weights | None = None
        self._bound_with_grad = False
        self._packed: _Packed | None = None
        self._lost_by_routers = self._no_router_loss()

    def _local_heads(self, name: str) -> int:
        start, stop = self.params.box(f"layers.{self.layers[0]}.{name}")[0]
        return (stop - start) // self.config.head_dim

    def _no_router_loss(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self.params.data.device)

    def take_router_losses(self) -> Tensor:
        """Return what routers lost since they were last asked, ``[2]`` float64: ``balance_loss`` and ``z_loss``.

        Sums over this worker's tokens and layers, of passes with a ``token_weight``.
        """
        lost, self._lost_by_routers = self._lost_by_routers, self._no_router_loss()
        return lost

    def seams(self, n_tokens: int) -> TensorParallelRegion:
        """Return how this pass crosses the cuts; tokens are shared out in training alone."""
        return TensorParallelRegion(self.tp, n_tokens, self.sequence_parallel and torch.is_grad_enabled())

    def new_cache(self, n_slots: int, max_len: int) -> KVCache:
        """Return an empty cache for this shard's layers and heads."""
        sizes = (len(self.layers), self.n_kv, self.config.head_dim, n_slots, max_len)
        return KVCache(*sizes, self.params.data, cleared=self.weights.fused is None)

    def bind(self) -> None:
        """Fetch the weights' views (leaves, when gradients are enabled) from ``params``."""
        leaf, names, config = self.params.leaf, self.params.names, self.config
        blocks = tuple(self._bind_block(i) for i in self.layers)
        final_norm = self._bind_norm("final_norm", config.norm == "layer") if self.is_last else None
        self._weights = _Weights(
            embed=leaf("embed.weight") if self.is_first else None,
            positions=leaf("embed.positions") if "embed.positions" in names else None,
            blocks=blocks,
            final_norm=final_norm,
            head=leaf(self._head_name) if self.is_last else None,
            fused=fused(config, self.n_q, blocks, final_norm, tuple(self._scores)) if self.tp.size == 1 else None,
        )
        self._bound_with_grad = self.params.grad is not None

    def _vocabulary_cut(self) -> VocabShard:
        """Which part of the vocabulary this member of the tensor-parallel group embeds and predicts."""
        held = [name for name in ("embed.weight", "head.weight") if name in self.params.names]
        if self.tp.size == 1 or not held:
            return FULL_VOCAB
        spec = ParamSpec("vocabulary", (self.config.vocab,), 0, 0, self.config.vocab)
        parts = [shard_box(spec, self.tp.size, place)[0] for place in range(self.tp.size)]
        widths = tuple(stop - start for start, stop in parts)
        # not by the group's numbering: its members count by rank, a mesh may name them in any order
        return VocabShard(self.params.box(held[0])[0][0], widths, self.tp.all_reduce, self.tp.all_max)

    def _bind_norm(self, name: str, bias: bool) -> Norm:
        leaf, config = self.params.leaf, self.config
        return Norm(leaf(f"{name}.weight"), leaf(f"{name}.bias") if bias else None, config.norm_eps, config.norm_offset)

    def _bind_block(self, index: int) -> Block:
        config, prefix, biased = self.config, f"layers.{index}.", self.config.norm == "layer"

        def leaf(*names: str) -> Tensor:
            return self.params.leaf(*(prefix + name for name in names))

        def norm(name: str, present: bool = True, bias: bool = biased) -> Norm | None:
            return self._bind_norm(prefix + name, bias) if present else None

        attention = Attention(
            norm=self._bind_norm(prefix + "attn_norm", biased),
            wqkv=leaf("wq", "wk", "wv"),
            bqkv=leaf("bq", "bk", "bv") if config.qkv_bias else None,
            q_norm=norm("q_norm", config.qk_norm, False),
            k_norm=norm("k_norm", config.qk_norm, False),
            wo=leaf("wo"),
            bo=leaf("bo") if config.proj_bias else None,
            post_norm=norm("attn_post_norm", config.post_norms),
        )
        before, behind = self._bind_norm(prefix + "mlp_norm", biased), norm("mlp_post_norm", config.post_norms)
        if index in config.routed_layers:
            return Block(attention, Experts(before, leaf("router"), leaf("experts.up"), leaf("experts.down"), behind))
        plain_bias = config.proj_bias and config.mlp == "ungated"
        mlp = Mlp(
            norm=before,
            up=leaf("gate", "up") if config.mlp == "gated" else leaf("up"),
            b_up=leaf("b_up") if plain_bias else None,
            down=leaf("down"),
            b_down=leaf("b_down") if plain_bias else None,
            post_norm=behind,
        )
        return Block(attention, mlp)

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
        token_weight: float = 0.0,
        prefixes: Sequence[int] = (),
    ) -> Tensor:
        """Run packed rows through this stage: ``[T, D]``, after the final norm on the last one.

        With sequence parallelism in training it is this worker's share of the tokens. ``x`` is what the stage before
        returned (None on the first). Positions start at 0 in every row, and go on behind the row ``prefixes[i]`` in one
        that continues it (see ``packed_attention``). With a cache, keys and values of row i are
        stored in slot ``slots[i]`` (prefill). Rows sorted by length run fastest. With a ``token_weight`` whatever is
        differentiated through the result has the losses of routers added to it: the sum over tokens, times that
        weight, of their mean over routed layers. Raises ValueError for a row longer than learned positions reach.
        """
        device = tokens.device
        positions = positions_in_rows(lengths, prefixes, device)
        longest = int(positions.max()) + 1 if len(positions) else 0
        counts = torch.tensor(lengths, dtype=torch.int64, device=device)
        rows = torch.arange(len(lengths), device=device).repeat_interleave(counts, output_size=len(tokens))
        angles, places, turned = self._angles(longest), None, None
        if cache is not None:
            assert slots is not None and len(slots) == len(lengths)
            places = cache.places(torch.tensor(slots, dtype=torch.int64, device=device)[rows], positions)
            turned = None if self._rotary is None else self._rotary.rows(positions, longest, self.params.data.dtype)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            if cache is not None and places is not None:
                _, k, v = qkv.split((self.n_q, self.n_kv, self.n_kv), 1)
                cache.write(layer, places, k if turned is None else rotate(k, *turned), v)
            return rotary_attention(qkv, self.n_q, self.n_kv, lengths, self._scores[layer], prefixes, angles)

        router_loss = RouterLoss(rows, len(lengths), token_weight) if token_weight and self.config.n_experts else None
        return self._run(tokens, positions, longest, attend, x, router_loss)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Make many calls of ``decode`` cheap: weights, which must not change meanwhile, are put in order once."""
        blocks, head = self.weights.fused, self.weights.head
        if blocks is not None:
            self._packed = _Packed(blocks.tiled(), None if head is None else pack_tiles(head.detach()))
        try:
            yield
        finally:
            self._packed = None

    @property
    def reads_prefixes(self) -> bool:
        """Whether ``decode`` finds what rows have in common in the slot of one of them."""
        return self.weights.fused is not None and not any(rule.window for rule in self._scores)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        x: Tensor | None = None,
        prefixes: Tensor | None = None,
        longest: int = 0,
    ) -> Tensor:
        """Run one token for each of the cache's first S slots through this stage and return ``[S, D]``.

        Slot s stores its key and value at ``positions[s]`` and attends to places up to there. ``prefixes`` (``[3, S]``
        int64) may tell what slots have in common, which is then read once: a number for each, how many first places
        are alike in all slots of that number, and a slot that has them. Only where the model ``reads_prefixes`` may
        that be another slot. ``longest`` bounds positions from above where they are not to be read from the device.
        """
        count = len(tokens)
        longest = longest or (int(positions.max()) + 1 if count else 0)
        if (blocks := self.weights.fused) is not None:
            x = self._embed(tokens, positions, longest, self.seams(count)) if x is None else x
            packed = self._packed.blocks if self._packed else blocks.tiled()
            return packed(x, positions, cache, prefixes, self._angles(longest))
        places = cache.places(torch.arange(count, device=tokens.device), positions)
        windows = {rule.window for rule in self._scores}
        biases = {w: decode_bias(positions, longest, self.n_kv, w).to(cache.k.dtype) for w in windows}

        turned = None if self._rotary is None else self._rotary.rows(positions, longest, cache.k.dtype)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            qk, v = qkv.split((self.n_q + self.n_kv, self.n_kv), 1)
            q, k = (qk if turned is None else rotate(qk, *turned)).split((self.n_q, self.n_kv), 1)
            cache.write(layer, places, k, v)
            rule = self._scores[layer]
            keys, values = cache.k[layer, :count], cache.v[layer, :count]
            return decode_attention(q, keys, values, positions, biases[rule.window], rule)

        return self._run(tokens, positions, longest, attend, x)

    def _angles(self, longest: int) -> Tensor | None:
        return None if self._rotary is None else self._rotary.table(longest)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        longest: int,
        attend: Attend,
        x: Tensor | None,
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        weights, seams = self.weights, self.seams(len(tokens))
        if x is None:
            x = self._embed(tokens, positions, longest, seams)
        step = ForwardContext(self.config, self.n_q, self.n_kv, seams, attend, router_loss)
        save_memory = self.checkpoint_activations and torch.is_grad_enabled() and self.params.grad is not None
        for index, block in enumerate(weights.blocks):
            if save_memory:
                x, lost = checkpoint(run_block, block, index, x, step, use_reentrant=False, preserve_rng_state=False)
            else:
                x, lost = run_block(block, index, x, step)
            if lost is not None:
                self._lost_by_routers += lost
        return x if weights.final_norm is None else weights.final_norm(x)

    def _embed(self, tokens: Tensor, positions: Tensor, longest: int, seams: TensorParallelRegion) -> Tensor:
        weights = self.weights
        assert weights.embed is not None, "a later stage takes the hidden states of the stage before"
        if self.tp.size == 1:
            x = F.embedding(tokens, weights.embed)
        else:
            local, held = self._cut.to_local(tokens, len(weights.embed))
            x = seams.reduce_from_tp(F.embedding(local, weights.embed) * held[:, None])
        if self.config.scaled_embedding:
            x = x * float(torch.tensor(self.config.hidden**0.5, dtype=x.dtype))  # as Hugging Face rounds it
        if weights.positions is not None:
            if longest > len(weights.positions):
                raise ValueError(f"a row of {longest} tokens; this model has {len(weights.positions)} positions")
            x = x + F.embedding(positions[seams.local_tokens], weights.positions)
        return x

    @property
    def head(self) -> Tensor:
        assert self.weights.head is not None, "only the last stage has a head"
        return self.weights.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits of a few tokens, ``[S, V]`` float32: for sampling. Collective over ``tp``."""
        if self._packed and self._packed.head is not None:
            logits = tiled_linear(hidden, self._packed.head, self.config.vocab)
        else:
            logits = gather_columns(F.linear(hidden, self.head).float(), self.tp, self._cut.start, self.config.vocab)
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def logprobs(
        self,
        hidden: Tensor,
        tokens: Tensor,
        lengths: Sequence[int],
        temperature: float = 1.0,
        before: Tensor | None = None,
    ) -> Tensor:
        """Return the log-probability of each token given those before it, ``[T]`` float32; 0 at a row's first token.

        ``before`` (``[T]`` int64) says which token comes before each, -1: none; without it, the neighbour in its row.
        """
        whole = self.seams(len(tokens)).copy_to_tp(hidden)
        add_to = None if self.params.grad is None else self.params.grad_view(self._head_name)
        cut, softcap = self._cut, self.config.logit_softcap
        if before is not None:
            states = whole.index_select(0, before.clamp(min=0))
            found = packed_logprobs(states, self.head, tokens, temperature, shard=cut, softcap=softcap, add_to=add_to)
            return found.masked_fill(before < 0, 0.0)
        counts = torch.tensor(lengths, dtype=torch.int64, device=tokens.device)
        firsts = (counts.cumsum(0) - counts)[counts > 0]
        # every token predicts the next one; what a row's last token says of the following row is masked
        targets = tokens.roll(-1)
        of_next = packed_logprobs(whole, self.head, targets, temperature, shard=cut, softcap=softcap, add_to=add_to)
        return of_next.roll(1).index_fill(0, firsts, 0.0)

    def values(self, hidden: Tensor, n_tokens: int) -> Tensor:
        """Return the scalar head at every token, ``[T]`` float32 (computed in it: values need more than 8 bits)."""
        return self.seams(n_tokens).gather_from_sp(hidden).float() @ self.head[0].float()
