"""In which order the chunks of packed rows are computed, and which tokens a convolution reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from realhf.ops.rows import on_device

CHUNK = 64
"""Tokens that are computed by products instead of one after the other."""


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """How packed rows of ``lengths`` tokens are computed; row i continues row ``prefixes[i] >= 0`` (none if empty).

    A row that others continue has no prefix itself. The layers of a pass share the indices.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    kernel: int
    device: torch.device
    chunk: int = CHUNK

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        return self.prefixes or (-1,) * len(self.lengths)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rows without and with a prefix, by descending number of chunks.

        A group is computed in steps of one chunk per row. The rows of a step are the first ones of the step before.
        """
        by_size = sorted(range(len(self.lengths)), key=lambda row: -self._n_chunks(row))
        return (
            tuple(row for row in by_size if self.parents[row] < 0),
            tuple(row for row in by_size if self.parents[row] >= 0),
        )

    @cached_property
    def _indices(self) -> tuple[Tensor, ...]:
        """All index tensors, with one copy to the device."""
        parts = *self._chunks(), *self._windows(), *self._picks()
        flat = on_device(torch.cat([part.flatten() for part in parts]), self.device)
        return tuple(
            own.view(part.shape) for own, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)
        )

    @property
    def picks(self) -> tuple[Tensor, ...]:
        """Indices of states: the rows without prefix, the place of every prefix among them, and the rows' own order.

        They are in the order of ``groups``; the last one undoes it.
        """
        return self._indices[5:]

    def _picks(self) -> list[Tensor]:
        roots, children = self.groups
        place_of, both = {row: place for place, row in enumerate(roots)}, roots + children
        parents = [place_of[self.parents[row]] for row in children]
        orders = roots, parents, sorted(range(len(both)), key=both.__getitem__)
        return [torch.tensor(some, dtype=torch.int64) for some in orders]

    def _n_chunks(self, row: int) -> int:
        return -(-self.lengths[row] // self.chunk)

    def step_sizes(self, rows: Sequence[int]) -> list[int]:
        """Return the number of rows of every step of a group."""
        counts = [self._n_chunks(row) for row in rows]
        return [sum(count > step for count in counts) for step in range(max(counts, default=0))]

    def _chunks(self) -> tuple[Tensor, Tensor]:
        n_tokens, starts = self._starts[-1], self._starts
        firsts = [
            (starts[row] + step * self.chunk, starts[row + 1])
            for rows in self.groups
            for step, size in enumerate(self.step_sizes(rows))
            for row in rows[:size]
        ]
        edges = torch.tensor(firsts, dtype=torch.int64).view(-1, 2)
        tokens = edges[:, :1] + torch.arange(self.chunk)
        is_token = tokens < edges[:, 1:]
        places = torch.empty(n_tokens, dtype=torch.int64)
        places[tokens[is_token]] = is_token.flatten().nonzero().squeeze(1)
        return tokens.masked_fill(~is_token, n_tokens), places

    @cached_property
    def table(self) -> Tensor:
        """Lengths and prefixes, ``[2, B]``, for a kernel on the CPU."""
        return torch.tensor((self.lengths, self.parents), dtype=torch.int64).view(2, -1)

    @property
    def tokens(self) -> Tensor:
        """The tokens of every chunk in the order of the steps, ``[N, chunk]``; T stands for none."""
        return self._indices[0]

    @property
    def places(self) -> Tensor:
        """The place of every token in the flattened chunks, ``[T]``."""
        return self._indices[1]

    @property
    def windows(self) -> tuple[Tensor, ...]:
        """Indices of the convolution: of its input, of tokens in its result, and of rows' last inputs in its input.

        In the input every row is behind the ``kernel - 1`` tokens before it, which for a row without prefix have the
        numbers from T on. The last index is ``[B, kernel - 1]``.
        """
        return self._indices[2:5]

    def _windows(self) -> tuple[Tensor, Tensor, Tensor]:
        before, starts = self.kernel - 1, self._starts
        parts = [
            part for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False))
            for part in (self._before(row), torch.arange(start, stop))
        ]  # fmt: skip
        counts = torch.tensor(self.lengths, dtype=torch.int64)
        numbers = torch.arange(len(counts)) * before
        places = torch.arange(starts[-1]) + numbers.repeat_interleave(counts)
        ends = torch.tensor(starts[1:], dtype=torch.int64) + numbers
        inputs = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        return inputs, places, ends[:, None] + torch.arange(before)

    def _before(self, row: int) -> Tensor:
        """Return the ``kernel - 1`` tokens before a row, or before the one that it continues if this is shorter."""
        before, parent = self.kernel - 1, self.parents[row]
        if parent < 0:
            return self._starts[-1] + row * before + torch.arange(before)
        start, stop = self._starts[parent : parent + 2]
        tokens = torch.cat((self._before(parent), torch.arange(start, stop)))
        return tokens[len(tokens) - before :]
