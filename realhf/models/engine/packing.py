"""What a model computes of a micro-batch: where rows of one prompt begin alike, their common part only once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.data.batch import SequenceBatch


@dataclass(frozen=True)
class Packing:
    """Tokens as a model computes them, ``[t]``, in rows of ``lengths``; see ``packed_attention`` for ``prefixes``.

    ``places`` (``[T]``) says where each token of the batch is among them, ``before`` (``[t]``) which of them precedes
    each, -1 where none does. Both are None where nothing is shared: then they are the batch's own tokens.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    prefixes: tuple[int, ...] = ()
    gather_index: Tensor | None = None
    prev_index: Tensor | None = None

    def unpack(self, of_tokens: Tensor) -> Tensor:
        """Give every token of the batch, ``[T]``, what was computed for it, ``[t]``."""
        return of_tokens if self.gather_index is None else of_tokens[self.gather_index]


def pack(batch: SequenceBatch, share: bool = False) -> Packing:
    """Return the tokens that a model computes for a batch; ``share``: rows of one prompt share what they begin with.

    What they share is found by comparing tokens, so it is exact, whatever the rows are.
    """
    tokens, lengths = batch["tokens"], batch.lengths("tokens")
    leaders, alike = list(range(len(batch))), [0] * len(batch)
    for group in _groups(batch) if share else ():
        n_alike = _n_alike([batch.columns["tokens"].rows()[row] for row in group])
        for row in group if n_alike else ():
            leaders[row], alike[row] = group[0], n_alike
    return _packing(tokens, lengths, leaders, alike) if any(alike) else Packing(tokens, lengths)


def _groups(batch: SequenceBatch) -> list[list[int]]:
    """Rows of one prompt, where there are several."""
    of_prompt: dict[int, list[int]] = {}
    for row, name in enumerate(batch.ids):
        of_prompt.setdefault(name.prompt, []).append(row)
    return [rows for rows in of_prompt.values() if len(rows) > 1]


def _n_alike(rows: list[Tensor]) -> int:
    """With how many tokens all rows begin alike."""
    shortest = min(len(row) for row in rows)
    first = torch.stack([row[:shortest] for row in rows])
    return int((first == first[0]).all(0).cumprod(0).sum())


def _packing(tokens: Tensor, lengths: tuple[int, ...], leaders: list[int], alike: list[int]) -> Packing:
    """The tokens without those that a row has in common with an earlier one, its leader."""
    segments: list[int] = []
    prefixes: list[int] = []
    shared_segment: dict[int, int] = {}
    for row, (length, leader, n_alike) in enumerate(zip(lengths, leaders, alike, strict=True)):
        if n_alike and leader == row:
            shared_segment[row] = len(segments)
            segments.append(n_alike)
            prefixes.append(-1)
        segments.append(length - n_alike)
        prefixes.append(shared_segment[leader] if n_alike else -1)
    counts, leader_of, n_alike_of = torch.tensor((lengths, leaders, alike), device=tokens.device)
    starts = counts.cumsum(0) - counts
    row_T = torch.arange(len(lengths), device=tokens.device).repeat_interleave(counts, output_size=len(tokens))
    here = torch.arange(len(tokens), device=tokens.device)
    inside = here - starts[row_T]
    source = torch.where(inside < n_alike_of[row_T], starts[leader_of][row_T] + inside, here)
    kept = source == here
    places = (kept.cumsum(0) - 1)[source]
    before = torch.where(inside > 0, places.roll(1), -1)[kept]
    return Packing(tokens[kept], tuple(segments), tuple(prefixes), places, before)
