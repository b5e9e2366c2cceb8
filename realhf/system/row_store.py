"""One worker's values by row and key, kept until their prompts are dropped."""

from collections.abc import Collection, Iterable, Mapping

import torch
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

    def tensors(self, keys: Collection[str]) -> dict[str, Tensor]:
        """Return the values of ``keys`` as ``key/prompt/sample``, in host memory."""
        rows = ((f"{key}/{prompt}/{sample}", value) for prompt, values in self._values.items()
                for (sample, key), value in values.items() if key in keys)  # fmt: skip
        return {name: value.detach().to("cpu", copy=True) for name, value in rows}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Store what ``tensors`` has returned."""
        for name, value in tensors.items():
            key, prompt, sample = name.rsplit("/", 2)
            self.put_value(RowId(int(prompt), int(sample)), key, value.to(device))

    def drop(self, start: int, stop: int) -> None:
        for prompt in range(start, stop):
            self._values.pop(prompt, None)

    def __len__(self) -> int:
        """Number of prompts with values."""
        return len(self._values)
