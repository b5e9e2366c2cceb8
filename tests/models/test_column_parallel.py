"""Communication that overlaps with backward passes changes no number."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from realhf.api.config import ModelSpec, OptimizerConfig, Recompute
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import Group, ParallelContext, make_groups
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.column_parallel import column_parallel
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.low_rank import linear
from tests.models.sharding import LENGTHS, STEP, batch_of, likelihood
from tests.models.tiny_models import hf_model

FAMILIES = ("llama", "qwen2", "gpt2", "mixtral")
WHOLE = Layout(DeviceMesh((0,)), ParallelStrategy())
LAYOUTS = {
    "t2": ((1, 0), "t2"),
    "t2p2": ((0, 1, 2, 3), "t2p2"),
    "d2t2": ((0, 1, 2, 3), "d2t2"),
}
RECOMPUTED = {
    "none": {},
    "selective": {"gradient_checkpointing": True, "recompute_granularity": Recompute.selective},
    "full": {"gradient_checkpointing": True},
}
TOKENS, HIDDEN, WIDE = 7, 6, 10
Case = tuple[str, str, bool, str]  # family, layout, sequence parallelism, recomputation


def engine_on(
    folder: Path, layout: Layout, rank: int, groups: dict[tuple[int, ...], Group], **options: Any
) -> NativeEngine:
    spec = ModelSpec(str(folder), optimizer=OptimizerConfig(**STEP), **options)
    context = ParallelContext(layout, rank, groups=groups)
    return build_engine(read_hf_config(folder, False), RoleSpec(spec), context, True, True, 3, 10, (2,), None)


def trained(engine: NativeEngine) -> dict[str, Tensor]:
    """Make a step of two micro-batches; return the loss of this replica with the gradient norm, and the weights."""
    layout, coord = engine.context.layout, engine.context.coord
    rows = batch_of(range(coord.dp, len(LENGTHS), layout.strategy.dp), "tokens")
    engine = replace(engine, micro_batching=MicroBatching(2))
    stats = engine.train(rows, likelihood, float(rows["tokens"].numel()))
    numbers = torch.tensor([stats[name][0] for name in ("nll", "grad_norm") if name in stats], dtype=torch.float64)
    return {"numbers": numbers, "weights": engine.params.data.detach().clone()}


def job(rank: int, world: int, folders: dict[str, Path], root: Path) -> dict[Case, bool]:
    """Return, for each case, whether the results with and without overlap are equal bit for bit."""
    layouts = {name: Layout(DeviceMesh(mesh), ParallelStrategy.parse(text)) for name, (mesh, text) in LAYOUTS.items()}
    used = [(layout, member) for layout in layouts.values() for member in layout.mesh.ranks]
    axes = dict.fromkeys(layout.axis(axis, member) for layout, member in used for axis in AXES)
    groups = make_groups([ranks for ranks in axes if len(ranks) > 1], rank)
    equal = {}
    for case in product(folders, layouts, (True, False), RECOMPUTED):
        family, name, sequence, recompute = case
        if rank not in layouts[name].mesh.ranks:
            continue
        options = {**RECOMPUTED[recompute], "sequence_parallel": sequence, "bf16": recompute == "selective"}
        before, after = (engine_on(folders[family], layouts[name], rank, groups, tp_overlap=overlap, **options)
                         for overlap in (False, True))  # fmt: skip
        expected, found = trained(before), trained(after)
        equal[case] = all(torch.equal(expected[key], found[key]) for key in found)
        after.save(root / "-".join(map(str, case)))
    return equal


@pytest.mark.dist
@pytest.mark.slow
def test_results_are_equal_bit_for_bit_and_those_of_one_worker(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    folders = {family: tmp_path / family for family in FAMILIES}
    for family, folder in folders.items():
        hf_model(family).save_pretrained(folder)
    answers = on_ranks(4, job, folders, tmp_path)
    assert [len(answer) for answer in answers] == [72, 72, 48, 48]  # two layouts have all ranks
    assert [case for answer in answers for case, is_equal in answer.items() if not is_equal] == []
    for family, folder in folders.items():
        engine = engine_on(folder, WHOLE, 0, {})
        trained(engine)
        engine.save(tmp_path / "whole")
        expected, before = (load_file(path / "model.safetensors") for path in (tmp_path / "whole", folder))
        for name in LAYOUTS:
            for sequence in (True, False):
                found = load_file(tmp_path / f"{family}-{name}-{sequence}-none" / "model.safetensors")
                assert max(float((found[key] - before[key]).abs().max()) for key in found) > 1e-3
                assert max(float((found[key] - expected[key]).abs().max()) for key in found) <= 1e-6


class LoggingGroup(Group):
    """A group of two equal members that logs its operations instead of communicating."""

    def __init__(self, log: list[str]) -> None:
        super().__init__((0, 1), 0)
        self.log = log

    def start_all_reduce(self, tensor: Tensor) -> Any:
        self.log.append("start all_reduce")
        return tensor

    def start_reduce_scatter(self, output: Tensor, whole: Tensor) -> Any:
        self.log.append("start reduce_scatter")
        return output.copy_(whole.chunk(2)[0])

    def start_all_gather(self, whole: Tensor, shard: Tensor) -> Any:
        self.log.append("start all_gather")
        return [part.copy_(shard) for part in whole.chunk(2)]

    def all_gather(self, whole: Tensor, shard: Tensor) -> None:
        [part.copy_(shard) for part in whole.chunk(2)]

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        output.copy_(whole.chunk(2)[0])

    def wait(self, work: Any, name: str, tensor: Tensor) -> None:
        self.log.append(f"wait {name}")


class LoggedProducts(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.log.append("product")
        return func(*args, **(kwargs or {}))


EVENTS = {
    False: ["product", "start all_reduce", "product", "wait all_reduce"],
    True: ["start all_gather", "product", "wait all_gather", "start reduce_scatter", "product", "wait reduce_scatter"],
}


@pytest.mark.parametrize("sequence", [False, True])
def test_communication_runs_during_products(sequence: bool) -> None:
    log: list[str] = []
    region = TensorParallelRegion(LoggingGroup(log), TOKENS, sequence, overlaps=True)
    x = torch.randn(region.n_local_tokens, HIDDEN, requires_grad=True)
    y = column_parallel(region, x, torch.randn(WIDE, HIDDEN, requires_grad=True), torch.zeros(WIDE), None, None)
    assert y.shape == (TOKENS, WIDE)
    with LoggedProducts(log):
        y.sum().backward()
    assert log == EVENTS[sequence]


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_weights_and_passes_without_gradients_use_the_plain_product(frozen: bool) -> None:
    region = TensorParallelRegion(LoggingGroup([]), TOKENS, sequence=True, overlaps=True)
    x, weight = torch.randn(region.n_local_tokens, HIDDEN), torch.randn(WIDE, HIDDEN, requires_grad=not frozen)
    with torch.set_grad_enabled(frozen):
        y = column_parallel(region, x, weight, None, None, None)
        assert y.grad_fn is None and torch.equal(y, linear(region.all_gather_tokens(x), weight, None, None))


def test_selective_recomputation_stops_before_the_product(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    flops = {}
    for recompute, options in RECOMPUTED.items():
        engine = engine_on(tmp_path, WHOLE, 0, {}, tp_overlap=True, **options)
        engine.model.tp = LoggingGroup([])
        engine.model.sequence_parallel = True
        x = torch.randn(6, engine.config.hidden, requires_grad=True)  # of the 12 tokens
        with FlopCounterMode(display=False) as counter:
            engine.model._states(x, 12, lambda _, qkv, n_q=engine.model.n_q: qkv[:, :n_q]).all().sum().backward()
        flops[recompute] = counter.get_total_flops()
    assert flops["none"] == flops["selective"] < flops["full"]
