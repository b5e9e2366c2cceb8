"""Gradients that are reduced during the backward pass: every element once, in one order, when it is complete."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from realhf.api.execution_plan import MicroBatching
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine import grad_reduction
from realhf.models.engine.grad_reduction import OverlappedReduction, ParamRange, plan_buckets
from tests.models.engine.tiny_engine import counted, engine_on, nll, rows_of
from tests.models.tiny_models import ONE_OF_EACH, hf_model

LENGTHS = (5, 9, 2, 14, 3, 7, 1)
NAMES = ("llama", "llama_tied", "gpt2", "qwen3_moe", "gemma2")


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 60),
)
def test_every_element_is_in_one_bucket_of_its_owner(
    params: list[tuple[int, int, bool]], dp: int, max_numel: int
) -> None:
    starts = [sum(size for size, *_ in params[:i]) for i in range(len(params) + 1)]
    ranges = [ParamRange(a, b, layer, late) for a, b, (_, layer, late) in zip(starts, starts[1:], params, strict=False)]
    size = -(-starts[-1] // dp)
    buckets = plan_buckets(ranges, size, max_numel)
    assert sorted(i for b in buckets for i in range(b.start, b.stop)) == list(range(starts[-1]))
    for bucket in buckets:
        assert bucket.stop - bucket.start <= max_numel
        assert {i // size for i in range(bucket.start, bucket.stop)} == {bucket.owner}
        inside = [r for r in ranges if r.start < bucket.stop and r.stop > bucket.start]
        assert bucket.layer == min(r.layer for r in inside) and {r.is_late for r in inside} == {bucket.is_late}
    assert [(b.is_late, -b.layer) for b in buckets] == sorted((b.is_late, -b.layer) for b in buckets)


def test_small_parameters_share_a_bucket() -> None:
    ranges = [ParamRange(10 * i, 10 * i + 10, i) for i in range(6)]
    assert [(b.start, b.stop, b.layer) for b in plan_buckets(ranges, 60, 30)] == [(30, 60, 3), (0, 30, 0)]


class RecordingGroup:
    """A group of two that keeps the values with which operations start."""

    size = 2

    def __init__(self) -> None:
        self.started: list[tuple[Tensor, Tensor]] = []

    def start_reduce(self, tensor: Tensor, index: int) -> int:
        self.started.append((tensor, tensor.clone()))
        return len(self.started)

    def wait(self, work: Any, name: str, tensor: Tensor) -> None:
        assert self.started[work - 1][0].data_ptr() == tensor.data_ptr()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in NAMES:
        found[name] = tmp_path_factory.mktemp(name)
        hf_model(name).save_pretrained(found[name])
    return found


@pytest.mark.parametrize("name", [*NAMES, "llama critic"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_complete_when_their_reduction_starts(
    name: str, bf16: bool, recompute: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_reduction, "BUCKET_NUMEL", 200)
    family, scalar = name.removesuffix(" critic"), name.endswith("critic")
    engine = engine_on(folders[family], scalar=scalar, bf16=bf16, gradient_checkpointing=recompute)
    engine = replace(engine, micro_batching=MicroBatching(3))
    optimizer = engine.optimizer
    assert optimizer is not None
    group = RecordingGroup()
    reduction = optimizer.reduction = OverlappedReduction(
        engine.params,
        optimizer.whole_grad[: engine.params.end // 2 * 2],
        group,
        frozenset({"layers.1.wo"}),  # type: ignore[arg-type]
    )
    engine.model.on_backward = reduction.backward_reached
    before_last = list[int]()
    last = reduction.last_backward
    monkeypatch.setattr(reduction, "last_backward", lambda: before_last.append(len(group.started)) or last())
    monkeypatch.setattr(optimizer, "step", lambda lr: 0.0)
    batch = rows_of(LENGTHS)
    engine.train(batch, squares if scalar else nll, counted(batch))
    assert before_last[0] == 0, "the last backward pass of a step starts the reduction"
    n_late = sum(bucket.is_late for bucket in reduction.buckets)
    assert before_last[1] > len(reduction.buckets) // 4 and len(group.started) == len(reduction.buckets) - n_late
    assert all(torch.equal(now, then) for now, then in group.started)
    reduction.finish()
    assert sum(now.numel() for now, _ in group.started) == engine.params.end


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_of_a_later_stage_are_complete_when_their_reduction_starts(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    model = engine_on(tmp_path).model
    params = model.params
    found = list[tuple[Tensor, Tensor]]()

    def reached(layer: int, _grad: Tensor) -> None:
        complete = [name for name in params.names if params.spec(name).layer > layer]
        found.extend((params.grad_view(name), params.grad_view(name).clone()) for name in complete)

    model.on_backward = reached
    params.enable_grad()
    x = torch.randn(sum(LENGTHS), model.config.hidden, requires_grad=True)
    model.hidden(torch.zeros(len(x), dtype=torch.int64), LENGTHS, x=x).square().sum().backward()
    assert x.grad is not None and found
    assert all(torch.equal(now, then) for now, then in found)


def squares(outputs: Outputs, batch: SequenceBatch) -> Loss:
    return Loss(outputs.values().square().sum(), {})
