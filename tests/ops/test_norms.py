"""Norms and rotary positions against their definitions."""

import pytest
import torch

from realhf.ops.norms import Rotary, rms_norm, rotary_frequencies, rotate


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_and_its_gradients(offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 12, requires_grad=True), torch.randn(12, requires_grad=True)
    slopes = torch.randn(7, 12)
    ours = rms_norm(x, weight, 1e-5, offset)
    theirs = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + offset)
    assert torch.allclose(ours, theirs, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad((ours * slopes).sum(), (x, weight)),
        torch.autograd.grad((theirs * slopes).sum(), (x, weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_sixteen_bit_norm_is_computed_in_more() -> None:
    x, weight = torch.randn(5, 8).bfloat16(), torch.ones(8).bfloat16()
    assert torch.allclose(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight.float(), 1e-6).bfloat16(), atol=1e-2)


def test_an_offset_keeps_the_bits_of_a_sixteen_bit_weight() -> None:
    x, weight = torch.randn(5, 8).bfloat16(), torch.full((8,), 2**-9).bfloat16()
    exact = rms_norm(x.float(), weight.float(), 1e-6, 1.0)
    assert torch.equal(rms_norm(x, weight, 1e-6, 1.0), exact.bfloat16())


def test_a_part_of_each_head_turns() -> None:
    x, rotary = torch.randn(3, 2, 8), Rotary(4, 100.0, {}, "cpu")
    angles = rotary.rows(torch.arange(3), 3, torch.float32)
    turned = rotate(x, *angles)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], *angles))


def test_rotation_turns_pairs_by_position_and_keeps_relative_products() -> None:
    rotary = Rotary(4, 100.0, {}, "cpu")
    q, k = torch.randn(2, 1, 1, 4)
    cos, sin = rotary.rows(torch.tensor([2, 5, 9, 12]), 13, torch.float32)
    turned_q, turned_k = (rotate(x.expand(4, 1, 4), cos, sin)[:, 0] for x in (q, k))
    assert turned_q[1] @ turned_k[0] == pytest.approx(float(turned_q[3] @ turned_k[2]), abs=1e-5)
    first = torch.view_as_complex(torch.stack(q[0, 0].chunk(2), -1)) * torch.polar(
        torch.ones(2), 5 * torch.tensor([1.0, 0.1])
    )
    assert torch.allclose(turned_q[1], torch.cat((first.real, first.imag)), atol=1e-5)


def test_the_table_grows_and_its_old_rows_stay() -> None:
    rotary = Rotary(8, 10000.0, {}, "cpu")
    before = rotary.rows(torch.arange(3), 3, torch.float32)
    rotary.rows(torch.tensor([100]), 101, torch.float32)
    after = rotary.rows(torch.arange(3), 3, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_llama3_scaling_slows_long_waves_alone() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256.0,
    }
    plain, scaled = rotary_frequencies(32, 10000.0, {}), rotary_frequencies(32, 10000.0, scaling)
    assert scaled[0] == plain[0]
    assert torch.allclose(scaled[-1], plain[-1] / 8)
    assert bool(((scaled <= plain) & (scaled >= plain / 8 - 1e-9)).all())


def test_linear_scaling_slows_all_waves() -> None:
    assert torch.equal(rotary_frequencies(8, 1e4, {"factor": 4.0}), rotary_frequencies(8, 1e4, {}) / 4)
