"""Activations and their gradients against torch's own."""

import pytest
import torch

from realhf.ops import extension
from realhf.ops.activations import ACTIVATION_IDS, activate, activate_reference

needs_kernel = pytest.mark.skipif(
    extension.kernel("activate", "cpu") is None, reason="the compiled kernels are not built"
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def with_gradient(fn, wide, *options):
    leaf = wide.detach().requires_grad_()
    out = fn(leaf, *options)
    out_grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return out.detach(), torch.autograd.grad(out, leaf, out_grad)[0]


on_gpu = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])


@needs_kernel
@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATION_IDS)
def test_kernel_matches_the_reference(activation, gated, device):
    assert extension.kernel("activate", device) is not None
    for rows, inner in ((1, 3), (7, 16), (300, 41), (0, 8)):
        wide = torch.randn(rows, inner * (1 + gated), generator=torch.Generator().manual_seed(rows)) * 4
        wide = wide.to(device)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            ours = with_gradient(activate, wide.to(dtype), activation, gated)
            reference = with_gradient(activate_reference, wide.to(dtype).double(), activation, gated)
            for found, expected in zip(ours, reference, strict=True):
                assert found.dtype == dtype and found.shape == expected.shape
                torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@needs_kernel
@pytest.mark.parametrize("activation", ACTIVATION_IDS)
def test_extreme_numbers(activation):
    """For large inputs an activation is the identity or zero; NaN stays NaN."""
    wide = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e10]])
    found, expected = (f(wide, activation, False) for f in (activate, activate_reference))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert activate(torch.tensor([[torch.nan, 1.0]]), activation, False).isnan().tolist() == [[True, False]]


@needs_kernel
def test_views_and_threads_change_no_bit():
    wide = torch.randn(500, 96)
    expected, before = with_gradient(activate, wide, "silu", True), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, with_gradient(activate, wide, "silu", True), expected))
    finally:
        torch.set_num_threads(before)
    strided = torch.cat((wide, wide), 1)[:, :96]
    assert all(map(torch.equal, with_gradient(activate, strided, "silu", True), expected))


@needs_kernel
def test_kernels_pass_opcheck():
    wide = torch.randn(5, 12)
    for name, given in (
        ("activate", (wide, 0, True)),
        ("activate_backward", (wide[:, :6].contiguous(), wide, 0, True)),
    ):
        found = torch.library.opcheck(getattr(torch.ops.realhf, name).default, given)
        assert set(found.values()) == {"SUCCESS"}, found
