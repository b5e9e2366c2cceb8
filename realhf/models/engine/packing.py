"""Packs a micro-batch, in which the common prefix of rows of one prompt is computed once, and computes its outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.data.batch import SequenceBatch
from realhf.models.low_rank import Dropout
from realhf.models.token_head import FinalStates, TokenHead
from realhf.models.transformer import Transformer
from realhf.ops.rows import on_device


@dataclass(frozen=True)
class Packing:
    """The packed tokens ``[t]`` in rows of ``lengths``; see ``rotary_attention`` for ``prefixes``.

    ``gather_index`` (``[T]``) is the index of each token of the batch among them, ``prev_index`` (``[t]``) that of each
    token's predecessor, -1: none. Both are None without shared prefixes, when the tokens are those of the batch.
    ``experts`` are those that the tokens have in generation, ``[t, L * k]``, if they are replayed; ``dropout`` is that
    of adapters in training. A filler has one token, and no loss.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...] = ()
    gather_index: Tensor | None = None
    prev_index: Tensor | None = None
    experts: Tensor | None = None
    dropout: Dropout | None = None
    is_filler: bool = False

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the values of all tokens of the batch, ``[T]``, from those of the packed tokens, ``[t]``."""
        return packed if self.gather_index is None else packed[self.gather_index]

    def pack_mask(self, mask: Tensor) -> Tensor:
        """Return which packed tokens, ``[t]``, are any token of the batch of a mask, ``[T]``."""
        if self.gather_index is None:
            return mask
        return torch.zeros_like(self.tokens).index_add_(0, self.gather_index, (mask != 0).long())


@dataclass(frozen=True)
class ForwardOutputs:
    """The final states of the packed tokens of a micro-batch; heads are computed on demand."""

    model: Transformer
    states: FinalStates
    batch: SequenceBatch
    packing: Packing

    def logprobs(self, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
        p = self.packing
        head = self.model.token_head(self.states, p.lengths, p.prev_index)
        found = p.unpack(head.logprobs(p.tokens, temperature, None if mask is None else p.pack_mask(mask)))
        return found if mask is None else found.masked_fill(mask == 0, 0.0)

    def distribution(self, ids: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = self._head_of_all_tokens().distribution(ids, temperature, mask)
        return found[:, :-1], found[:, -1]

    def top_logprobs(self, k: int, vocab: int, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return self._head_of_all_tokens().top_logprobs(k, vocab, temperature, self.batch["tokens"], mask)

    def _head_of_all_tokens(self) -> TokenHead:
        """Return the head at all tokens of the batch: those of a shared prefix have columns of their own."""
        p = self.packing
        prev_index = None if p.prev_index is None else p.unpack(p.prev_index)
        return self.model.token_head(self.states, p.lengths, prev_index)

    def values(self, mask: Tensor | None = None) -> Tensor:
        n_tokens = len(self.packing.tokens)
        if mask is None:
            return self.packing.unpack(self.model.values(self.states, n_tokens))
        if mask.shape != (shape := self.batch["tokens"].shape):
            raise ValueError(f"the mask has the shape {list(mask.shape)}, the tokens have {list(shape)}")
        index = mask.nonzero()[:, 0]
        return mask.new_zeros(mask.shape, dtype=torch.float32).index_copy(0, index, self._values_at(index))

    def last_values(self) -> Tensor:
        offsets = self.batch.columns["tokens"].offsets
        return self._values_at(on_device(torch.tensor(offsets[1:]) - 1, self.packing.tokens.device))

    def _values_at(self, index: Tensor) -> Tensor:
        """Return the values at tokens of the batch."""
        packed = index if self.packing.gather_index is None else self.packing.gather_index.index_select(0, index)
        return self.model.values(self.states, len(self.packing.tokens), packed)


def filler(device: torch.device) -> Packing:
    """Return a pass without effect, for replicas with fewer micro-batches: passes of ZeRO-2 and 3 have collectives."""
    return Packing(torch.zeros(1, dtype=torch.int64, device=device), (1,), is_filler=True)


def pack(batch: SequenceBatch, share: bool = False) -> Packing:
    """Pack a batch; with ``share``, rows of one prompt share their common prefix, found by comparing tokens."""
    tokens, lengths = batch["tokens"], batch.lengths("tokens")
    leaders, shared = list(range(len(batch))), [0] * len(batch)
    prompts: dict[int, list[int]] = {}
    for row, row_id in enumerate(batch.ids):
        prompts.setdefault(row_id.prompt, []).append(row)
    groups = [group for group in prompts.values() if len(group) > 1] if share else []
    rows = tokens.cpu().split(lengths) if groups else ()  # one copy for all groups
    for group in groups:
        if n := _common_prefix_length([rows[row] for row in group]):
            for row in group:
                leaders[row], shared[row] = group[0], n
    experts = batch["routed_experts"].view(len(tokens), -1) if "routed_experts" in batch.columns else None
    if not any(shared):
        return Packing(tokens, lengths, experts=experts)
    return _packing(tokens, lengths, leaders, shared, experts)


def _common_prefix_length(rows: list[Tensor]) -> int:
    shortest = min(len(row) for row in rows)
    first = torch.stack([row[:shortest] for row in rows])
    return int((first == first[0]).all(0).cumprod(0).sum())


def _packing(
    tokens: Tensor, lengths: tuple[int, ...], leaders: list[int], shared: list[int], experts: Tensor | None
) -> Packing:
    """Pack the tokens without the ``shared`` first ones of every row except their leader, the first row with them."""
    segments: list[int] = []
    prefixes: list[int] = []
    shared_segment: dict[int, int] = {}
    for row, (length, leader, n) in enumerate(zip(lengths, leaders, shared, strict=True)):
        if n and leader == row:
            shared_segment[row] = len(segments)
            segments.append(n)
            prefixes.append(-1)
        segments.append(length - n)
        prefixes.append(shared_segment[leader] if n else -1)
    counts, leader_of, n_shared = torch.tensor((lengths, leaders, shared))  # on the host, which knows the sizes
    starts = counts.cumsum(0) - counts
    row_T = torch.arange(len(lengths)).repeat_interleave(counts, output_size=len(tokens))
    index = torch.arange(len(tokens))
    offset = index - starts[row_T]
    source = torch.where(offset < n_shared[row_T], starts[leader_of][row_T] + offset, index)
    is_kept = source == index
    gather_index = (is_kept.cumsum(0) - 1)[source]
    prev_index = torch.where(offset > 0, gather_index.roll(1), -1)[is_kept]
    kept, gather_index, prev_index = (on_device(x, tokens.device) for x in (index[is_kept], gather_index, prev_index))
    if experts is not None:
        experts = experts.index_select(0, kept)
    return Packing(tokens.index_select(0, kept), tuple(segments), tuple(prefixes), gather_index, prev_index, experts)
