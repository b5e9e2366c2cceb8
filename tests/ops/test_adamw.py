"""The AdamW step against torch.optim, and its kernel against the reference implementation."""

from dataclasses import replace

import pytest
import torch

from realhf.ops import extension
from realhf.ops.adamw import AdamWStep, adamw_, adamw_reference_

SIZE = 100_003
STEP = AdamWStep(1, 1e-2, 0.9, 0.95, 1e-8, 0.1, SIZE)


@pytest.fixture
def kernel() -> None:
    if extension.kernel("adamw_", "cpu") is None:
        pytest.skip("NATIVE KERNELS NOT BUILT, nothing tested: python setup.py build_ext --inplace")


def random_inputs(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def state() -> list[torch.Tensor]:
    return [random_inputs(0), torch.zeros(SIZE), torch.zeros(SIZE)]


@pytest.mark.parametrize("step_of", [adamw_, adamw_reference_])
def test_ten_steps_equal_torch_optim(step_of: object) -> None:
    n_decayed, scale = 70_001, 0.37
    master, first, second = state()
    parts = [part.clone().requires_grad_() for part in master.split([n_decayed, SIZE - n_decayed])]
    groups = [{"params": [parts[0]], "weight_decay": 0.1}, {"params": [parts[1]], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    rounded = torch.empty(SIZE, dtype=torch.bfloat16)
    for number in range(1, 11):
        gradient = random_inputs(number)
        for part, own in zip(parts, gradient.split([n_decayed, SIZE - n_decayed]), strict=True):
            part.grad = own * scale
        theirs.step()
        step = replace(STEP, steps=number, n_decayed=n_decayed, scale=scale)
        step_of(master, gradient, first, second, step, rounded)
    torch.testing.assert_close(master, torch.cat(parts).detach(), atol=1e-6, rtol=1e-6)
    assert torch.equal(rounded, master.bfloat16())


@pytest.mark.usefixtures("kernel")
def test_kernel_matches_the_reference_and_keeps_the_gradient() -> None:
    ours, reference, gradient = state(), state(), random_inputs(1)
    adamw_(ours[0], gradient, ours[1], ours[2], replace(STEP, scale=0.5))
    assert torch.equal(gradient, random_inputs(1))
    adamw_reference_(reference[0], gradient, reference[1], reference[2], replace(STEP, scale=0.5))
    for found, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.usefixtures("kernel")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            own = [*state(), torch.empty(SIZE, dtype=torch.bfloat16)]
            adamw_(own[0], random_inputs(1), own[1], own[2], replace(STEP, n_decayed=33_333), own[3])
            found.append(own)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("kernel")
def test_invalid_shapes_and_dtypes_are_errors() -> None:
    master, first, second = state()
    with pytest.raises(RuntimeError, match="must be .100003. float32"):
        adamw_(master, random_inputs(1)[1:], first, second, STEP)
    with pytest.raises(RuntimeError, match="100004 of 100003 elements decay"):
        adamw_(master, random_inputs(1), first, second, replace(STEP, n_decayed=SIZE + 1))
