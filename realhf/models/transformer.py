"""The decoder of any family on packed rows: one shard, which is a pipeline stage and a tensor-parallel slice of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.api.config import Recompute
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import ParamSpec, box_shape, shard_box
from realhf.base.partition import consecutive_runs
from realhf.comm.expert_parallel import ExpertRegion
from realhf.comm.process_groups import Group
from realhf.comm.tensor_parallel import TensorParallelRegion, gather_columns
from realhf.models.attention.pass_attention import DecodePass, ExtendPass, PackedPass, StageAttention
from realhf.models.attention.stage_rotary import StageRotary
from realhf.models.blocks import Block, Experts, ForwardContext, Norm, PassAttention, RouterLoss, Routing, run_block
from realhf.models.bound_weights import BoundWeights
from realhf.models.flat_params import FlatParams
from realhf.models.fused_decode import FusedBlocks, fuse_blocks, pack_tiles, tiled_linear
from realhf.models.kv_cache import KVCache
from realhf.models.low_rank import Dropout
from realhf.models.routing import StageRouters
from realhf.models.token_head import TokenHead
from realhf.models.zero.layer_memory import EMBEDDING, LayerMemory
from realhf.ops import varlen
from realhf.ops.attention import ScoreParams
from realhf.ops.cascade import SharedPrefixes
from realhf.ops.logprobs import FULL_VOCAB, VocabShard
from realhf.ops.rows import RowLayout, on_device
from realhf.ops.varlen import CachedRows, VarlenKernel


@dataclass(frozen=True)
class _Weights:
    embed: Tensor | None
    positions: Tensor | None
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    head: Tensor | None
    fused: FusedBlocks | None


SINGLE_RANK_GROUP = Group((0,), 0)


class Transformer:
    """The layers in ``params``, sharded over the tensor-parallel group ``tp``.

    With LoRA, ``params`` has the adapters, and ``base`` the frozen weights, which other models may share.
    The first stage embeds tokens, later stages take the hidden states of the previous one; the last stage has the
    heads. ``chunks`` has the places of the blocks that one pass of ``hidden`` goes through: all, or a run of
    consecutive layers. ``weights`` are views, collected at first use and again when gradients are enabled, but not at
    every call: creating them takes as long as a decoding step of a small model. ``params.free`` releases their memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: FlatParams,
        recompute: Recompute | None = None,
        tp: Group = SINGLE_RANK_GROUP,
        sequence_parallel: bool = False,
        base: FlatParams | None = None,
        tp_overlap: bool = False,
        expert_region: ExpertRegion | None = None,
    ) -> None:
        self.config, self.params, self.tp = config, params, tp
        self.base = params if base is None else base
        self.recompute, self.sequence_parallel = recompute, sequence_parallel and tp.size > 1
        self.tp_overlap, self.expert_region = tp_overlap, expert_region
        self.layers = [i for i in range(config.n_layers) if f"layers.{i}.wq" in self.base.names]
        assert self.layers, "a stage has at least one layer"
        self.chunks = consecutive_runs(self.layers)  # layers of other stages are between those of two chunks
        self._routers = StageRouters(config, self.layers)
        self.is_first, self.is_last = self.layers[0] == 0, "final_norm.weight" in self.base.names
        wq, wk = (f"layers.{self.layers[0]}.{name}" for name in ("wq", "wq" if config.latent else "wk"))
        self.n_q, self.n_kv = (box_shape(self.base.box(name))[0] // config.head_dim for name in (wq, wk))
        self._kv_holders = self.base.n_holders(wk, tp.size)
        self._head_name = next((name for some in (params, self.base) for name in some.names if name == "head.weight"),
                               "embed.weight")  # fmt: skip
        self._vocab_shard = self._make_vocab_shard()
        self._score_rules = tuple(
            ScoreParams(config.attention_scale, config.sliding_window(i), config.attention_softcap) for i in self.layers
        )
        self.rotary = StageRotary(config, self.layers, self.device)
        self._weights: _Weights | None = None
        self._bound_with_grad = False
        self._tiled_blocks: FusedBlocks | None = None  # copies, valid while the weights do not change
        self._tiled_head: Tensor | None = None
        sums = len(self._routers), 2 + config.n_experts
        self._router_sums = torch.zeros(sums, dtype=torch.float64, device=self.device)
        self.on_backward: Callable[[int, Tensor], None] | None = None
        """Called in a backward pass with a layer, or the number of layers, and the gradient of its input."""
        self.memory: LayerMemory | None = None  # with ZeRO-2 and ZeRO-3

    @property
    def device(self) -> torch.device:
        return self.base.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        return self.base.data.dtype

    def pop_router_sums(self) -> Tensor:
        """Return and reset the sums of ``balance_loss``, ``z_loss`` and the tokens of experts, ``[L, 2 + E]`` float64.

        They are of all routed layers of the model, zero in those of other stages, over this worker's tokens in passes
        with a ``token_weight``.
        """
        sums, self._router_sums = self._router_sums, torch.zeros_like(self._router_sums)
        of_all = sums.new_zeros(len(self.config.routed_layers), sums.shape[1])
        for sums_of_layer, number in zip(sums, self._routers.numbers, strict=True):
            of_all[number] = sums_of_layer
        return of_all

    def tp_region(self, n_tokens: int) -> TensorParallelRegion:
        """Return the tensor-parallel region of a pass; tokens are sharded only in training."""
        sequence = self.sequence_parallel and torch.is_grad_enabled()
        return TensorParallelRegion(self.tp, n_tokens, sequence, self.tp_overlap)

    def new_cache(self, n_slots: int, max_len: int, records_experts: bool = False) -> KVCache:
        assert len(self.chunks) == 1, "calls that generate have one chunk of layers per stage"
        is_latent = self.config.latent is not None
        heads = (1, self.config.cache_numel) if is_latent else (self.n_kv, self.config.head_dim)
        sizes = (len(self.layers), *heads, n_slots, max_len)
        by_token = self._cache_kernel() is not None
        experts = self._routers.new_cache(n_slots, max_len, self.device) if records_experts else None
        zeroed = self.weights.fused is None and not by_token
        return KVCache(*sizes, self.base.data, zeroed, by_token, experts, is_latent)

    def _cache_kernel(self) -> VarlenKernel | None:
        """Return a GPU kernel with which decoding reads only the used length of the cache, if there is one."""
        if self.config.attention_sinks or self.config.latent:
            return None
        rules = (rule.rule for rule in self._score_rules)
        return varlen.kernel_for(self.device, self.dtype, self.config.head_dim, rules, decoding=True)

    def _bind(self) -> _Weights:
        bound = BoundWeights(self.config, self.params, self.base)
        blocks = tuple(bound.block(f"layers.{i}.") for i in self.layers)
        embed = bound.optional("embed.weight") if self.is_first else None
        final_norm = bound.norm("final_norm")
        head = bound.leaf(self._head_name) if self.is_last else None
        is_whole = self.tp.size == 1 and (self.memory is None or self.memory.weights is None)
        scoring = self._score_rules, self.rotary
        fused = fuse_blocks(self.config, self.n_q, blocks, final_norm, *scoring) if is_whole else None
        return _Weights(embed, bound.optional("embed.positions"), blocks, final_norm, head, fused)

    def _make_vocab_shard(self) -> VocabShard:
        names = [name for name in ("embed.weight", "head.weight") if name in self.base.names]
        if self.tp.size == 1 or not names:
            return FULL_VOCAB
        spec = ParamSpec("vocabulary", (self.config.vocab,), 0, 0, self.config.vocab)
        spans = [shard_box(spec, self.tp.size, tp_rank)[0] for tp_rank in range(self.tp.size)]
        widths = tuple(stop - start for start, stop in spans)
        # by the box, not by the index in the group: groups order members by rank, a mesh may order them differently
        return VocabShard(self.base.box(names[0])[0][0], widths, self.tp.all_reduce, self.tp.all_max)

    @property
    def weights(self) -> _Weights:
        assert not (self.params.is_free or self.base.is_free), "parameters are used while their memory is released"
        if self._weights is None or self._bound_with_grad != self.params.has_grad:
            self._weights, self._bound_with_grad = self._bind(), self.params.has_grad
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
        observe: Callable[[str, Tensor], None] | None = None,
        experts: Tensor | None = None,
        dropout: Dropout | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """Run packed rows through a chunk of this stage and return ``[T, D]``, of the last one after the final norm.

        With sequence parallelism in training, the result has only this rank's tokens. ``x`` is the previous chunk's
        output (None on the first). Positions start at 0 in every row, or continue those of row ``prefixes[i]`` (see
        ``rotary_attention``). With a cache, keys and values of row i are stored in slot ``slots[i]`` (prefill). Rows
        sorted by length are fastest. With a ``token_weight``, the router losses join the loss that is differentiated
        through the result: their mean over routed layers, summed over tokens, times this weight. ``observe`` receives
        the embedding's and every layer's name and output. ``experts``, ``[T, L * k]`` of all routed layers, replace the
        choice of the routers (see ``route``); ``dropout`` is that of adapters. Raises ValueError for a
        row that is longer than the learned positions.
        """
        layout = RowLayout(tuple(lengths), tuple(prefixes), tokens.device)
        rotation, indices = self.rotary.rotation(layout.positions, layout.longest, layout.rotation), None
        routing: Routing | None = None
        if experts is not None:
            routing = self._routers.replay(experts, self.tp_region(len(tokens)).local_tokens)
        if cache is not None:
            assert slots is not None and len(slots) == len(lengths)
            slot_of = on_device(torch.tensor(slots, dtype=torch.int64), tokens.device)[layout.rows]
            indices = cache.indices(slot_of, layout.positions)
            routing = self._routers.recording(cache.experts, slot_of, layout.positions)

        attend = PackedPass(self._attention(), layout, rotation, cache, indices, dropout)
        has_router_loss = token_weight and self.config.n_experts
        router_loss = RouterLoss(layout.rows, len(lengths), token_weight) if has_router_loss else None
        with self._memory_of(EMBEDDING) if x is None else nullcontext():
            x = self._embed(tokens, layout.positions, layout.longest) if x is None else x
        if observe is not None:
            observe("the embedding", x)
        return self._run(x, len(tokens), attend, router_loss, observe, routing, dropout, self.chunks[chunk])

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Tile the weights once for many calls of ``decode``; the weights must not change in this context."""
        blocks, head = self.weights.fused, self.weights.head
        if blocks is not None:
            self._tiled_blocks, self._tiled_head = blocks.tiled(), None if head is None else pack_tiles(head.detach())
        try:
            yield
        finally:
            self._tiled_blocks = self._tiled_head = None

    @property
    def supports_shared_prefixes(self) -> bool:
        """``decode`` can read a prefix from the slot of another row."""
        kernel = self._cache_kernel()
        can_read = self.weights.fused is not None or (kernel is not None and kernel.reads_spans)
        return can_read and not any(rule.window for rule in self._score_rules)

    @property
    def waits_for_experts(self) -> bool:
        """Whether the host reads in every routed layer how many tokens each expert has."""
        return any(isinstance(block.mlp, Experts) and not block.mlp.mlps.are_grouped for block in self.weights.blocks)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        x: Tensor | None = None,
        prefixes: Tensor | SharedPrefixes | None = None,
        longest: int = 0,
    ) -> Tensor:
        """Run one token for each of the cache's first S slots through this stage and return ``[S, D]``.

        Slot s stores its key and value at ``positions[s]`` and attends to positions up to it. ``prefixes`` describes
        common prefixes, which are then read once: on a GPU as ``SharedPrefixes``, on a CPU by ``[3, S]`` int64, for
        each slot a prefix number, the length that all slots of this number have in common, and a slot that stores it
        (another one only if the model ``supports_shared_prefixes``). ``longest`` bounds the row lengths (0: the
        positions are read from the device).
        """
        count = len(tokens)
        longest = longest or (int(positions.max()) + 1 if count else 0)
        x = self._embed(tokens, positions, longest) if x is None else x
        if (blocks := self.weights.fused) is not None:
            assert not isinstance(prefixes, SharedPrefixes)
            x = (self._tiled_blocks or blocks.tiled())(x, positions, cache, prefixes, longest)
            return self._for_head(x)
        kernel = self._cache_kernel() if cache.by_token else None
        rows = None if kernel is None else CachedRows.of(kernel, positions, cache.max_len)
        rotation = self.rotary.rotation(positions, longest)
        attend = DecodePass(self._attention(), rotation, cache, positions, longest, rows, prefixes)
        return self._run(x, count, attend, routing=self._routers.recording(cache.experts, attend.slots, positions))

    def extend(self, tokens: Tensor, start: int, slot: int, cache: KVCache, x: Tensor | None = None) -> Tensor:
        """Run ``tokens`` ``[T]`` of one row, which follow ``start`` cached ones in ``slot``; return ``[T, D]``.

        Their keys and values are stored. ``x`` and the result are as for ``hidden``.
        """
        stop = start + len(tokens)
        positions = torch.arange(start, stop, device=tokens.device)
        slots = torch.full_like(positions, slot)
        rotation, indices = self.rotary.rotation(positions, stop), cache.indices(slots, positions)
        x = self._embed(tokens, positions, stop) if x is None else x
        attend = ExtendPass(self._attention(), rotation, cache, indices, slot, stop)
        return self._run(x, len(tokens), attend, routing=self._routers.recording(cache.experts, slots, positions))

    def _memory_of(self, layer: int) -> AbstractContextManager[None]:
        return nullcontext() if self.memory is None else self.memory.forward(layer)

    def _attention(self) -> StageAttention:
        return StageAttention(self.config, self.n_q, self.n_kv, self._score_rules, self.weights.blocks)

    def _run(
        self,
        x: Tensor,
        n_tokens: int,
        attend: PassAttention,
        router_loss: RouterLoss | None = None,
        observe: Callable[[str, Tensor], None] | None = None,
        routing: Routing | None = None,
        dropout: Dropout | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        weights, tp_region = self.weights, self.tp_region(n_tokens)
        blocks = range(len(self.layers)) if blocks is None else blocks
        recompute = self.recompute if torch.is_grad_enabled() and self.params.has_grad else None
        context = ForwardContext(self.config, self.n_q, self.n_kv, self._kv_holders, tp_region, attend, router_loss,
                                 routing, dropout, self.expert_region, recompute is Recompute.selective)  # fmt: skip
        whole_block = partial(checkpoint, run_block, use_reentrant=False, preserve_rng_state=False)
        run = whole_block if recompute is Recompute.full else run_block
        for index in blocks:
            if self.on_backward is not None and x.grad_fn is not None:  # a leaf's may be known before those of weights
                x.register_hook(partial(self.on_backward, self.layers[index]))
            with self._memory_of(self.layers[index] + 1):
                x, losses = run(weights.blocks[index], index, x, context)
            if observe is not None:
                observe(f"layer {self.layers[index]}", x)
            if losses is not None:
                self._router_sums[self._routers.place(index)] += losses
        if self.on_backward is not None and x.requires_grad:
            x.register_hook(partial(self.on_backward, self.layers[blocks[-1]] + 1))
        if blocks.stop < len(self.layers):
            return x
        if self.memory is not None:
            self.memory.enter_head()
        return x if weights.final_norm is None else self._for_head(weights.final_norm(x))

    def _for_head(self, hidden: Tensor) -> Tensor:
        """Scale final hidden states instead of logits, which are more."""
        scales = self.is_last and self.config.head == "lm" and self.config.logit_scale != 1
        return hidden * self.config.logit_scale if scales else hidden

    def _embed(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        weights, tp_region = self.weights, self.tp_region(len(tokens))
        assert weights.embed is not None, "a later stage takes the hidden states of the previous stage"
        padding = -1 if self.config.padding_row is None else self.config.padding_row - self._vocab_shard.start
        look_up = partial(F.embedding, padding_idx=padding if 0 <= padding < len(weights.embed) else None)
        if self.tp.size == 1:
            x = look_up(tokens, weights.embed)
        else:
            local, is_local = self._vocab_shard.to_local(tokens, len(weights.embed))
            x = tp_region.reduce_from_tp(look_up(local, weights.embed) * is_local[:, None])
        if self.config.scaled_embedding:
            x = x * float(torch.tensor(self.config.hidden**0.5, dtype=x.dtype))  # rounded as in transformers
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if weights.positions is not None:
            if longest > len(weights.positions):
                raise ValueError(f"a row has {longest} tokens; this model has {len(weights.positions)} positions")
            x = x + F.embedding(positions[tp_region.local_tokens], weights.positions)
        return x

    @property
    def head(self) -> Tensor:
        assert self.weights.head is not None, "only the last stage has a head"
        return self.weights.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of a few tokens, ``[S, V]`` float32, for sampling. Collective over ``tp``."""
        if self._tiled_head is not None:
            logits = tiled_linear(hidden, self._tiled_head, self.config.vocab)
        else:
            local = F.linear(hidden, self.head).float()
            logits = gather_columns(local, self.tp, self._vocab_shard.start, self.config.vocab)
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def logprobs(
        self, hidden: Tensor, tokens: Tensor, lengths: Sequence[int], temperature: float = 1.0,
        prev_index: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the log-probability of each token given the previous ones, ``[T]`` float32; 0 for a row's first token.

        ``prev_index`` (``[T]`` int64) is each token's predecessor (-1: none), by default the adjacent token of its row.
        """
        return self.token_head(hidden, lengths, prev_index).logprobs(tokens, temperature)

    def token_head(self, hidden: Tensor, lengths: Sequence[int], prev_index: Tensor | None = None) -> TokenHead:
        """Return the head at the hidden states of packed tokens. Collective over ``tp``."""
        is_trained = self.params.has_grad and self._head_name in self.params.names
        add_to = self.params.grad_view(self._head_name) if is_trained else None
        states = self.tp_region(sum(lengths)).copy_to_tp(hidden)
        cap, shard = self.config.logit_softcap, self._vocab_shard
        return TokenHead(states, lengths, prev_index, self.head, cap, shard, add_to)

    def values(self, hidden: Tensor, n_tokens: int) -> Tensor:
        """Return the scalar head at every token, ``[T]`` float32 (bfloat16 is too coarse for values)."""
        return self.tp_region(n_tokens).gather_from_sp(hidden).float() @ self.head[0].float()
