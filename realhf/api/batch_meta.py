"""Row ids, element types and row lengths of a batch, without its tensors. The master handles only this metadata."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

PROMPT = -1
"""Sample number of data that all samples of a prompt share: the prompt itself and the dataset columns."""

SCALAR_BYTES = {"int64": 8, "int32": 4, "uint8": 1, "float32": 4, "float64": 8, "bfloat16": 2}


class RowId(NamedTuple):
    """``prompt`` counts prompts in the order of consumption, unique within a run; ``sample`` counts its samples."""

    prompt: int
    sample: int


@dataclass(frozen=True)
class ColumnMeta:
    """Element type (torch's name without ``torch.``) and the length of every row."""

    dtype: str
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class BatchMeta:
    """Ids and columns of a batch; every column has one length per id."""

    ids: tuple[RowId, ...]
    columns: dict[str, ColumnMeta]

    def __post_init__(self) -> None:
        for key, column in self.columns.items():
            if len(column.lengths) != len(self.ids):
                raise ValueError(f"column '{key}' has {len(column.lengths)} rows, the batch has {len(self.ids)}")

    @staticmethod
    def merged(parts: Sequence["BatchMeta"]) -> "BatchMeta":
        """Return the rows of all parts, which have the same keys."""
        columns = {key: [part.columns[key] for part in parts] for key in parts[0].columns} if parts else {}
        return BatchMeta(
            tuple(chain.from_iterable(part.ids for part in parts)),
            {key: ColumnMeta(of_key[0].dtype, tuple(chain.from_iterable(c.lengths for c in of_key)))
             for key, of_key in columns.items()},
        )  # fmt: skip
