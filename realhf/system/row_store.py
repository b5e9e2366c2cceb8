"""One worker's values by row and key, kept until their prompts are dropped."""

from collections.abc import Iterable

from torch import Tensor

from realhf.api.batch_meta import RowId
from realhf.data.batch import Column, SequenceBatch


class RowStore:
    """Stores views into batches; ``gather`` copies."""

    def __init__(self) -> None:
        self._values: dict[int, dict[tuple[int, str], Tensor]] = {}

    def put(self, batch: SequenceBatch) -> None:
        for key, column in batch.columns.items():
            for row, value in zip(batch.ids, column.rows(), strict=True):
                self.put_value(row, key, value)

    def put_value(self, row: RowId, key: str, value: Tensor) -> None:
        self._values.setdefault(row.prompt, {})[row.sample, key] = value

    def get(self, row: RowId, key: str) -> Tensor:
        return self._values[row.prompt][row.sample, key]

    def find(self, row: RowId, key: str) -> Tensor | None:
        return self._values.get(row.prompt, {}).get((row.sample, key))

    def gather(self, ids: Iterable[RowId], key: str) -> Column:
        """Return the column of ``key`` for at least one row."""
        return Column.of([self.get(row, key) for row in ids])

    def drop(self, start: int, stop: int) -> None:
        for prompt in range(start, stop):
            self._values.pop(prompt, None)

    def __len__(self) -> int:
        """Number of prompts with values."""
        return len(self._values)
