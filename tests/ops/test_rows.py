"""Per-row reductions and broadcasts against loops over rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.ops.rows import PackedRows, per_token

ROWS = st.lists(st.lists(st.tuples(st.booleans(), st.integers(-9, 9)), min_size=1, max_size=5), max_size=5)


@given(ROWS)
def test_reductions_equal_loops_over_rows(rows: list[list[tuple[bool, int]]]) -> None:
    tokens = [token for row in rows for token in row]
    packed = PackedRows(torch.tensor([kept for kept, _ in tokens], dtype=torch.bool), [len(row) for row in rows])
    x = torch.tensor([float(value) for _, value in tokens])
    kept = [[float(value) for is_kept, value in row if is_kept] for row in rows]
    assert packed.counts.tolist() == [len(values) for values in kept]
    assert packed.sums(x).tolist() == [sum(values) for values in kept]
    means = [sum(values) / max(len(values), 1) for values in kept]
    assert packed.mean(x).tolist() == pytest.approx([m for m, row in zip(means, rows, strict=True) for _ in row])


def test_masked_out_values_do_not_reach_the_sums() -> None:
    rows = PackedRows(torch.tensor([True, False, True]), (2, 1))
    x = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    rows.sums(x).sum().backward()
    assert rows.sums(x).tolist() == [1.0, 2.0] and x.grad.tolist() == [1.0, 0.0, 1.0]


def test_per_token_keeps_dtype_and_trailing_dimensions() -> None:
    assert per_token(torch.tensor([True, False]), (1, 2)).tolist() == [True, False, False]
    assert per_token(torch.arange(4).view(2, 2), (0, 2)).tolist() == [[2, 3], [2, 3]]
