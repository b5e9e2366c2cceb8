"""Launches of an optimizer step do not grow with the number of parameters."""

import pytest
import torch

from realhf.api.config import OptimizerConfig
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.param_box import ParamSpec, whole
from realhf.comm.process_groups import ParallelContext
from realhf.models.engine.optimizer import CHUNK, ShardedAdamW
from realhf.models.flat_params import FlatParams
from tests.gpu_emulated.fake_cuda import FakeCuda

MAX_LAUNCHES, MAX_WAITS = 13, 1
"""Of the initialisation and a step; the wait reads the gradient norm."""


def step(numel: int, dtype: torch.dtype, device: str) -> float:
    """Make one step with a random gradient; return its norm."""
    spec = ParamSpec("a", (numel,), 0)
    params = FlatParams((spec,), {"a": whole(spec.shape)}, dtype, device)
    context = ParallelContext(Layout(DeviceMesh((0,)), ParallelStrategy()), 0, torch.device(device))
    optimizer = ShardedAdamW(params, OptimizerConfig(gradient_clipping=1.0), context, False)
    optimizer.grad.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    return optimizer.step(1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_do_not_grow(dtype: torch.dtype, cuda: FakeCuda) -> None:
    counts = []
    for numel in (100, 7 * CHUNK + 1):
        expected = step(numel, dtype, "cpu")
        cuda.events.clear()
        assert step(numel, dtype, "cuda:0") == expected
        lines = {event: n for event, n in cuda.events.items() if event.line.startswith(("models/engine", "ops/adamw"))}
        launches, waits = (sum(n for e, n in lines.items() if e.kind == kind) for kind in ("launch", "wait"))
        counts.append(launches)
        assert launches <= MAX_LAUNCHES and waits == MAX_WAITS, lines
        assert not any(event.kind.startswith("copy") for event in lines), lines
    assert counts[0] == counts[1]
