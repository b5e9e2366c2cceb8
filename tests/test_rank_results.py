"""Results of ranks survive a round trip."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from realhf.api.batch_meta import PROMPT, RowId
from realhf.data.batch import Column, SequenceBatch
from tests.rank_results import packed, unpacked


@dataclass(frozen=True)
class Record:
    rows: dict[tuple[int, str], tuple[float, ...]]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, -2.5, "é", True, float("inf")],
        {"a": (1, [2, ()]), (0, "b"): {3}, 4: frozenset({(1, 2)})},
        {torch.float32: RowId(1, PROMPT)},
        Record({(1, "x"): (0.1,)}),
    ],
)
def test_values_come_back(value: Any) -> None:
    back = unpacked(packed(value))
    assert back == value and type(back) is type(value)


def test_tensors_come_back() -> None:
    values = torch.arange(6.0).reshape(2, 3).T, torch.tensor([True]), torch.empty(0, dtype=torch.bfloat16)
    back = unpacked(packed(values))
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(values, back, strict=True))
    batch = SequenceBatch((RowId(3, 0),), {"tokens": Column(torch.arange(2), (2,))})
    result = unpacked(packed({"made": batch}))["made"]
    assert result.ids == batch.ids and torch.equal(result["tokens"], batch["tokens"])


def test_other_objects_are_rejected() -> None:
    with pytest.raises(TypeError, match="cannot encode a object"):
        packed([object()])
