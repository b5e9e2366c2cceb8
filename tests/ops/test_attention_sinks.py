"""Attention sinks against their definition: one more key per head, with a given score and the value zero."""

import random

import pytest
import torch

from realhf.ops.attention import (
    ScoreParams,
    attend_to_prefix,
    decode_attention,
    decode_bias,
    rotary_attention,
    rotary_attention_reference,
)

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = {"small": 1.0, "large": 30.0, "out of range": 1e4}


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int) -> torch.Tensor:
    """Attend from the last rows of q ``[T, H, d]`` to k and v ``[S, K, d]``, in float64."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * DIM**-0.5
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    scores = torch.cat((scores.masked_fill(hidden, float("-inf")), sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :-1], v)


def problem(seed: int, kind: str, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, DIM, generator=generator)
    return qkv.requires_grad_(), (torch.randn(HEADS, generator=generator) * SCALE[kind]).requires_grad_()


def parts_of(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)


@pytest.mark.parametrize("kind", SCALE)
@pytest.mark.parametrize("seed", range(6))
def test_packed_rows_and_their_gradients(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, 7, 20, 300)) for _ in range(rng.choice((1, 3)))]
    window, (qkv, sinks) = rng.choice((0, 5)), problem(seed, kind, lengths)
    expected = torch.cat([definition(*parts_of(row), sinks, window) for row in qkv.split(lengths)])
    slopes = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    wanted = torch.autograd.grad((expected * slopes).sum(), (qkv, sinks))
    for attend in (rotary_attention, rotary_attention_reference):
        out = attend(qkv, HEADS, KV_HEADS, lengths, ScoreParams(window=window), sinks=sinks)
        assert torch.allclose(out.double(), expected, atol=1e-5)
        found = torch.autograd.grad((out * slopes).sum(), (qkv, sinks))
        assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", SCALE)
def test_rows_with_a_common_prefix(kind: str) -> None:
    lengths = [9, 4, 3]
    qkv, sinks = problem(3, kind, lengths)
    first, *others = qkv.split(lengths)
    expected = [definition(*parts_of(first), sinks, 0)]
    expected += [definition(*parts_of(torch.cat((first, row))), sinks, 0)[len(first) :] for row in others]
    for attend in (rotary_attention, rotary_attention_reference):
        out = attend(qkv, HEADS, KV_HEADS, lengths, prefixes=[-1, 0, 0], sinks=sinks)
        assert torch.allclose(out.double(), torch.cat(expected), atol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("kind", SCALE)
@pytest.mark.parametrize("window", [0, 5])
def test_decoding_and_new_tokens_of_a_row(window: int, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    qkv, sinks = problem(4, kind, [2 * 12])
    rows, sinks = qkv.detach().to(dtype).view(2, 12, -1, DIM), sinks.detach().to(dtype)
    k, v = (x.transpose(1, 2).contiguous() for x in (rows[:, :, HEADS : HEADS + KV_HEADS], rows[:, :, -KV_HEADS:]))
    positions, rule = torch.tensor([11, 6]), ScoreParams(window=window)
    bias = decode_bias(positions, 12, KV_HEADS, window).to(dtype)
    q = torch.stack([row[at, :HEADS] for row, at in zip(rows, positions.tolist(), strict=True)])
    out = decode_attention(q, k, v, bias, rule, sinks)
    new = attend_to_prefix(rows[0, 8:, :HEADS], k[0], v[0], rule, sinks)
    assert out.dtype == new.dtype == dtype
    for row, at, found in zip(rows, positions.tolist(), out, strict=True):
        expected = definition(*parts_of(row[: at + 1]), sinks, window)[-1]
        assert torch.allclose(found.double(), expected, atol=tolerance)
    assert torch.allclose(new.double(), definition(*parts_of(rows[0]), sinks, window)[8:], atol=tolerance)
