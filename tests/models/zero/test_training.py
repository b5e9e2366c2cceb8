"""Training with ZeRO-2 and ZeRO-3 on gloo ranks: memory, replicas without rows, skipped steps, bfloat16, adapters."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.config import LoraOptions, LRSchedule, ModelSpec, OptimizerConfig
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import Lora, ModelConfig
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.packing import ForwardOutputs
from realhf.plan.cost.zero import layer_numels
from tests.models.sharding import batch_of, likelihood

pytestmark = [pytest.mark.dist, pytest.mark.slow]
WIDE = ModelConfig("llama", n_layers=6, hidden=192, n_heads=6, n_kv_heads=6, head_dim=32, intermediate=512, vocab=67,
                   max_positions=64)  # fmt: skip
SMALL = ModelConfig("llama", n_layers=2, hidden=20, n_heads=2, n_kv_heads=2, head_dim=10, intermediate=30, vocab=67,
                    max_positions=64)  # fmt: skip
ADAM = {"lr": 0.02, "eps": 1e-2, "lr_scheduler_type": LRSchedule.constant}


def engine_of(config: ModelConfig, rank: int, groups: dict, text: str, stage: int, **options: Any) -> NativeEngine:
    spec = ModelSpec(config="-", init_from_scratch=True, zero_stage=stage, optimizer=OptimizerConfig(**ADAM), **options)
    strategy = ParallelStrategy.parse(text)
    layout = Layout(DeviceMesh(tuple(range(strategy.world))), strategy)
    return build_engine(
        config, RoleSpec(spec), ParallelContext(layout, rank, groups=groups), trained=True, holds_weights=True, seed=3,
        total_steps=10, stop_ids=(2,), tokenizer_folder=None,
    )  # fmt: skip


def live_bytes() -> int:
    """Return the bytes of the storages of all tensors since ``gc.freeze``."""
    gc.collect()
    storages = (thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def settled_bytes(limit: float) -> int:
    """Return ``live_bytes``, once it is at most ``limit``: gloo's threads drop tensors after ``wait`` returns."""
    deadline = time.monotonic() + 10
    while (found := live_bytes()) > limit and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def expected_bytes(text: str, stage: int) -> tuple[float, float]:
    """Return the bytes of a rank's weights, gradients and moments, and the limit of those in a step.

    They are 16 bytes per parameter, of which the replicas share those that a stage splits. ZeRO-2 adds gradients of two
    layers, ZeRO-3 also weights of two layers.
    """
    (layers,) = layer_numels(WIDE, ParallelStrategy())
    assert layers.largest == layers.block
    whole = {1: 8, 2: 4, 3: 0}[stage]  # bytes per parameter that are not shared
    numel = layers.embedding + WIDE.n_layers * layers.block + layers.head
    expected = numel * (whole + (16 - whole) / int(text[1]))
    two_layers = 2 * layers.block * 4
    return expected, {1: 0, 2: 1, 3: 2}[stage] * two_layers * 1.1 + 1.03 * expected


