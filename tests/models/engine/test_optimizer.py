"""The sharded AdamW against torch's own, on one worker and on several."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.config import OptimizerConfig
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.param_box import ParamSpec, whole
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.models.engine.optimizer import ShardedAdamW
from realhf.models.flat_params import FlatParams

SPECS = (ParamSpec("a", (3, 5), 0), ParamSpec("b", (7,), 0), ParamSpec("c", (4, 4), 1), ParamSpec("d", (3,), 1))
SINGLE = ParallelContext(Layout(DeviceMesh((0,)), ParallelStrategy()), 0)
RATES = (1e-2, 3e-2, 1e-2, 5e-3, 0.0)


def flat_params(dtype: torch.dtype, pad_to: int = 1) -> FlatParams:
    params = FlatParams(SPECS, {s.name: whole(s.shape) for s in SPECS}, dtype, "cpu", pad_to)
    generator = torch.Generator().manual_seed(0)
    for spec in SPECS:
        params.write(spec.name, whole(spec.shape), torch.randn(spec.shape, generator=generator))
    return params


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def options(clip: float) -> OptimizerConfig:
    return OptimizerConfig(weight_decay=0.1, gradient_clipping=clip)


def by_torch(clip: float) -> tuple[dict[str, Tensor], list[float]]:
    """Return parameters and gradient norms of torch.optim.AdamW."""
    config, params = options(clip), flat_params(torch.float32)
    plain = {spec.name: params.view(spec.name).clone().requires_grad_() for spec in SPECS}
    matrices, vectors = ({"params": [plain[a], plain[b]]} for a, b in (("a", "c"), ("b", "d")))
    groups = [{**matrices, "weight_decay": 0.1}, {**vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps)
    norms = []
    for step, lr in enumerate(RATES):
        for name, gradient in gradients(step).items():
            plain[name].grad = gradient
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.values())))
        if clip and norms[-1] > clip:
            for p in plain.values():
                p.grad *= clip / norms[-1]
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
    return {name: p.detach() for name, p in plain.items()}, norms


def ours(
    rank: int, world: int, clip: float, groups: tuple[int, ...] | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    """The same with ShardedAdamW; every rank has an unequal share of the gradient."""
    members = groups or tuple(range(world))
    groups_made = make_groups([members], rank) if world > 1 else {}
    place = ParallelContext(Layout(DeviceMesh(members), ParallelStrategy(dp=world)), rank, groups=groups_made)
    params = flat_params(torch.float32, pad_to=world)
    optimizer = ShardedAdamW(params, options(clip), place, False)
    shares = torch.arange(1.0, world + 1) / sum(range(1, world + 1))
    norms = []
    for step, lr in enumerate(RATES):
        params.zero_grad()
        for name, gradient in gradients(step).items():
            params.view_of(params.grad, name).copy_(gradient * shares[rank])
        norms.append(optimizer.step(lr))
    assert optimizer.first.numel() * world == params.data.numel()
    return {spec.name: params.view(spec.name).clone() for spec in SPECS}, norms


def check(actual: tuple[dict[str, Tensor], list[float]], clip: float) -> None:
    expected, norms = by_torch(clip)
    assert actual[1] == pytest.approx(norms, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(actual[0][name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 1.0, 100.0])
def test_one_worker_equals_torch(clip: float) -> None:
    check(ours(0, 1, clip), clip)


@pytest.mark.dist
@pytest.mark.parametrize("world, members", [(2, (0, 1)), (2, (1, 0)), (3, (0, 1, 2))])
def test_several_workers_equal_torch(world: int, members: tuple[int, ...], on_ranks: Callable[..., list[Any]]) -> None:
    results = on_ranks(world, ours, 1.0, members)
    for params, norms in results:
        check((params, norms), 1.0)
        assert norms == results[0][1]
        assert all(torch.equal(params[name], results[0][0][name]) for name in params)


def test_small_steps_accumulate_in_bfloat16() -> None:
    params = flat_params(torch.bfloat16)
    before = params.data.float()
    optimizer = ShardedAdamW(params, OptimizerConfig(weight_decay=0.0, gradient_clipping=0.0), SINGLE, False)
    params.enable_grad()
    for _ in range(400):
        params.grad.fill_(1.0)
        optimizer.step(1e-5)
    moved = before - params.data.float()
    assert optimizer.master.dtype == torch.float32 and params.data.dtype == torch.bfloat16
    torch.testing.assert_close(before - optimizer.master, torch.full_like(before, 4e-3), atol=1e-4, rtol=0)
    assert torch.equal(params.data, optimizer.master.bfloat16())
    fine = before.abs() < 0.5  # where bfloat16 resolves 4e-3
    assert fine.sum() > 5 and (moved[fine] > 1e-3).all()


def test_weight_decay_applies_only_to_matrices() -> None:
    params = flat_params(torch.float32)
    before = {spec.name: params.view(spec.name).clone() for spec in SPECS}
    optimizer = ShardedAdamW(params, OptimizerConfig(weight_decay=0.5), SINGLE, False)
    params.zero_grad()
    assert optimizer.step(0.1) == 0.0
    for spec in SPECS:
        kept = 0.95 if len(spec.shape) == 2 else 1.0
        torch.testing.assert_close(params.view(spec.name), before[spec.name] * kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_an_error_without_a_step(bad: float) -> None:
    params = flat_params(torch.float32)
    before = params.data.clone()
    optimizer = ShardedAdamW(params, options(1.0), SINGLE, False)
    params.zero_grad()
    params.grad[3] = bad
    with pytest.raises(ValueError, match=f"gradient norm is {bad}.*learning rate"):
        optimizer.step(1e-2)
    assert torch.equal(params.data, before) and optimizer.steps == 0
