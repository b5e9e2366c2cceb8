"""Packed and decoding attention against a dense masked softmax, and the kernel against the reference implementation."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops import extension
from realhf.ops.attention import (
    BLOCK,
    ScoreParams,
    decode_attention,
    decode_bias,
    rotary_attention,
    rotary_attention_reference,
)
from realhf.ops.norms import Rotary
from tests.scaling import examples

Attention = Callable[..., torch.Tensor]
NOT_BUILT = "NATIVE KERNELS NOT BUILT, nothing tested: python setup.py build_ext --inplace"

RULES = [
    ScoreParams(),
    ScoreParams(0.3),
    ScoreParams(window=3),
    ScoreParams(softcap=0.8),
    ScoreParams(0.7, 2, 1.1),
    ScoreParams(window=1),
    ScoreParams(window=BLOCK + 7),
]


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rows: Any, by: Attention = rotary_attention, **options: Any
) -> torch.Tensor:
    """Attention of separate queries, keys and values without rotation."""
    return by(torch.cat((q, k, v), 1), q.shape[1], k.shape[1], *rows, **options)


packed_attention_reference = partial(packed_attention, by=rotary_attention_reference)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreParams = RULES[0]) -> torch.Tensor:
    """Attend within one causal row; the last query of ``q`` ``[L, H, d]`` is at the last key."""
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


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 6), max_size=6), st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.sampled_from(RULES))
def test_packed_rows_equal_separate_rows(lengths: list[int], heads: tuple[int, int], rule: ScoreParams) -> None:
    q, k, v = rows_of(lengths, *heads)
    out = packed_attention(q, k, v, lengths, rule)
    rows = [
        dense_attention(*row, rule) for row in zip(*(x.split(lengths) for x in (q, k, v)), strict=True) if len(row[0])
    ]
    assert out.shape == q.shape
    assert torch.allclose(out, torch.cat(rows) if rows else q)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [[3, 3, 5, 1, 3], [BLOCK + 44, 2]])
def test_gradients_equal_those_of_separate_rows(rule: ScoreParams, lengths: list[int]) -> None:
    leaves = [x.requires_grad_() for x in rows_of(lengths, 4, 2)]
    weight = torch.randn(sum(lengths), 4, 8, dtype=torch.float64)
    ours = torch.autograd.grad((packed_attention(*leaves, lengths, rule) * weight).sum(), leaves)
    rows = [dense_attention(*row, rule) for row in zip(*(x.split(lengths) for x in leaves), strict=True)]
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
    assert torch.equal(packed_attention(q, k, v, lengths, ScoreParams(window=6)), packed_attention(q, k, v, lengths))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_decoding_attends_up_to_each_position(heads: int, kv_heads: int, rule: ScoreParams) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 4, 2])
    q = torch.randn(3, heads, 8)
    k, v = torch.randn(2, 5, kv_heads, 9, 8)
    out = decode_attention(q, k[:3], v[:3], decode_bias(positions, 5, kv_heads, rule.window), rule)
    for slot, position in enumerate(positions.tolist()):
        seen = slice(max(0, position + 1 - rule.window) if rule.window else 0, position + 1)
        keys, values = k[slot, :, seen].transpose(0, 1), v[slot, :, seen].transpose(0, 1)
        row = dense_attention(q[slot, None], keys, values, replace(rule, window=0))
        assert torch.allclose(out[slot], row[0], atol=1e-6)


ROW_CASES = [
    ([5], ()),
    ([3, 7, 1, 64, 65, 130, 300], ()),
    ([0, 17, 0, 33], ()),
    ([40, 3, 20, 100, 7, 150], (-1, 0, 0, -1, 3, 0)),
    ([9, 300, 200, 0], (1, -1, 1, 1)),
    ([0, 5, 6], (-1, 0, 0)),
]
"""Lengths and prefixes: rows shorter and longer than blocks, empty rows, rows before their prefix."""


@pytest.fixture(scope="module")
def kernel() -> None:
    if extension.kernel("packed_attention", "cpu") is None:
        pytest.skip(NOT_BUILT)


def with_gradient(
    attention: Attention, fused: torch.Tensor, heads: tuple[int, int], out_grad: torch.Tensor, *rows: object
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = fused.detach().requires_grad_()
    out = attention(*leaf.split((heads[0], heads[1], heads[1]), 1), *rows)
    return out.detach(), torch.autograd.grad(out, leaf, out_grad.to(out.dtype))[0]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 32), ((8, 2), 64), ((4, 2), 8), ((6, 1), 20), ((3, 3), 80)])
@pytest.mark.parametrize(
    "rule",
    [ScoreParams(), ScoreParams(0.3), ScoreParams(window=3), ScoreParams(softcap=0.8), ScoreParams(0.7, 70, 1.1)],
)
def test_kernel_matches_the_reference(heads: tuple[int, int], dim: int, rule: ScoreParams) -> None:
    for lengths, prefixes in ROW_CASES:
        torch.manual_seed(sum(lengths))
        fused = torch.randn(sum(lengths), heads[0] + 2 * heads[1], dim)
        out_grad = torch.randn(sum(lengths), heads[0], dim)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            given = fused.to(dtype)
            out_grad = out_grad.to(dtype).double()
            ours = with_gradient(packed_attention, given, heads, out_grad, lengths, rule, prefixes)
            reference = with_gradient(
                packed_attention_reference, given.double(), heads, out_grad, lengths, rule, prefixes
            )
            for found, expected in zip(ours, reference, strict=True):
                assert found.dtype == dtype and distance(found, expected) < tolerance


@pytest.mark.usefixtures("kernel")
def test_finite_differences_agree_with_the_gradient() -> None:
    torch.manual_seed(0)
    lengths, prefixes, step = [6, 4, 5, 7], (-1, 0, 0, -1), 1e-2
    fused, out_grad, direction = torch.randn(22, 8, 16), torch.randn(22, 4, 16), torch.randn(22, 8, 16)
    _, gradient = with_gradient(packed_attention, fused, (4, 2), out_grad, lengths, ScoreParams(), prefixes)
    values = []
    for signed_step in (step, -step):
        q, k, v = (fused + signed_step * direction).split((4, 2, 2), 1)
        values.append((packed_attention(q, k, v, lengths, ScoreParams(), prefixes) * out_grad).sum())
    assert float(values[0] - values[1]) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=1e-2)


@settings(max_examples=examples(30))
@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 6), max_size=3)), max_size=4), st.sampled_from(RULES)
)
def test_rows_with_a_shared_prefix_match_full_rows(
    groups_of_rows: list[tuple[int, list[int]]], rule: ScoreParams
) -> None:
    """Covers the reference in float64 and, if built, the kernel in float32."""
    lengths: list[int] = []
    prefixes: list[int] = []
    for shared, suffixes in groups_of_rows:
        lengths += [shared, *suffixes]
        prefixes += [-1, *[len(prefixes)] * len(suffixes)]
    parts = list(zip(*(x.split(lengths) for x in rows_of(lengths, 4, 2)), strict=True)) if lengths else []
    wholes = [part if p < 0 else tuple(map(torch.cat, zip(parts[p], part, strict=True)))
              for part, p in zip(parts, prefixes, strict=True)]  # fmt: skip
    expected = [
        dense_attention(*whole, rule)[len(whole[0]) - n :] for whole, n in zip(wholes, lengths, strict=True) if n
    ]
    q, k, v = rows_of(lengths, 4, 2)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        out = packed_attention(*(x.to(dtype) for x in (q, k, v)), lengths, rule, prefixes)
        torch.testing.assert_close(out.double(), torch.cat(expected) if expected else q, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("kernel")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    lengths, prefixes = ROW_CASES[3]
    torch.manual_seed(1)
    fused, out_grad = torch.randn(sum(lengths), 12, 64), torch.randn(sum(lengths), 8, 64)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(with_gradient(packed_attention, fused, (8, 2), out_grad, lengths, ScoreParams(), prefixes))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("kernel")
def test_kernels_pass_opcheck() -> None:
    q, k, v = (torch.randn(9, heads, 16) for heads in (4, 2, 2))
    rows, angles = torch.tensor([[4, 3, 2], [-1, 0, -1]]), torch.randn(2, 8, 12)
    out = (torch.randn(9, 4, 16), torch.randn(9, 4))
    forward, backward = (
        getattr(torch.ops.realhf, name).default for name in ("packed_attention", "packed_attention_backward")
    )
    for rope in (None, angles):
        rule = (rows, rope, 0.25, 0, 0.0)
        assert set(torch.library.opcheck(forward, (q, k, v, *rule)).values()) == {"SUCCESS"}
        assert set(torch.library.opcheck(backward, (out[0], q, k, v, *out, *rule)).values()) == {"SUCCESS"}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("heads", "dim", "rotary_dim"), [((4, 4), 32, 32), ((8, 2), 64, 64), ((6, 1), 20, 8), ((3, 3), 80, 6)]
)
def test_rotary_attention_matches_the_reference(heads: tuple[int, int], dim: int, rotary_dim: int) -> None:
    angles = Rotary(rotary_dim, 1e3, {}, "cpu").table(600)
    for lengths, prefixes in ROW_CASES:
        torch.manual_seed(sum(lengths))
        fused = torch.randn(sum(lengths), heads[0] + 2 * heads[1], dim)
        out_grad = torch.randn(sum(lengths), heads[0], dim)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            results = []
            for attention, precise in ((rotary_attention, dtype), (rotary_attention_reference, torch.float64)):
                leaf = fused.to(dtype).to(precise).requires_grad_()
                out = attention(leaf, *heads, lengths, ScoreParams(), prefixes, angles)
                along = out_grad.to(dtype).to(precise)
                results.append((out.detach(), torch.autograd.grad(out, leaf, along)[0]))
            for found, expected in zip(*results, strict=True):
                assert found.dtype == dtype and distance(found, expected) < tolerance


@pytest.mark.usefixtures("kernel")
def test_rows_longer_than_the_rope_table_are_errors() -> None:
    with pytest.raises(RuntimeError, match="a row of 9 tokens, and angles of 8 positions"):
        rotary_attention(torch.randn(14, 6, 16), 2, 2, [5, 4, 5], prefixes=(-1, 0, -1), angles=torch.randn(2, 8, 16))


@pytest.mark.parametrize(
    ("lengths", "prefixes", "message"),
    [([3], (), "do not sum to the 5 tokens"), ([6, -1], (), "do not sum to the 5"),
     ([2, 3], (-1,), "1 prefixes for 2 rows"), ([2, 3], (-1, 1), "row 1 has prefix 1"),
     ([2, 2, 1], (-1, 0, 1), "row 2 has prefix 1")],
)  # fmt: skip
def test_invalid_rows_are_errors(lengths: list[int], prefixes: tuple[int, ...], message: str) -> None:
    given = torch.randn(3, 5, 2, 16).unbind()
    for attention in (packed_attention, packed_attention_reference):
        with pytest.raises(ValueError, match=message):
            attention(*given, lengths, prefixes=prefixes)
