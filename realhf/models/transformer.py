"""The decoder of any family on packed rows: one shard, which is a pipeline stage and a tensor-parallel slice of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.config.choices import Recompute, WeightType
from realhf.api.model_config import ModelConfig
from realhf.base.partition import consecutive_runs
from realhf.comm.context_parallel import ContextRegion
from realhf.comm.expert_parallel import ExpertRegion
from realhf.comm.process_groups import Group
from realhf.comm.tensor_parallel import TensorParallelRegion, gather_columns
from realhf.models import blocks as stage_blocks
from realhf.models.attention.context_pass import ContextPass
from realhf.models.attention.delta_mixer import new_delta_cache, rows_of_states
from realhf.models.attention.pass_attention import DecodePass, ExtendPass, PackedPass, StageAttention
from realhf.models.attention.stage_rotary import StageRotary
from realhf.models.blocks import Experts, ForwardContext, PassAttention, RouterLoss, Routing
from realhf.models.bound_weights import BoundWeights, StageWeights, count_heads
from realhf.models.flat_params import FlatParams
from realhf.models.fused.fused_blocks import DecodeStep, TiledBlocks, fuse_blocks, tiled_blocks
from realhf.models.fused.fused_steps import FusedSteps, fused_steps
from realhf.models.fused.tiles import pack_tiles, tiled_linear
from realhf.models.kv_cache import KVCache
from realhf.models.low_rank import Dropout
from realhf.models.routing import StageRouters
from realhf.models.token_head import FinalStates, TokenHead, embed_tokens, vocab_shard
from realhf.models.zero.layer_memory import EMBEDDING, LayerMemory
from realhf.ops import varlen
from realhf.ops.attention import ScoreParams
from realhf.ops.cascade import SharedPrefixes
from realhf.ops.rows import RowLayout, on_device
from realhf.ops.varlen import CachedRows, VarlenKernel

SINGLE_RANK_GROUP = Group((0,), 0)


class Transformer:
    """The layers in ``params``, sharded over the tensor-parallel group ``tp``; rows are divided over ``cp``.

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
        cp: Group = SINGLE_RANK_GROUP,
    ) -> None:
        self.config, self.params, self.tp, self.cp = config, params, tp, cp
        self.base = params if base is None else base
        self.recompute, self.sequence_parallel = recompute, sequence_parallel and tp.size > 1
        self.tp_overlap, self.expert_region = tp_overlap, expert_region
        self.layers = [i for i in range(config.n_layers) if f"layers.{i}.wo" in self.base.names]
        assert self.layers, "a stage has at least one layer"
        self.chunks = consecutive_runs(self.layers)  # layers of other stages are between those of two chunks
        self._routers = StageRouters(config, self.layers)
        self.is_first, self.is_last = self.layers[0] == 0, "final_norm.weight" in self.base.names
        self.n_q, self.n_kv, self._kv_holders = count_heads(config, self.base, self.layers, tp.size)
        self._head_name = next((name for some in (params, self.base) for name in some.names if name == "head.weight"),
                               "embed.weight")  # fmt: skip
        self._vocab_shard = vocab_shard(config.vocab, self.base, tp)
        is_delta = [layer in config.delta_layers for layer in self.layers]
        self._places = tuple(is_delta[:index].count(kind) for index, kind in enumerate(is_delta))
        self._score_rules = tuple(
            ScoreParams(config.attention_scale, config.sliding_window(i), config.attention_softcap) for i in self.layers
        )
        self.rotary = StageRotary(config, self.layers, self.device)
        self._weights: StageWeights | None = None
        self._bound_with_grad = False
        self._tiled_blocks: TiledBlocks | None = None  # copies, valid while the weights do not change
        self._tiled_head: Tensor | None = None
        self.fused_steps: FusedSteps | None = None
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
        return self._routers.of_all_layers(sums)

    @property
    def divides_tokens(self) -> bool:
        """Whether the workers of a replica have different tokens between layers in training."""
        return self.sequence_parallel or self.cp.size > 1

    def token_region(self, n_tokens: int) -> TensorParallelRegion:
        """Return the region whose members divide the tokens of a pass: that of context or tensor parallelism."""
        return ContextRegion(self.cp, n_tokens) if self.cp.size > 1 else self.tp_region(n_tokens)

    def tp_region(self, n_tokens: int) -> TensorParallelRegion:
        """Return the tensor-parallel region of a pass; tokens are sharded only in training."""
        sequence = self.sequence_parallel and torch.is_grad_enabled()
        return TensorParallelRegion(self.tp, n_tokens, sequence, self.tp_overlap)

    def new_cache(self, n_slots: int, max_len: int, records_experts: bool = False, bf16: bool = False) -> KVCache:
        assert len(self.chunks) == 1, "calls that generate have one chunk of layers per stage"
        is_latent = self.config.latent is not None
        heads = (1, self.config.cache_numel) if is_latent else (self.n_kv, self.config.head_dim)
        n_attention = len(set(self.layers) & set(self.config.attention_layers))
        sizes = (n_attention, *heads, n_slots, max_len)
        by_token = self._cache_kernel() is not None
        experts = self._routers.new_cache(n_slots, max_len, self.device) if records_experts else None
        fused = self.weights.fused
        zeroed = not by_token and (fused is None or not fused.computes_attention)
        delta = new_delta_cache(self.config, self.base, self.layers, n_slots)
        return KVCache(*sizes, self.base.data, zeroed, by_token, experts, is_latent, delta, bf16)

    def _cache_kernel(self) -> VarlenKernel | None:
        """Return a GPU kernel with which decoding reads only the used length of the cache, if there is one."""
        if self.config.attention_sinks or self.config.latent:
            return None
        rules = (rule.rule for rule in self._score_rules)
        return varlen.kernel_for(self.device, self.dtype, self.config.head_dim, rules, decoding=True)

    def _bind(self) -> StageWeights:
        bound = BoundWeights(self.config, self.params, self.base)
        weights = bound.stage(self.layers, self.is_first, self._head_name if self.is_last else "")
        if self.memory is not None and self.memory.weights is not None:
            return weights
        shape = self._score_rules, self.rotary, self._places, self.tp.size, self.expert_region
        return replace(weights, fused=fuse_blocks(self.config, self.n_q, weights.blocks, weights.final_norm, *shape))

    @property
    def weights(self) -> StageWeights:
        assert not (self.params.is_free or self.base.is_free), "parameters are used while their memory is released"
        if self._weights is None or self._bound_with_grad != self.params.has_grad:
            self._weights, self._bound_with_grad = self._bind(), self.params.has_grad
        return self._weights

    def hidden(
        self, tokens: Tensor, lengths: Sequence[int], cache: KVCache | None = None, slots: Sequence[int] | None = None,
        x: Tensor | None = None, observe: Callable[[str, Tensor], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return all ``states``; ``observe`` receives the embedding's and every layer's name and output."""
        return self.states(tokens, lengths, cache, slots, x, observe=observe).all()

    def states(
        self, tokens: Tensor, lengths: Sequence[int], cache: KVCache | None = None, slots: Sequence[int] | None = None,
        x: Tensor | None = None, token_weight: float = 0.0, prefixes: Sequence[int] = (),
        observe: Callable[[str, Tensor], None] | None = None, experts: Tensor | None = None,
        dropout: Dropout | None = None, chunk: int = 0,
    ) -> FinalStates:  # fmt: skip
        """Run packed rows through a chunk of this stage; return ``[T, D]``, of the last one after the final norm.

        With context parallelism, or sequence parallelism in training, the result has only this rank's tokens. ``x`` is
        the previous chunk's output (None on the first). Positions start at 0 in every row, or continue those of row
        ``prefixes[i]`` (see ``rotary_attention``). With a cache, keys and values of row i are stored in slot
        ``slots[i]`` (prefill). Rows sorted by length are fastest. With a ``token_weight``, the router losses join the
        loss that is differentiated through the result: their mean over routed layers, summed over tokens, times this
        weight. ``experts``, ``[T, L * k]`` of all routed layers, replace the choice of the routers (see ``route``);
        ``dropout`` is that of adapters. Raises ValueError for a row that is longer than the learned positions.
        """
        layout, region = RowLayout(tuple(lengths), tuple(prefixes), tokens.device), self.token_region(len(tokens))
        routing: Routing | None = None
        if experts is not None:
            routing = self._routers.replay(region.local(experts))
        has_router_loss = token_weight and self.config.n_experts
        router_loss = RouterLoss(layout.rows, len(lengths), token_weight, region) if has_router_loss else None
        if isinstance(region, ContextRegion):
            assert cache is None and not prefixes, "rows of context parallelism are whole, and not stored"
            dropout = None if dropout is None else replace(dropout, keys=region.local(dropout.keys))
            positions = region.local(layout.positions)
            rotation = self.rotary.rotation(positions, layout.longest)
            divided = ContextPass(self._attention(), layout, rotation, region, dropout)
            x = self._embed(region.local(tokens), positions, layout.longest) if x is None else x
            return self._states(x, len(positions), divided, router_loss, observe, routing, dropout)
        rotation = self.rotary.rotation(layout.positions, layout.longest, layout.rotation)
        indices = slot_of_row = None
        if cache is not None:
            assert slots is not None and len(slots) == len(lengths)
            slot_of_row = on_device(torch.tensor(slots, dtype=torch.int64), tokens.device)
            slot_of = slot_of_row[layout.rows]
            indices = cache.indices(slot_of, layout.positions)
            routing = self._routers.recording(cache.experts, slot_of, layout.positions)

        delta_rows = rows_of_states(self.config, lengths, prefixes, self.device)
        attend = PackedPass(self._attention(), layout, rotation, cache, indices, dropout, delta_rows, slot_of_row)
        with self._memory_of(EMBEDDING) if x is None else nullcontext():
            x = self._embed(tokens, layout.positions, layout.longest) if x is None else x
        if observe is not None:
            observe("the embedding", x)
        return self._states(x, len(tokens), attend, router_loss, observe, routing, dropout, self.chunks[chunk], True)

    @contextmanager
    def decoding(self, dtype: WeightType = WeightType.auto) -> Iterator[None]:
        """Tile the weights once for many calls of ``decode``, in which they must not change; see ``tiled_blocks``."""
        self._tiled_blocks, head = tiled_blocks(self.weights.fused, dtype), self.weights.head
        if self._tiled_blocks is not None and head is not None:
            self._tiled_head = pack_tiles(head.detach())
        if self.tp.size == 1:
            self.fused_steps = fused_steps(self.config, self.weights, self._tiled_blocks, self._tiled_head)
        try:
            yield
        finally:
            self._tiled_blocks = self._tiled_head = self.fused_steps = None

    @property
    def supports_shared_prefixes(self) -> bool:
        """``decode`` can read a prefix from the slot of another row."""
        kernel, fused = self._cache_kernel(), self.weights.fused
        can_read = kernel.reads_spans if kernel is not None else fused is not None and fused.computes_attention
        can_read = can_read and not self.config.delta_layers  # the states of a row are its own
        return can_read and not any(rule.window for rule in self._score_rules)

    @property
    def decodes_tokens_together(self) -> bool:
        """``decode`` takes several tokens of a slot."""
        return self.weights.fused is not None and self.weights.fused.is_whole

    @property
    def waits_for_experts(self) -> bool:
        """Whether the host reads in every routed layer how many tokens each expert has."""
        return any(isinstance(block.mlp, Experts) and not block.mlp.mlps.are_grouped for block in self.weights.blocks)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, x: Tensor | None = None,
        prefixes: Tensor | SharedPrefixes | None = None, longest: int = 0, slots: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run one token for each of the cache's first S slots through this stage and return ``[S, D]``.

        Slot s stores its key and value at ``positions[s]`` and attends to positions up to it. ``prefixes`` describes
        common prefixes, which are then read once: on a GPU as ``SharedPrefixes``, on a CPU by ``[3, S]`` int64, for
        each slot a prefix number, the length that all slots of this number have in common, and a slot that stores it
        (another one only if the model ``supports_shared_prefixes``). ``longest`` bounds the row lengths (0: unknown).

        With ``slots`` ``[S]``, if the model ``decodes_tokens_together``, token i belongs to ``slots[i]``: those of a
        slot are consecutive, as their positions are, and each attends to the ones before it. The result is the same
        bits as that of one call per token.
        """
        assert slots is None or (self.decodes_tokens_together and prefixes is None)
        count = len(tokens)
        longest = longest or (int(positions.max()) + 1 if count else 0)
        x = self._embed(tokens, positions, longest) if x is None else x
        own_slots = torch.arange(count, device=positions.device) if slots is None else slots
        routing = self._routers.recording(cache.experts, own_slots, positions)
        if (fused := self.weights.fused) is not None:
            assert not isinstance(prefixes, SharedPrefixes)
            blocks = self._tiled_blocks or fused.tiled()
            step = DecodeStep(positions, cache, prefixes, longest, routing, slots)
            if fused.is_whole:
                return self._for_head(blocks.run(x, step))
        kernel = self._cache_kernel() if cache.by_token else None
        rows = None if kernel is None else CachedRows.of(kernel, positions, cache.max_len)
        rotation = self.rotary.rotation(positions, longest)
        attend = DecodePass(self._attention(), rotation, cache, own_slots, positions, longest, rows, prefixes)
        if fused is None:
            return self._states(x, count, attend, routing=routing).all()
        return self._last(
            blocks.run_sublayers(x, step, self.weights.blocks, self._context(count, attend, routing=routing))
        )

    def extend(self, tokens: Tensor, start: int, slot: int, cache: KVCache, x: Tensor | None = None) -> Tensor:
        """Run ``tokens`` ``[T]`` of one row, which follow ``start`` cached ones in ``slot``; return ``[T, D]``.

        Their keys and values are stored. ``x`` and the result are as for ``hidden``.
        """
        stop = start + len(tokens)
        positions = torch.arange(start, stop, device=tokens.device)
        slots = torch.full_like(positions, slot)
        rotation, indices = self.rotary.rotation(positions, stop), cache.indices(slots, positions)
        x = self._embed(tokens, positions, stop) if x is None else x
        delta_rows = rows_of_states(self.config, (len(tokens),), (), self.device)
        attend = ExtendPass(self._attention(), rotation, cache, indices, slot, stop, delta_rows)
        routing = self._routers.recording(cache.experts, slots, positions)
        return self._states(x, len(tokens), attend, routing=routing).all()

    def _memory_of(self, layer: int) -> AbstractContextManager[None]:
        return nullcontext() if self.memory is None else self.memory.forward(layer)

    def _attention(self) -> StageAttention:
        return StageAttention(self.config, self.n_q, self.n_kv, self._score_rules, self.weights.blocks, self._places)

    def _states(
        self, x: Tensor, n_tokens: int, attend: PassAttention, router_loss: RouterLoss | None = None,
        observe: Callable[[str, Tensor], None] | None = None, routing: Routing | None = None,
        dropout: Dropout | None = None, blocks: range | None = None, where_read: bool = False,
    ) -> FinalStates:  # fmt: skip
        """Run blocks, by default all, and the final norm; ``where_read``: if possible, see ``FinalStates``."""
        weights, blocks = self.weights, range(len(self.layers)) if blocks is None else blocks
        recompute = self.recompute if torch.is_grad_enabled() and self.params.has_grad else None
        context = self._context(n_tokens, attend, router_loss, routing, dropout, recompute is Recompute.selective)
        run = stage_blocks.recomputed if recompute is Recompute.full else stage_blocks.called
        has_end, last = blocks.stop == len(self.layers), weights.blocks[blocks[-1]]
        has_hooks = (observe, self.on_backward, self.memory) != (None, None, None)
        where_read &= has_end and not has_hooks and not self.sequence_parallel and last.ends_token_by_token(context)
        for index in blocks[:-1] if where_read else blocks:
            if self.on_backward is not None and x.grad_fn is not None:  # a leaf's may be known before those of weights
                x.register_hook(partial(self.on_backward, self.layers[index]))
            with self._memory_of(self.layers[index] + 1):
                x, router_sums = run(stage_blocks.run_block, weights.blocks[index], index, x, context)
            if observe is not None:
                observe(f"layer {self.layers[index]}", x)
            if router_sums is not None:
                router_sums.add_to(self._router_sums[self._routers.place(index)])
        if where_read:
            return FinalStates.behind_attention(run, last, blocks[-1], x, context, self._last)
        if self.on_backward is not None and x.requires_grad:
            x.register_hook(partial(self.on_backward, self.layers[blocks[-1]] + 1))
        if has_end and self.memory is not None:
            self.memory.enter_head()
        return FinalStates(self._last(x) if has_end else x)

    def _context(
        self, n_tokens: int, attend: PassAttention, router_loss: RouterLoss | None = None,
        routing: Routing | None = None, dropout: Dropout | None = None, recomputes_inputs: bool = False,
    ) -> ForwardContext:  # fmt: skip
        return ForwardContext(self.config, self.n_q, self.n_kv, self._kv_holders, self.tp_region(n_tokens), attend,
                              router_loss, routing, dropout, self.expert_region, recomputes_inputs)  # fmt: skip

    def _last(self, x: Tensor) -> Tensor:
        """Return what a stage passes on: on the last one, final hidden states."""
        norm = self.weights.final_norm
        return x if norm is None else self._for_head(norm(x))

    def _for_head(self, hidden: Tensor) -> Tensor:
        """Scale final hidden states instead of logits, which are more."""
        scales = self.is_last and self.config.head == "lm" and self.config.logit_scale != 1
        return hidden * self.config.logit_scale if scales else hidden

    def _embed(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        weights, region = self.weights, self.tp_region(len(tokens))
        assert weights.embed is not None, "a later stage takes the hidden states of the previous stage"
        where = self._vocab_shard, region, tokens, positions, longest
        return embed_tokens(self.config, weights.embed, weights.positions, *where)

    @property
    def head(self) -> Tensor:
        assert self.weights.head is not None, "only the last stage has a head"
        return self.weights.head

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of a few tokens, ``[S, V]`` float32, for sampling. Collective over ``tp``."""
        if self._tiled_head is not None:
            local = tiled_linear(hidden, self._tiled_head, len(self.head))
        else:
            local = F.linear(hidden, self.head).float()
        logits = gather_columns(local, self.tp, self._vocab_shard.start, self.config.vocab)
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def logprobs(self, hidden: Tensor, tokens: Tensor, lengths: Sequence[int], temperature: float = 1.0) -> Tensor:
        """Return the log-probability of each token, as a ``TokenHead`` does, at final hidden states ``[T, D]``."""
        return self.token_head(FinalStates(hidden), lengths).logprobs(tokens, temperature)

    def token_head(self, states: FinalStates, lengths: Sequence[int], prev_index: Tensor | None = None) -> TokenHead:
        """Return the head at the states of packed tokens. Collective over ``tp``."""
        is_trained = self.params.has_grad and self._head_name in self.params.names
        add_to = self.params.grad_view(self._head_name) if is_trained else None
        region = self.token_region(sum(lengths))
        enter, own = (None, region) if self.cp.size > 1 else (region.copy_to_tp, None)
        if self.sequence_parallel:  # workers have different tokens until here
            states, enter = FinalStates(region.copy_to_tp(states.all())), None
        cap, shard = self.config.logit_softcap, self._vocab_shard
        return TokenHead(states, enter, lengths, prev_index, self.head, cap, shard, add_to, own)

    def values(self, states: FinalStates, n_tokens: int, index: Tensor | None = None) -> Tensor:
        """Return the scalar head at every token, ``[T]`` float32 (bfloat16 is too coarse), or at those of an index."""
        region, head = self.token_region(n_tokens), self.head[0].float()
        if self.cp.size > 1:  # gradients of the head are summed over its members
            values = region.gather_from_sp(states.all().float() @ head)
        elif index is None or self.sequence_parallel:
            values = region.gather_from_sp(states.all()).float() @ head
        else:
            return states.at(index).float() @ head
        return values if index is None else values.index_select(0, index)
