"""The master tells workers the rows of a step, which depend on no timing and no layout."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realhf.api.batch_meta import RowId
from realhf.api.config import CurriculumConfig
from realhf.api.curriculum import PromptResult
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.messages import Done, ExecuteCall, Fetch, PrepareCall, ToMaster, ToWorker
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.system.master import Master
from tests.system.test_master import Recorder, Unordered, rows

SPEC = InterfaceSpec("any")
CALLS = ("gen", "rew", "train")


class Judges(Unordered):
    """Workers whose prompts pass if the row is even: they know rows from the messages that request them."""

    def __init__(self, run: RunSpec, seed: int) -> None:
        super().__init__(run, seed)
        self.rows: dict[int, int] = {}

    def reply(self, rank: int, message: ToWorker) -> ToMaster | None:
        if isinstance(message, Fetch):
            self.rows |= dict(enumerate(message.rows, message.start))
        done = super().reply(rank, message)
        if not isinstance(message, ExecuteCall) or self.calls[message.request].mfc != "rew":
            return done
        call: PrepareCall = self.calls[message.request]
        prompts = [call.inputs.ids[i].prompt for i in call.assignment[rank]]
        results = tuple(PromptResult(p, (1.0, 1.0) if self.rows[p] % 2 == 0 else (1.0, -1.0))
                        for p in prompts if p in self.rows)  # fmt: skip
        return Done(message.request, rank, rows([RowId(p, 0) for p in prompts], "rewards"), results=results)


class Events(Recorder):
    """Telemetry that records the metrics of prompts and the events as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[dict[str, float]] = []
        self.events: list[bytes] = []

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.prompts.append(metrics)

    def event(self, event: RowsReady) -> None:
        self.events.append(msgspec.json.encode(event))


@pytest.fixture
def run(make_run: Callable[..., RunSpec], tmp_path: Path) -> Callable[..., RunSpec]:
    def build(ranks: tuple[int, ...], staleness: int = 0, **options: Any) -> RunSpec:
        gen = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 3)
        rew = MFC("rew", None, Kind.INFERENCE, SPEC, ("tokens",), ("rewards",), 3)
        train = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards"), (), 3)
        made = make_run(Graph((gen, rew, train)), dict.fromkeys(CALLS, ranks), tmp_path, n_rows=8, batch=3,
                        total_train_epochs=4)  # fmt: skip
        made.config.max_staleness = staleness
        made.config.dataset.curriculum = CurriculumConfig(**options)
        return replace(made, source_rows=(8,))

    return build


def train(run: RunSpec, seed: int) -> tuple[list[tuple[int, ...]], list[dict[str, float]], list[bytes]]:
    """Return the rows of each step, the metrics and the events."""
    workers, recorder = Judges(run, seed), Events()
    Master(run, workers, dict, recorder).train()
    fetched = {message.start: message.rows for message in workers.asked(Fetch)}
    return [rows for _, rows in sorted(fetched.items())], recorder.prompts, recorder.events


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_neither_timing_nor_workers_change_the_rows(run: Callable[..., RunSpec], staleness: int) -> None:
    found, metrics, events = train(run((0,), staleness, max_pass_rate=0.75), seed=0)
    assert len(found) == 11 and sorted(sum(found, ())[:8]) == [*range(8)]
    late = sum(found[5 + staleness :], ())
    assert sum(row % 2 for row in late) > len(late) / 2, "even rows are left out of most epochs"
    assert metrics[0]["prompts/active"] == 8 and min(line["prompts/active"] for line in metrics) < 8
    assert any(b'"results":[[' in event for event in events)
    for seed, ranks in ((1, (0,)), (2, (0, 1)), (3, (0, 1, 2))):
        assert train(run(ranks, staleness, max_pass_rate=0.75), seed)[:2] == (found, metrics)


def test_without_a_curriculum_messages_have_no_rows(run: Callable[..., RunSpec]) -> None:
    made = run((0,))
    found, metrics, events = train(made, seed=0)
    assert made.curriculum is None and made.result_mfc == "" and metrics == [] and set(found) == {()}
    assert not any(b'"results":[[' in event for event in events)
