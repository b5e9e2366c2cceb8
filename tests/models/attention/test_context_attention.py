"""Attention from parts of rows equals that within whole rows, for any division of the tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.models.attention.context_attention import RowPart, attend_to_rows
from realhf.ops.attention import ScoreParams, rotary_attention_reference
from tests.scaling import examples

RULES = (ScoreParams(), ScoreParams(window=5), ScoreParams(softcap=3.0), ScoreParams(scale=0.3),
         ScoreParams(window=300, softcap=2.0))  # fmt: skip


def parts_of(lengths: list[int], start: int, stop: int) -> list[RowPart]:
    """Return the parts of rows between two tokens."""
    parts, row = [], 0
    for length in lengths:
        first, last = max(row, start), min(row + length, stop)
        if first < last:
            parts.append(RowPart(first - start, last - start, row, first - row))
        row += length
    return parts


@settings(max_examples=examples(40))
@given(
    st.lists(st.one_of(st.integers(0, 12), st.integers(250, 600)), min_size=1, max_size=4),
    st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    st.sampled_from(RULES),
    st.booleans(),
    st.data(),
)
def test_parts_equal_whole_rows(
    lengths: list[int], heads: tuple[int, int], rule: ScoreParams, has_sinks: bool, data: st.DataObject
) -> None:
    """Results and gradients in double precision; at most one kernel has float32."""
    (n_q, n_kv), total = heads, sum(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    torch.manual_seed(total)
    dtype = torch.float32 if data.draw(st.booleans()) else torch.float64
    q, k, v = (torch.randn(total, n, 8, dtype=dtype, requires_grad=True) for n in (n_q, n_kv, n_kv))
    sinks = torch.randn(n_q, dtype=dtype, requires_grad=True) if has_sinks else None
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    whole = rotary_attention_reference(torch.cat((q, k, v), 1), n_q, n_kv, lengths, rule, sinks=sinks)
    ends = [0, *cuts, total]
    found = torch.cat([attend_to_rows(q[a:b], k, v, parts_of(lengths, a, b), rule, sinks)
                       for a, b in zip(ends, ends[1:], strict=False)])  # fmt: skip
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(found, whole, **tolerance)
    if total:
        slopes = torch.randn_like(whole)
        for ours, theirs in zip(torch.autograd.grad(found, leaves, slopes), torch.autograd.grad(whole, leaves, slopes),
                                strict=True):  # fmt: skip
            torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("n_heads", [(4, 2), (2, 2)])
def test_bfloat16(n_heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, n, 16).bfloat16() for n in (n_heads[0], n_heads[1], n_heads[1]))
    expected = rotary_attention_reference(torch.cat((q, k, v), 1).float(), *n_heads, [40])
    found = attend_to_rows(q[17:], k, v, parts_of([40], 17, 40), ScoreParams())
    torch.testing.assert_close(found.float(), expected[17:], atol=0.03, rtol=0.03)
