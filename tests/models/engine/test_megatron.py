"""megatron-core's distributed optimizer on our flat tensors, against ours.

megatron-core supports only GPUs. Here its code runs on gloo ranks, with device ``cuda`` replaced by the CPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from realhf.api.config import OptimizerConfig
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.param_box import ParamSpec, whole
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.models.engine.optimizer import ShardedAdamW
from realhf.models.flat_params import FlatParams

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = pytest.mark.slow
SPECS = (ParamSpec("a", (24, 8), 0), ParamSpec("b", (7,), 0), ParamSpec("c", (16, 12), 1), ParamSpec("d", (30,), 1))
RATES = (1e-2, 3e-2, 1e-2, 5e-3)


class CpuForCuda(TorchFunctionMode):
    """Runs operations on device ``cuda`` on the CPU, and reports CPU tensors as CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        is_type_name = func is torch.Tensor.type and len(args) == 1
        return result.replace("torch.", "torch.cuda.") if is_type_name else result


def trained(rank: int, world: int, by_megatron: bool, dtype: str, clip: float) -> tuple[dict[str, Tensor], list[float]]:
    """Return parameters, optimizer state and gradient norms after a few steps; every rank has its own gradient."""
    from realhf.models.engine.megatron import MegatronAdamW, padding

    groups = make_groups([tuple(range(world))], rank) if world > 1 else {}
    place = ParallelContext(Layout(DeviceMesh(tuple(range(world))), ParallelStrategy(dp=world)), rank, groups=groups)
    params = FlatParams(SPECS, {s.name: whole(s.shape) for s in SPECS}, getattr(torch, dtype), "cpu", padding(world))
    generator = torch.Generator().manual_seed(0)
    for spec in SPECS:
        params.write(spec.name, whole(spec.shape), torch.randn(spec.shape, generator=generator))
    before = params.read("a", whole((24, 8))).clone()
    rules = OptimizerConfig(weight_decay=0.1, gradient_clipping=clip)
    with CpuForCuda():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        optimizer = (MegatronAdamW if by_megatron else ShardedAdamW)(params, rules, place, False)
        assert torch.equal(params.read("a", whole((24, 8))), before)
        norms = []
        for step, lr in enumerate(RATES):
            params.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            for spec in SPECS:
                params.grad_view(spec.name).copy_(torch.randn(spec.shape, generator=generator))
            norms.append(optimizer.step(lr))
            if step == 1:  # save and restore a checkpoint
                kept = {name: tensor.clone() for name, tensor in optimizer.state.items()}
                for name, tensor in optimizer.state.items():
                    tensor.zero_().copy_(kept[name])
    state = {name: tensor.clone() for name, tensor in optimizer.state.items()}
    return {spec.name: params.read(spec.name, whole(spec.shape)).float() for spec in SPECS} | state, norms


@pytest.mark.dist
@pytest.mark.parametrize("world, dtype, clip", [(1, "float32", 0.0), (2, "float32", 5.0), (3, "bfloat16", 5.0)])
def test_steps_equal_the_native_ones(world: int, dtype: str, clip: float, on_ranks: Callable[..., list[Any]]) -> None:
    ours, theirs = (on_ranks(world, trained, by, dtype, clip) for by in (False, True))
    for (mine, norms), (other, their_norms) in zip(ours, theirs, strict=True):
        assert their_norms == pytest.approx(norms, rel=1e-6) and len(norms) == len(RATES)
        assert mine.keys() == other.keys() and ("master" in mine) == (dtype == "bfloat16")
        for name, tensor in mine.items():
            torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=1e-5, msg=name)


def test_an_unaligned_shard_is_rejected() -> None:
    from realhf.models.engine.megatron import MegatronAdamW

    specs = [ParamSpec("a", (3, 5), 0), ParamSpec("b", (7,), 0)]
    params = FlatParams(specs, {s.name: whole(s.shape) for s in specs}, torch.float32, "cpu", 128)
    alone = ParallelContext(Layout(DeviceMesh((0,)), ParallelStrategy()), 0)
    with pytest.raises(ValueError, match=r"multiples of 64.*end at 15; use backend=native"):
        MegatronAdamW(params, OptimizerConfig(), alone, False)
