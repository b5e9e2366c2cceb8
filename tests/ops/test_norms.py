"""Norms and rotary positions against their definitions."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from realhf.ops import extension
from realhf.ops.norms import Rotary, rms_norm, rotary_frequencies, rotate, rotate_reference


def rows_of(rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
    return rotary.table(int(positions.max()) + 1)[:, positions].unsqueeze(2)


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
    angles = rows_of(rotary, torch.arange(3))
    rope = rotate_reference(x, *angles)
    assert torch.equal(rope[..., 4:], x[..., 4:])
    assert torch.equal(rope[..., :4], rotate_reference(x[..., :4], *angles))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_the_kernel_rotates_like_the_reference(dtype: torch.dtype, rotary_dim: int) -> None:
    assert extension.kernel("rotate", "cuda") is not None
    qkv, rotary = torch.randn(40, 7, 64, device="cuda"), Rotary(rotary_dim, 1e4, {}, "cuda")
    positions, table = torch.arange(40, device="cuda") % 9, rotary.table(9)
    found, exact = qkv.to(dtype).requires_grad_(), qkv.to(dtype).double().requires_grad_()
    out = rotate(found[:, :5], table, positions, lambda: pytest.fail("the kernel is not used"))
    expected = rotate_reference(exact[:, :5], *rows_of(rotary, positions).double())
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    assert found.grad is not None and exact.grad is not None
    torch.testing.assert_close(found.grad.double(), exact.grad, atol=2e-2, rtol=2e-2)


def test_rotation_turns_pairs_by_position_and_keeps_relative_products() -> None:
    rotary = Rotary(4, 100.0, {}, "cpu")
    q, k = torch.randn(2, 1, 1, 4)
    cos, sin = rows_of(rotary, torch.tensor([2, 5, 9, 12]))
    turned_q, turned_k = (rotate_reference(x.expand(4, 1, 4), cos, sin)[:, 0] for x in (q, k))
    assert turned_q[1] @ turned_k[0] == pytest.approx(float(turned_q[3] @ turned_k[2]), abs=1e-5)
    first = torch.view_as_complex(torch.stack(q[0, 0].chunk(2), -1)) * torch.polar(
        torch.ones(2), 5 * torch.tensor([1.0, 0.1])
    )
    assert torch.allclose(turned_q[1], torch.cat((first.real, first.imag)), atol=1e-5)


def test_the_table_grows_and_its_old_rows_stay() -> None:
    rotary = Rotary(8, 10000.0, {}, "cpu")
    before = rows_of(rotary, torch.arange(3))
    rows_of(rotary, torch.tensor([100]))
    after = rows_of(rotary, torch.arange(3))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_llama3_scaling_slows_long_waves_alone() -> None:
    scaling = {
        "rope_type": "llama3",
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
    assert torch.equal(
        rotary_frequencies(8, 1e4, {"rope_type": "linear", "factor": 4.0}), rotary_frequencies(8, 1e4, {}) / 4
    )


needs_kernel = pytest.mark.skipif(
    extension.kernel("rms_norm", "cpu") is None, reason="the compiled kernels are not built"
)


def norm_and_gradients(x: torch.Tensor, weight: torch.Tensor, fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    out = fn(*leaves)
    out_grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, out_grad)]


@needs_kernel
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 16), (300, 41), (129, 512), (0, 8)])
def test_kernel_matches_the_reference(rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((rows, size), (size,)))
    ours = norm_and_gradients(x, weight, lambda x, w: rms_norm(x, w, 1e-5))
    reference = norm_and_gradients(x.double(), weight.double(), lambda x, w: F.rms_norm(x, w.shape, w, 1e-5))
    for found, expected in zip(ours, reference, strict=True):
        assert found.shape == expected.shape
        assert (found.double() - expected).norm() <= 1e-6 * (1 + expected.norm())


@needs_kernel
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight, before = torch.randn(700, 64), torch.randn(64), torch.get_num_threads()
    expected = norm_and_gradients(x, weight, lambda x, w: rms_norm(x, w, 1e-6))
    try:
        torch.set_num_threads(3)
        again = norm_and_gradients(x, weight, lambda x, w: rms_norm(x, w, 1e-6))
    finally:
        torch.set_num_threads(before)
    strided = norm_and_gradients(torch.cat((x, x), 1)[:, 64:], weight, lambda x, w: rms_norm(x, w, 1e-6))
    assert all(map(torch.equal, again, expected)) and all(map(torch.equal, strided, expected))


@needs_kernel
def test_kernels_pass_opcheck() -> None:
    x, weight = torch.randn(5, 12), torch.randn(12)
    for name, given in (("rms_norm", (x, weight, 1e-6)), ("rms_norm_backward", (x + 1, x, weight, 1e-6))):
        found = torch.library.opcheck(getattr(torch.ops.realhf, name).default, given)
        assert set(found.values()) == {"SUCCESS"}, found