def memory_job(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Return the bytes of tensors between two steps, and the largest number in a step, by layout and stage."""
    groups, found = make_groups([(0, 1), tuple(range(world))], rank), {}
    for text, stage in (("d2", 1), ("d2", 2), ("d2z3", 3), ("d4", 1), ("d4", 2), ("d4z3", 3)):
        if rank >= ParallelStrategy.parse(text).world:
            continue
        gc.collect()
        gc.freeze()
        engine, peaks = engine_of(WIDE, rank, groups, text, stage), list[int]()
        row = batch_of(range(2, 3), "tokens")
        observed, (_, limit) = engine.model.on_backward, expected_bytes(text, stage)

        def reached(
            layer: int, grad: Tensor, limit: float = limit, observed: Any = observed, peaks: list = peaks
        ) -> None:
            if observed is not None:
                observed(layer, grad)
            peaks.append(settled_bytes(limit))

        engine.model.on_backward = reached
        for _ in range(2):
            engine.train(row, likelihood, 6.0)
        found[f"{text} {stage}"] = settled_bytes(expected_bytes(text, stage)[0] * 1.03), max(peaks)
        del engine, observed, reached
    return found


def test_memory_falls_with_the_number_of_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    """Of whole layers few are in memory at a time."""
    (layers,) = layer_numels(WIDE, ParallelStrategy())
    for answer in on_ranks(4, memory_job):
        for case, (between, peak) in answer.items():
            text, stage = case.split()
            expected, limit = expected_bytes(text, int(stage))
            assert between == pytest.approx(expected, rel=0.03), case
            assert peak <= limit, case
            assert stage == "1" or peak - between > layers.block * 4


def result_job(rank: int, world: int) -> dict[str, Any]:
    groups, found = make_groups([(0, 1), (0, 1, 2)], rank), {}
    for name, job in JOBS.items():
        for text, stage in (("d1", 1), ("d2", 1), ("d2", 2), ("d2z3", 3), ("d3z3", 3)):
            if rank < ParallelStrategy.parse(text).world:
                found[f"{name} {text} {stage}"] = job(rank, groups, text, stage)
    return found


def weights(engine: NativeEngine) -> dict[str, Tensor]:
    """Return the whole weights on every rank. Collective over the replicas."""
    group = engine.context.group("dp")
    found = {}
    for name in engine.model.params.names:
        spec = engine.model.params.spec(name)
        if engine.context.layout.strategy.zero3:
            full = torch.zeros(spec.shape, dtype=torch.float32)
            if name in engine.params.names:
                full[tuple(slice(*side) for side in engine.params.box(name))] = engine.params.view(name).float()
            found[name] = group.all_reduce(full)
        else:
            found[name] = engine.params.view(name).float().clone()
    return found


def my_rows(rank: int, text: str, numbers: range) -> SequenceBatch:
    return batch_of(numbers[rank :: ParallelStrategy.parse(text).dp], "tokens")


def count_of(batch: SequenceBatch) -> float:
    return float(batch["tokens"].numel())


def without_rows(rank: int, groups: dict, text: str, stage: int) -> dict[str, Tensor]:
    """Only the first replica has rows, in several micro-batches."""
    engine = engine_of(SMALL, rank, groups, text, stage)
    object.__setattr__(engine, "micro_batching", MicroBatching(max_tokens_per_mb=8))
    rows = batch_of(range(4), "tokens").select([*range(4)] if rank == 0 else [])
    engine.train(rows, likelihood, count_of(rows))
    assert len(engine.forward(rows, lambda outputs, _: outputs.logprobs())) == count_of(rows)
    return weights(engine)


def skipped(rank: int, groups: dict, text: str, stage: int) -> dict[str, Tensor]:
    """The first step is skipped, and has no effect on the second."""
    engine = engine_of(SMALL, rank, groups, text, stage)
    before, rows = weights(engine), my_rows(rank, text, range(4))
    stats = engine.train(rows, likelihood, count_of(rows), {"nll": 0.0})
    assert stats["step_skipped"] == (1.0, 1.0)
    assert all(torch.equal(before[name], weight) for name, weight in weights(engine).items())
    engine.train(my_rows(rank, text, range(1, 5)), likelihood, count_of(my_rows(rank, text, range(1, 5))))
    return weights(engine)


def in_bf16(rank: int, groups: dict, text: str, stage: int) -> dict[str, Tensor]:
    engine = engine_of(SMALL, rank, groups, text, stage, bf16=True)
    for _ in range(2):
        rows = my_rows(rank, text, range(4))
        engine.train(rows, likelihood, count_of(rows))
    return weights(engine)


def adapted(rank: int, groups: dict, text: str, stage: int) -> dict[str, Tensor]:
    if stage == 3:
        return {}
    config = ModelConfig(**{**vars(SMALL), "lora": Lora(2, 4.0)})
    engine = engine_of(config, rank, groups, text, stage, lora=LoraOptions(2, 4.0))
    for _ in range(2):
        rows = my_rows(rank, text, range(4))
        engine.train(rows, likelihood, count_of(rows))
    return weights(engine)


def summed_twice(outputs: ForwardOutputs, batch: SequenceBatch) -> Loss:
    """A loss that uses the head twice."""
    total = -outputs.logprobs().sum() - 0.5 * outputs.logprobs(0.5).sum()
    return Loss(total, {"nll": (total.detach(), 1.0)})


def head_used_twice(rank: int, groups: dict, text: str, stage: int) -> dict[str, Tensor]:
    tied = ModelConfig(**{**vars(SMALL), "tied_embedding": True})
    engine = engine_of(tied, rank, groups, text, stage)
    rows = my_rows(rank, text, range(4))
    engine.train(rows, summed_twice, count_of(rows))
    return weights(engine)


JOBS: dict[str, Callable[[int, dict, str, int], dict[str, Tensor]]] = {
    job.__name__: job for job in (without_rows, skipped, in_bf16, adapted, head_used_twice)
}


@pytest.fixture(scope="module")
def results(on_ranks: Callable[..., list[Any]]) -> list[dict[str, dict[str, Tensor]]]:
    return on_ranks(3, result_job)


@pytest.mark.parametrize("job", JOBS)
def test_stages_train_alike(job: str, results: list[dict[str, dict[str, Tensor]]]) -> None:
    expected, atol = results[0][f"{job} d1 1"], 2e-2 if job == "in_bf16" else 1e-6
    for case in ("d2 1", "d2 2", "d2z3 3", "d3z3 3"):
        n_found = 0
        for answer in results:
            for name, weight in answer.get(f"{job} {case}", {}).items():
                assert torch.allclose(weight, expected[name], atol=atol, rtol=0), (case, name)
                n_found += 1
        assert n_found or job == "adapted"
