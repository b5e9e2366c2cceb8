"""The embedding of tokens, their final states, and the unembedding: what the states before tokens say about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import ParamSpec, shard_box
from realhf.comm.process_groups import Group
from realhf.comm.tensor_parallel import TensorFunction, TensorParallelRegion
from realhf.models.blocks import Block, ForwardContext, finish_block, mix_values
from realhf.models.flat_params import FlatParams
from realhf.ops.distributions import packed_distribution, packed_top_logprobs
from realhf.ops.logprobs import FULL_VOCAB, VocabShard, packed_logprobs
from realhf.ops.rows import on_device


def vocab_shard(vocab: int, base: FlatParams, tp: Group) -> VocabShard:
    """Return the rows of the embedding or unembedding that a shard has."""
    names = [name for name in ("embed.weight", "head.weight") if name in base.names]
    if tp.size == 1 or not names:
        return FULL_VOCAB
    spec = ParamSpec("vocabulary", (vocab,), 0, 0, vocab)
    spans = [shard_box(spec, tp.size, tp_rank)[0] for tp_rank in range(tp.size)]
    widths = tuple(stop - start for start, stop in spans)
    # by the box, not by the index in the group: groups order members by rank, a mesh may order them differently
    return VocabShard(base.box(names[0])[0][0], widths, tp.all_reduce, tp.all_max)


def embed_tokens(
    config: ModelConfig,
    weight: Tensor,
    of_positions: Tensor | None,
    shard: VocabShard,
    region: TensorParallelRegion,
    tokens: Tensor,
    positions: Tensor,
    longest: int,
) -> Tensor:
    """Return the embeddings of tokens, ``[T, D]``, with those of their positions, which are below ``longest``.

    ``weight`` is this rank's share ``[v, D]``. Raises ValueError for a row that is longer than the learned positions.
    """
    padding = -1 if config.padding_row is None else config.padding_row - shard.start
    look_up = partial(F.embedding, padding_idx=padding if 0 <= padding < len(weight) else None)
    if region.group.size == 1:
        x = look_up(tokens, weight)
    else:
        local, is_local = shard.to_local(tokens, len(weight))
        x = region.reduce_from_tp(look_up(local, weight) * is_local[:, None])
    if config.scaled_embedding:
        x = x * float(torch.tensor(config.hidden**0.5, dtype=x.dtype))  # rounded as in transformers
    if config.embedding_scale != 1:
        x = x * config.embedding_scale
    if of_positions is not None:
        if longest > len(of_positions):
            raise ValueError(f"a row has {longest} tokens; this model has {len(of_positions)} positions")
        x = x + F.embedding(region.local(positions), of_positions)
    return x


class FinalStates:
    """The hidden states of packed tokens after the last block and norm, ``[t, D]``, computed where they are read.

    After its attention, the last block computes every token alone: those that no head reads skip its MLP.
    """

    def __init__(self, states: Tensor | None, compute: Callable[[Tensor | None], Tensor] | None = None) -> None:
        """Take the states, or a function that computes them at an index of tokens, None: at all."""
        self._all, self._compute = states, compute
        self._some: tuple[Tensor, Tensor] | None = None

    @classmethod
    def behind_attention(
        cls, run: Callable[..., Any], block: Block, index: int, x: Tensor, context: ForwardContext, end: TensorFunction
    ) -> "FinalStates":
        """Compute a last block's attention; its MLP, and the ``end``, where states are read.

        ``run`` calls a function, and may recompute it in the backward pass.
        """
        mixed = run(mix_values, block, index, x, context)

        def compute(tokens: Tensor | None) -> Tensor:
            some = (x, mixed) if tokens is None else (x.index_select(0, tokens), mixed.index_select(0, tokens))
            return end(run(finish_block, block, index, *some, context)[0])

        return cls(None, compute)

    def all(self) -> Tensor:
        if self._all is None:
            assert self._compute is not None
            self._all = self._compute(None)
        return self._all

    def at(self, index: Tensor) -> Tensor:
        """Return the states of some tokens, ``[len(index), D]``; the last result is kept."""
        if self._all is not None:
            return self._all.index_select(0, index)
        if self._some is None or not torch.equal(self._some[0], index):
            assert self._compute is not None
            self._some = index, self._compute(index)
        return self._some[1]


@dataclass(frozen=True)
class TokenHead:
    """``states`` are the final hidden states of packed tokens, ``[t, D]``, of rows with ``lengths``.

    ``enter`` is applied to those that are read. ``prev_index`` (``[T]`` int64) is each token's predecessor among the
    states (-1: none), by default the adjacent token of its row. With a ``mask``, methods compute only its tokens, and
    wait for a GPU to count them; other tokens have 0. Gradients of ``weight``, ``[V, D]``, are added to ``add_to`` if
    given. With context parallelism ``states`` are those of this member of the ``region``; results are of all tokens.
    """

    states: FinalStates
    enter: TensorFunction | None
    lengths: Sequence[int]
    prev_index: Tensor | None
    weight: Tensor
    softcap: float
    shard: VocabShard
    add_to: Tensor | None
    region: TensorParallelRegion | None = None

    def logprobs(self, tokens: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
        """Return the log-probability of each token given the previous ones, ``[T]`` float32; 0 for a row's first."""
        return self._at_tokens(
            lambda states, targets: packed_logprobs(
                states, self.weight, targets, temperature, self.softcap, self.shard, add_to=self.add_to
            ),
            tokens,
            mask,
        )

    def distribution(self, ids: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
        """Return the log-probabilities of ``ids``, ``[T, k]``, in place of each token, and the entropy: ``[T, k + 1]``.

        All are 0 for a row's first token.
        """
        return self._at_tokens(
            lambda states, at: packed_distribution(
                states, self.weight, at, temperature, self.softcap, self.shard, self.add_to
            ),
            ids,
            mask,
        )

    def top_logprobs(
        self, k: int, vocab: int, temperature: float, tokens: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the ``k`` most probable tokens below ``vocab`` in place of each token, then their log-probabilities.

        ``[T, 2 k]`` float32, which represents every token number; 0 for a row's first token.
        """

        def score(states: Tensor, _: Tensor) -> Tensor:
            found = packed_top_logprobs(states, self.weight, k, temperature, self.softcap, self.shard, vocab)
            return torch.cat([x.float() for x in found], 1)

        return self._at_tokens(score, tokens, mask)

    def _at_tokens(
        self, score: Callable[[Tensor, Tensor], Tensor], targets: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return ``score(states, targets)`` of each token's ``targets`` in the state before it, 0 at rows' starts.

        Only tokens of the ``mask``, ``[T]``, are computed; others have 0.
        """
        has_prev = self._has_prev(targets)
        if mask is not None and mask.shape != has_prev.shape:  # one number would count for all tokens
            raise ValueError(f"the mask has the shape {list(mask.shape)}, the tokens have {list(has_prev.shape)}")
        wanted = has_prev if mask is None else has_prev & mask.bool()
        if self.region is not None:  # each member has the states of its own tokens, of equal number
            own = score(self.states.all(), self.region.local(targets.roll(-1, 0)))
            found = self.region.gather_from_sp(own).roll(1, 0)
        elif mask is not None:
            index = wanted.nonzero()[:, 0]
            prev_index = index - 1 if self.prev_index is None else self.prev_index.index_select(0, index)
            found = score(self._entered(self.states.at(prev_index)), targets.index_select(0, index))
            return found.new_zeros(len(targets), *found.shape[1:]).index_copy(0, index, found)
        elif self.prev_index is not None:
            states = self._entered(self.states.all())
            found = score(states.index_select(0, self.prev_index.clamp(min=0)), targets)
        else:  # each token predicts the next one; predictions across row boundaries are masked
            found = score(self._entered(self.states.all()), targets.roll(-1, 0)).roll(1, 0)
        return found.masked_fill(~wanted.view(-1, *[1] * (found.ndim - 1)), 0.0)

    def _entered(self, states: Tensor) -> Tensor:
        return states if self.enter is None else self.enter(states)

    def _has_prev(self, targets: Tensor) -> Tensor:
        """Return which tokens are not the first of their row, ``[T]`` bool."""
        if self.prev_index is not None:
            return self.prev_index >= 0
        starts = [start for start, n in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False) if n]
        firsts = on_device(torch.tensor(starts, dtype=torch.int64), targets.device)
        return targets.new_ones(len(targets), dtype=torch.bool).index_fill_(0, firsts, False)
