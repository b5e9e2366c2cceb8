"""Speculative decoding with prompt lookup: the next tokens of a row are proposed from its own text.

A step then computes the proposed tokens of a row behind its last one, and samples behind each of them with the draw of
that position. Tokens are kept up to the first one that was not proposed, so they are the same as without proposals:
only the number of steps changes. Proposals by the last n-gram: https://github.com/apoorvumang/prompt-lookup-decoding
(Saxena 2023), verification: arXiv 2211.17192, with draws that are functions of the position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntTable = npt.NDArray[np.int64]
SIZES = (3, 2)
"""Lengths of the n-grams that are looked up, the first one that occurs before counts."""
MAX_STEP = 32
"""Tokens of a step up to which its time is mostly that of reading the weights."""
MIN_HITS, MEMORY = 0.4, 0.8
"""A row proposes while its moving average of right first tokens exceeds ``MIN_HITS``."""


class RowText:
    """The tokens of a row, and where each n-gram of them occurred last."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = list(prompt)
        self._after: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0
        self._hits = 0.5
        self._found: list[int] = []  # a continuation whose first token has not been compared yet

    def append(self, token: int) -> None:
        if self._found:
            self._hits = MEMORY * self._hits + (1 - MEMORY) * (self._found[0] == token)
            self._found = self._found[1:] if self._found[0] == token else []
        self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that followed the last n-gram before, again and again if they reach the end."""
        start = self._find()
        if start is None:
            self._found = []
            return []
        tail = self._tokens[start : start + most]
        self._found = [tail[i % len(tail)] for i in range(most)]
        return list(self._found) if self._hits > MIN_HITS else []

    def _find(self) -> int | None:
        tokens, last = self._tokens, len(self._tokens) - 1
        for end in range(self._n_indexed, last):
            for size in SIZES:
                if end + 1 >= size:
                    self._after[tuple(tokens[end + 1 - size : end + 1])] = end + 1
        self._n_indexed = max(self._n_indexed, last)
        return next((found for size in SIZES if (found := self._after.get(tuple(tokens[-size:]))) is not None), None)


@dataclass(frozen=True)
class Proposal:
    """The tokens of a step: those of a row are consecutive, its last one and then ``counts[row] - 1`` proposed ones.

    ``tokens``, ``rows`` (the index of each token's row) and ``offsets`` from the row's last token are ``[T]``.
    """

    tokens: IntTable
    rows: IntTable
    offsets: IntTable
    counts: IntTable

    def n_kept(self, sampled: IntTable, stop_ids: Sequence[int]) -> IntTable:
        """Return how many of the tokens ``[T]``, sampled behind each token, every row keeps: one more than were right.

        The first wrong one is kept itself, since the tokens before it were right. A row ends behind a stop token.
        """
        ends = self.counts.cumsum()
        is_last = np.isin(sampled, stop_ids)
        is_last[:-1] |= sampled[:-1] != self.tokens[1:]
        is_last[ends - 1] = True
        starts, found = ends - self.counts, np.flatnonzero(is_last)
        n_kept: IntTable = found[np.searchsorted(found, starts)] - starts + 1
        return n_kept


class PromptLookup:
    """Proposes at most ``most`` tokens per row of those that have begun."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._texts: dict[int, RowText] = {}

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        self._texts[row] = RowText(prompt)

    def append(self, row: int, token: int) -> None:
        self._texts[row].append(token)

    def end(self, rows: Sequence[int]) -> None:
        for row in rows:
            del self._texts[row]

    def propose(self, rows: Sequence[int], last: Sequence[int], room: Sequence[int]) -> Proposal | None:
        """Return the tokens of the next step of these rows, None without proposals.

        ``last`` has their last tokens; ``room`` tokens of a row fit behind the one that is sampled in any case.
        """
        most = min(self.most, (MAX_STEP - len(rows)) // max(1, len(rows)))
        if most < 1:
            return None
        found = [self._texts[row].propose(most)[:fits] for row, fits in zip(rows, room, strict=True)]
        if not any(found):
            return None
        counts = np.array([1 + len(some) for some in found])
        tokens = [token for first, some in zip(last, found, strict=True) for token in (first, *some)]
        offsets = np.arange(len(tokens)) - np.repeat(counts.cumsum() - counts, counts)
        return Proposal(np.array(tokens, np.int64), np.repeat(np.arange(len(rows)), counts), offsets, counts)
