"""Packed and decoding attention against a masked softmax written out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops.attention import BLOCK, Scores, decode_attention, packed_attention

RULES = [
    Scores(),
    Scores(0.3),
    Scores(window=3),
    Scores(softcap=0.8),
    Scores(0.7, 2, 1.1),
    Scores(window=1),
    Scores(window=BLOCK + 7),
]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Scores = RULES[0]) -> torch.Tensor:
    """One causal row: ``q`` ``[L, H, d]``, its last token at the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (rule.scale or q.shape[-1] ** -0.5)
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    own = len(k) - len(q)
    unseen = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + own)
    if rule.window:
        unseen |= torch.ones(len(q), len(k), dtype=torch.bool).tril(own - rule.window)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(unseen, float("-inf")).softmax(-1), v)


def rows_of(lengths: list[int], heads: int, kv_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(sum(lengths))
    return [torch.randn(sum(lengths), n, 8, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=6), st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.sampled_from(RULES))
def test_packed_rows_equal_separate_rows(lengths: list[int], heads: tuple[int, int], rule: Scores) -> None:
    q, k, v = rows_of(lengths, *heads)
    out = packed_attention(q, k, v, lengths, rule)
    rows = [written_out(*row, rule) for row in zip(*(x.split(lengths) for x in (q, k, v)), strict=True) if len(row[0])]
    assert out.shape == q.shape
    assert torch.allclose(out, torch.cat(rows) if rows else q)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[3, 3, 5, 1, 3], [BLOCK + 44, 2]])
def test_gradients_equal_those_of_separate_rows(rule: Scores, lengths: list[int]) -> None:
    leaves = [x.requires_grad_() for x in rows_of(lengths, 4, 2)]
    weight = torch.randn(sum(lengths), 4, 8, dtype=torch.float64)
    ours = torch.autograd.grad((packed_attention(*leaves, lengths, rule) * weight).sum(), leaves)
    rows = [written_out(*row, rule) for row in zip(*(x.split(lengths) for x in leaves), strict=True)]
    theirs = torch.autograd.grad((torch.cat(rows) * weight).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b)


def test_views_of_a_fused_projection_are_accepted() -> None:
    fused = torch.randn(10, 4 + 2 + 2, 8)
    q, k, v = fused.split((4, 2, 2), 1)
    assert torch.allclose(
        packed_attention(q, k, v, [5, 5]), packed_attention(q.clone(), k.clone(), v.clone(), [5, 5]), atol=1e-6
    )


def test_a_window_as_long_as_the_row_changes_nothing() -> None:
    lengths = [4, 6]
    q, k, v = rows_of(lengths, 4, 2)
    assert torch.equal(packed_attention(q, k, v, lengths, Scores(window=6)), packed_attention(q, k, v, lengths))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_decoding_attends_up_to_each_position(heads: int, kv_heads: int, rule: Scores) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 4, 2])
    q = torch.randn(3, heads, 8)
    k, v = torch.randn(2, 5, kv_heads, 9, 8)
    out = decode_attention(q, k[:3], v[:3], positions, rule=rule)
    for slot, position in enumerate(positions.tolist()):
        seen = slice(max(0, position + 1 - rule.window) if rule.window else 0, position + 1)
        keys, values = k[slot, :, seen].transpose(0, 1), v[slot, :, seen].transpose(0, 1)
        row = written_out(q[slot, None], keys, values, replace(rule, window=0))
        assert torch.allclose(out[slot], row[0], atol=1e-6)
