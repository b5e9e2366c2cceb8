"""Per-row reductions and broadcasts against loops over rows."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.ops.rows import PackedRows, RowLayout, per_token

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


CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_layouts_equal_a_loop_over_tokens(lengths: list[int], data: st.DataObject) -> None:
    roots = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    heads = [row for row, is_root in enumerate(roots) if is_root]
    prefixes = tuple(-1 if root or not heads else data.draw(st.sampled_from(heads)) for root in roots)
    layout = RowLayout(tuple(lengths), data.draw(st.sampled_from([prefixes, ()])), CPU)
    before = [lengths[p] if p >= 0 else 0 for p in layout.prefixes] or [0] * len(lengths)
    tokens = [(row, i) for row, n in enumerate(lengths) for i in range(n)]
    assert layout.rows.tolist() == [row for row, _ in tokens]
    assert layout.positions.tolist() == [before[row] + i for row, i in tokens]
    assert layout.longest == max((before[row] + i + 1 for row, i in tokens), default=0)
    keys = [
        (source, i)
        for row, n in enumerate(lengths)
        for source, count in ((layout.prefixes[row] if before[row] else row, before[row]), (row, n))
        for i in range(count)
    ]
    index = range(len(tokens)) if layout.key_index is None else layout.key_index.tolist()
    assert [tokens[i] for i in index] == keys
    counts = [[0, *lengths], [0, *(a + b for a, b in zip(before, lengths, strict=True))]]
    assert layout.cu_seqlens.tolist() == [list(accumulate(row)) for row in counts]
    assert layout.cu_seqlens.dtype == torch.int32
