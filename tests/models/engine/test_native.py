"""The native engine: independence of micro-batches and workers, limits, saved folders."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.batch_meta import RowId
from realhf.api.config import OptimizerType, Recompute
from realhf.api.execution_plan import MicroBatching
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine import grad_reduction
from realhf.models.engine.native import NativeEngine
from tests.models.engine.tiny_engine import FAMILIES, counted, engine_on, nll, rows_of

LENGTHS = (5, 9, 2, 14, 3, 7, 1)
BUDGETS = [MicroBatching(n) for n in (1, 2, 5, 7, 50)] + [MicroBatching(1, tokens) for tokens in (14, 20, 5)]


def trained(engine: NativeEngine, batch: SequenceBatch, budget: MicroBatching) -> tuple[Tensor, dict]:
    """Return the unclipped gradient and the statistics of one step."""
    stats = replace(engine, micro_batching=budget).train(batch, nll, counted(batch))
    assert engine.params.grad is not None
    return engine.params.grad.clone(), stats


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_do_not_depend_on_micro_batches(family: str, hf_models: dict) -> None:
    batch, folder = rows_of(LENGTHS), hf_models[family][0]
    whole, expected = trained(engine_on(folder), batch, MicroBatching())
    for budget in BUDGETS:
        gradient, stats = trained(engine_on(folder), batch, budget)
        assert (gradient - whole).norm() < 1e-6 * whole.norm(), budget
        assert stats["nll"] == pytest.approx(expected["nll"], rel=1e-6) and stats["nll"][1] == counted(batch)
        assert stats["grad_norm"][0] == pytest.approx(expected["grad_norm"][0], rel=1e-6)


def test_the_gradient_equals_transformers(hf_models: dict) -> None:
    folder, theirs = hf_models["llama"]
    batch = rows_of(LENGTHS)
    gradient, stats = trained(engine_on(folder), batch, MicroBatching(3))
    total = torch.zeros(())
    for tokens, mask in zip(batch.columns["tokens"].rows(), batch.columns["mask"].rows(), strict=True):
        logps = theirs(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        total = total - (logps * mask[1:]).sum()
    theirs.zero_grad()
    (total / counted(batch)).backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in theirs.parameters() if p.grad is not None))
    theirs.zero_grad()
    assert stats["nll"][0] == pytest.approx(float(total.detach()), rel=1e-5)
    assert stats["grad_norm"][0] == pytest.approx(norm, rel=1e-5)
    assert gradient.double().norm() == pytest.approx(norm, rel=1e-5)


def test_rows_of_a_prompt_stay_together_if_requested(llama: Path) -> None:
    batch, seen = rows_of([4] * 12, per_prompt=3), []

    def watched(outputs: Outputs, part: SequenceBatch) -> Loss:
        seen.append({row.prompt for row in part.ids})
        return nll(outputs, part)

    engine = replace(engine_on(llama), micro_batching=MicroBatching(4, 16))
    engine.train(batch, watched, counted(batch), together=True)
    assert sorted(p for part in seen for p in part) == [0, 1, 2, 3]
    seen.clear()
    replace(engine, share_prompts=False).train(batch, watched, counted(batch))
    assert sum(map(len, seen)) > 4


@pytest.mark.parametrize("granularity", Recompute)
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_activations_gives_the_same_step(granularity: Recompute, family: str, hf_models: dict) -> None:
    batch, folder = rows_of(LENGTHS), hf_models[family][0]
    plain = engine_on(folder)
    saving = engine_on(folder, gradient_checkpointing=True, recompute_granularity=granularity)
    assert saving.model.recompute is granularity and plain.model.recompute is None
    for _ in range(2):
        gradients = [trained(engine, batch, MicroBatching(2))[0] for engine in (plain, saving)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(plain.params.data, saving.params.data)


def test_bfloat16_weights_learn_from_small_steps(llama: Path) -> None:
    batch = rows_of(LENGTHS)
    engine = engine_on(llama, bf16=True, optimizer={"lr": 1e-5, "weight_decay": 0.0})
    before = engine.params.data.clone()
    losses = [engine.train(batch, nll, counted(batch))["nll"][0] for _ in range(80)]
    assert engine.params.data.dtype == torch.bfloat16 and not torch.equal(engine.params.data, before)
    assert losses[-1] < losses[0] - 0.03


def test_forward_keeps_the_order_of_rows(llama: Path) -> None:
    batch = rows_of(LENGTHS)
    engine, critic = engine_on(llama, trained=False), engine_on(llama, trained=False, scalar=True)
    rows = [engine.forward(batch.select([i]), lambda o, _: o.logprobs()) for i in range(len(batch))]
    last = [critic.forward(batch.select([i]), lambda o, _: o.last_values()) for i in range(len(batch))]
    for budget in BUDGETS:
        logprobs = replace(engine, micro_batching=budget).forward(batch, lambda o, _: o.logprobs())
        torch.testing.assert_close(logprobs, torch.cat(rows), atol=1e-5, rtol=1e-5)
        values = replace(critic, micro_batching=budget).forward(batch, lambda o, _: o.last_values())
        torch.testing.assert_close(values, torch.cat(last), atol=1e-5, rtol=1e-5)
    assert engine.forward(batch.select([]), lambda o, _: o.logprobs()).numel() == 0


def test_a_mean_above_its_limit_skips_the_step(llama: Path) -> None:
    engine, batch = engine_on(llama), rows_of(LENGTHS)
    before = engine.params.data.clone()
    mean = replace(engine, version=3).train(batch, nll, counted(batch), {"nll": 0.1})["nll"]
    mean = mean[0] / mean[1]
    assert torch.equal(engine.params.data, before)
    assert engine.train(batch, nll, counted(batch), {"nll": mean * 0.999})["step_skipped"] == (1.0, 1.0)
    assert torch.equal(engine.params.data, before) and engine.optimizer is not None and engine.optimizer.steps == 0
    stats = engine.train(batch, nll, counted(batch), {"nll": mean * 1.001, "of another rank": 1.0})
    assert stats["step_skipped"] == (0.0, 1.0) and stats["lr"] == (1e-3, 1.0)
    fresh = engine_on(llama)
    fresh.train(batch, nll, counted(batch))
    assert torch.equal(engine.params.data, fresh.params.data)  # the skipped steps had no effect


def test_batches_without_counted_tokens_make_no_step(llama: Path) -> None:
    engine, batch = engine_on(llama), rows_of(LENGTHS)
    before = engine.params.data.clone()
    assert engine.train(batch.select([]), nll, 0.0) == {}
    assert engine.train(batch.with_tokenwise("mask", torch.zeros_like(batch["mask"])), nll, 0.0) == {}
    assert torch.equal(engine.params.data, before)


def test_a_nan_loss_is_an_error(llama: Path) -> None:
    engine, batch = engine_on(llama), rows_of(LENGTHS)

    def broken(outputs: Outputs, part: SequenceBatch) -> Loss:
        loss = nll(outputs, part)
        return Loss(loss.total * math.nan, loss.stats)

    with pytest.raises(ValueError, match="the loss of a micro-batch with 7 rows .* is nan"):
        engine.train(batch, broken, counted(batch))


def test_untrained_roles_have_no_optimizer(llama: Path) -> None:
    batch = rows_of(LENGTHS)
    for engine in (engine_on(llama, trained=False), engine_on(llama, optimizer={"type": OptimizerType.none})):
        assert engine.optimizer is None and engine.params.grad is None
        with pytest.raises(ValueError, match="no optimizer"):
            engine.train(batch, nll, counted(batch))


@pytest.mark.parametrize("bf16", [False, True])
def test_saving_and_loading_gives_the_same_engine(bf16: bool, llama: Path, tmp_path: Path) -> None:
    engine, batch = engine_on(llama, bf16=bf16), rows_of(LENGTHS)
    engine.train(batch, nll, counted(batch))
    engine.save(tmp_path / "step_1")
    again = engine_on(tmp_path / "step_1", bf16=bf16)
    assert torch.equal(again.params.data, engine.params.data)
    logprobs = [e.forward(batch, lambda o, _: o.logprobs()) for e in (engine, again)]
    assert torch.equal(*logprobs)


def test_only_one_replica_writes_the_folder(llama: Path, tmp_path: Path) -> None:
    second = engine_on(llama, rank=1, mesh=(0, 1), trained=False)
    second.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def steps_on_ranks(
    rank: int, world: int, folder: Path, mesh: tuple[int, ...], parts: list[list[int]], overlap: bool
) -> dict[str, Any]:
    """Make steps on this rank's rows, one of which exceeds a limit on only some ranks."""
    grad_reduction.BUCKET_NUMEL = 300
    engine, batch = engine_on(folder, rank, mesh, overlap_grad_reduce=overlap), rows_of(LENGTHS)
    mine = batch.select(parts[rank])
    reduced = engine.reduce(torch.tensor([1.0, rank]))
    first = engine.train(mine, nll, counted(mine))
    step_skipped = engine.train(mine, nll, counted(mine), {"nll": 0.1})
    second = replace(engine, version=1).train(mine, nll, counted(mine), {"nll": 100.0})
    none = engine.train(mine.select([]), nll, 0.0)
    return {
        "params": engine.params.data[: engine.params.end].clone(),
        "norm": first["grad_norm"],
        "nll": first.get("nll", (0.0, 0.0)),
        "step_skipped": (step_skipped["step_skipped"], second["step_skipped"], none),
        "reduced": reduced.tolist(),
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    "mesh, parts",
    [
        ((0, 1), [[0, 2, 4, 6], [1, 3, 5]]),
        ((1, 0), [[3], [0, 1, 2, 4, 5, 6]]),
        ((0, 1, 2), [[1, 3, 5], [], [0, 2, 4, 6]]),
    ],
    ids=["two", "turned", "one without rows"],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_several_workers_make_the_step_of_one(
    overlap: bool, mesh: tuple[int, ...], parts: list[list[int]], llama: Path, on_ranks: Callable[..., list[Any]]
) -> None:
    alone, batch = engine_on(llama), rows_of(LENGTHS)
    expected = alone.train(batch, nll, counted(batch))
    replace(alone, version=1).train(batch, nll, counted(batch))
    answers = on_ranks(len(mesh), steps_on_ranks, llama, mesh, parts, overlap)
    sums = [sum(values) for values in zip(*(answer["nll"] for answer in answers), strict=True)]
    assert sums == pytest.approx(expected["nll"], rel=1e-6)
    for answer in answers:
        assert answer["reduced"] == [len(mesh), sum(range(len(mesh)))]
        assert answer["norm"] == (pytest.approx(expected["grad_norm"][0], rel=1e-6), 1.0)
        assert answer["step_skipped"] == ((1.0, 1.0), (0.0, 1.0), {})
        assert torch.equal(answer["params"], answers[0]["params"])
        torch.testing.assert_close(answer["params"], alone.params.data, atol=2e-5, rtol=0)


def test_a_step_does_not_depend_on_row_ids(llama: Path) -> None:
    batch = rows_of(LENGTHS)
    renamed = SequenceBatch(tuple(RowId(100 - i, 0) for i in range(len(batch))), batch.columns)
    gradients = [trained(engine_on(llama), b, MicroBatching(2))[0] for b in (batch, renamed)]
    assert torch.equal(*gradients)
