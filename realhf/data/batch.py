"""Packed batches: columns of concatenated rows without padding, each with its own lengths.

Per-token columns have the lengths of ``tokens``; scalar columns have length 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from realhf.api.batch_meta import BatchMeta, ColumnMeta, RowId


@dataclass(frozen=True)
class Column:
    """``data`` is one-dimensional, of ``sum(lengths)`` elements; row i follows row i-1."""

    data: Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        if self.data.ndim != 1 or self.data.numel() != total:
            raise ValueError(f"column of shape {tuple(self.data.shape)} for rows with {total} elements in total")

    @property
    def offsets(self) -> list[int]:
        """Start of every row and end of the last, ``B+1`` numbers."""
        return [0, *accumulate(self.lengths)]

    def rows(self) -> tuple[Tensor, ...]:
        return self.data.split(self.lengths) if self.lengths else ()

    def select(self, index: Sequence[int]) -> "Column":
        """Return the rows ``index`` in that order, as a view if they are consecutive."""
        lengths = tuple(self.lengths[i] for i in index)
        if not index:
            return Column(self.data[:0], ())
        if list(index) == list(range(index[0], index[0] + len(index))):
            start = sum(self.lengths[: index[0]])
            return Column(self.data[start : start + sum(lengths)], lengths)
        rows = self.rows()
        return Column(torch.cat([rows[i] for i in index]), lengths)

    @staticmethod
    def of(rows: Sequence[Tensor]) -> "Column":
        return Column(torch.cat(list(rows)), tuple(r.numel() for r in rows))

    @staticmethod
    def scalars(values: Tensor) -> "Column":
        return Column(values.reshape(-1), (1,) * values.numel())


@dataclass(frozen=True)
class SequenceBatch:
    """The rows ``ids`` and their columns."""

    ids: tuple[RowId, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, column in self.columns.items():
            if len(column.lengths) != len(self.ids):
                raise ValueError(f"column '{key}' has {len(column.lengths)} rows, the batch has {len(self.ids)}")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Tensor:
        return self.columns[key].data

    def lengths(self, key: str) -> tuple[int, ...]:
        return self.columns[key].lengths

    @property
    def meta(self) -> BatchMeta:
        columns = {k: ColumnMeta(str(c.data.dtype).removeprefix("torch."), c.lengths) for k, c in self.columns.items()}
        return BatchMeta(self.ids, columns)

    def select(self, index: Sequence[int]) -> "SequenceBatch":
        return SequenceBatch(tuple(self.ids[i] for i in index), {k: c.select(index) for k, c in self.columns.items()})

    def only(self, keys: Iterable[str]) -> "SequenceBatch":
        return SequenceBatch(self.ids, {k: self.columns[k] for k in keys})

    def with_columns(self, **columns: Column) -> "SequenceBatch":
        return SequenceBatch(self.ids, {**self.columns, **columns})

    def with_scalars(self, key: str, values: Tensor) -> "SequenceBatch":
        return self.with_columns(**{key: Column.scalars(values)})

    def with_tokenwise(self, key: str, data: Tensor) -> "SequenceBatch":
        """Add a column with the lengths of ``tokens``."""
        return self.with_columns(**{key: Column(data, self.lengths("tokens"))})

    def split(self, parts: Sequence[Sequence[int]]) -> list["SequenceBatch"]:
        return [self.select(part) for part in parts]

    def to(self, device: torch.device | str) -> "SequenceBatch":
        return SequenceBatch(self.ids, {k: Column(c.data.to(device), c.lengths) for k, c in self.columns.items()})
