"""Output files of a run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import BatchMeta, ColumnMeta, RowId
from realhf.api.config import ModelSpec, RewardConfig
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.messages import Done, Holders, PrepareCall, Ready
from realhf.arch.flops import generate_flops, matrix_params, train_flops
from realhf.base.errors import RunFailed
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.run_spec import ExpectedPerformance, RunSpec
from realhf.plan.train_schedule import PromptRange
from realhf.system.metrics.telemetry import Metrics, Telemetry
from realhf.system.metrics.trace import SpanTuple, trace_lines
from realhf.system.metrics.worker_metrics import StepMetrics, microseconds
from tests.scaling import examples

SPEC = InterfaceSpec("any")
GEN = MFC("actor_gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 2)
JUDGE = MFC("rew_inf", None, Kind.INFERENCE, SPEC, ("tokens",), ("rewards",), 2)
TRAIN = MFC("actor_train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards"), (), 2)
PROMPTS = BatchMeta((RowId(0, -1), RowId(1, -1)), {"prompts": ColumnMeta("int64", (3, 5))})
ROWS = BatchMeta((RowId(0, 0), RowId(0, 1), RowId(1, 0), RowId(1, 1)), {"tokens": ColumnMeta("int64", (5, 9, 6, 7))})


class Watcher:
    """A view and a sink that records its calls."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def ready(self, workers: dict[int, Ready]) -> None:
        self.events.append(sorted(workers))

    def step(self, metrics: Metrics) -> None:
        self.events.append(metrics["step"])

    def evaluated(self, step: int, metrics: Metrics) -> None:
        self.events.append(("evaluated", step, metrics))

    def saved(self, role: str, path: Path) -> None:
        self.events.append((role, path.name))

    def kept(self, metric: str, value: float, path: Path) -> None:
        self.events.append((metric, value, path.name))

    def failed(self, failure: str) -> None:
        self.events.append(failure)

    def write(self, metrics: Metrics) -> None:
        self.events.append(metrics)

    def close(self) -> None:
        self.events.append("closed")


@pytest.fixture
def run(make_run: Callable[..., RunSpec], actor_folder: Path, tmp_path: Path) -> RunSpec:
    meshes = {m.name: (0, 1) for m in (GEN, JUDGE, TRAIN)}
    roles = {"actor": RoleSpec(ModelSpec(str(actor_folder)))}
    return make_run(Graph((GEN, JUDGE, TRAIN)), meshes, tmp_path, roles=roles)


def call(mfc: str, inputs: BatchMeta) -> PrepareCall:
    return PrepareCall(1, mfc, 0, 0, inputs, Holders((), {}), (), ((0,), (1,)), (), {})


def done(
    request: int, rank: int, spans: tuple[SpanTuple, ...], memory: tuple[int, int] = (0, 0), **results: Any
) -> Done:
    """Return the reply of a worker with these spans."""
    metrics = microseconds(spans, "Compute"), microseconds(spans, "Transfer", "Reallocate"), *memory
    return Done(request, rank, trace=trace_lines(spans, rank, 0), metrics=metrics, **results)


def one_step(telemetry: Telemetry) -> None:
    """Report a step on two workers."""
    part = BatchMeta(ROWS.ids[:2], {"tokens": ColumnMeta("int64", (5, 9))})
    rest = BatchMeta(ROWS.ids[2:], {"tokens": ColumnMeta("int64", (6, 7))})
    stats = {"response_length": (6.0, 2.0)}
    spans = (("actor_gen/Transfer", 100, 2000), ("actor_gen/Compute", 2100, 500_000))
    generated = [
        done(1, 0, spans, outputs=part, stats=stats, memory=(9, 5)),
        done(
            1,
            1,
            (("actor_gen/Compute", 2000, 700_000),),
            outputs=rest,
            stats={"response_length": (5.0, 2.0)},
            memory=(8, 6),
        ),
    ]
    judged = [
        Done(2, 0, stats={"reward": (1.0, 2.0), "accuracy": (1.0, 2.0)}),
        Done(2, 1, stats={"reward": (-2.0, 2.0), "accuracy": (0.0, 2.0)}),
    ]
    losses, spans = {"actor_loss": (0.5, 1.0), "kl": (0.0, 0.0)}, (("actor_train/Compute", 9, 250_000),)
    trained = [done(3, rank, spans, stats=losses) for rank in (0, 1)]
    calls = (("actor_gen", PROMPTS, generated), ("rew_inf", ROWS, judged), ("actor_train", ROWS, trained))
    for name, inputs, replies in calls:
        for reply in replies:
            telemetry.reply(0, name, reply)
        telemetry.call_done(call(name, inputs), replies)
        telemetry.event(RowsReady(name, PromptRange(0, 0, 2), {r.rank: r.outputs for r in replies if r.outputs}))


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_of_metrics_per_step(run: RunSpec) -> None:
    view = Watcher()
    telemetry = Telemetry(run, view, [view])
    telemetry.ready({0: Ready(0), 1: Ready(1)})
    one_step(telemetry)
    telemetry.step_done(0)
    (metrics,) = lines(run.paths.metrics)
    assert view.events == [[0, 1], metrics, 1] and telemetry.last == metrics
    assert metrics["step"] == 1 and metrics["time/step_s"] > 0
    assert (metrics["time/actor_gen_s"], metrics["time/move_s"], metrics["time/actor_train_s"]) == (0.7, 0.002, 0.25)
    assert metrics["actor_gen/response_length"] == metrics["length/response"] == 11 / 4
    assert metrics["rew_inf/reward"] == metrics["reward/mean"] == -0.25 and metrics["reward/accuracy"] == 0.25
    assert metrics["actor_train/actor_loss"] == metrics["loss"] == 0.5
    assert metrics["actor_train/kl"] == metrics["kl/ref"] == 0.0  # a mean of nothing
    assert metrics["tokens/generated"] == 27 - 2 * 8 and metrics["tokens/trained"] == 27
    assert metrics["tokens/per_s"] == pytest.approx(27 / metrics["time/step_s"])
    flops = generate_flops(run.models["actor"], (3, 5), (5, 9, 6, 7)) + train_flops(run.models["actor"], (5, 9, 6, 7))
    assert metrics["flops/model_per_s"] == pytest.approx(flops / metrics["time/step_s"])
    assert (metrics["memory/worker_peak_gb"], metrics["memory/worker_gb"]) == (9e-9, 6e-9)
    assert not any(name.startswith("_") for name in metrics)
    telemetry.close()


def test_predictions_are_in_every_line(run: RunSpec) -> None:
    expected = ExpectedPerformance("the limits of cpu", 1.75, {"actor_gen": 0.5, "actor_train": 0.25}, 2e9)
    telemetry = Telemetry(replace(run, expected=expected), Watcher(), [])
    for step in (0, 1):
        one_step(telemetry)
        telemetry.step_done(step)
    telemetry.close()
    for metrics in lines(run.paths.metrics):
        predicted = {name: value for name, value in metrics.items() if name.startswith("predicted/")}
        wanted = {"predicted/step_s": 1.75, "predicted/actor_gen_s": 0.5, "predicted/actor_train_s": 0.25}
        assert predicted == wanted
    assert lines(run.paths.metrics)[0]["time/actor_train_s"] == 0.25


def test_utilisation_relative_to_the_data_sheet(run: RunSpec) -> None:
    peaks = {"peak_flops": 1e9, "peak_bandwidth": 1e8}
    config = PPOExperiment(dataset=run.config.dataset)
    telemetry = Telemetry(
        replace(run, config=config, expected=ExpectedPerformance("x", 1.0, {}, 1e9, **peaks)), Watcher(), []
    )
    one_step(telemetry)
    telemetry.step_done(0)
    telemetry.close()
    (line,) = lines(run.paths.metrics)
    model = run.models["actor"]
    assert {name for name in line if name[:4] in ("mfu/", "mbu/")} == {
        "mfu/actor_gen",
        "mfu/actor_train",
        "mbu/actor_gen",
    }
    generated, trained = generate_flops(model, (3, 5), (5, 9, 6, 7)), train_flops(model, (5, 9, 6, 7))
    assert line["mfu/actor_gen"] == pytest.approx(generated / (2 * line["time/actor_gen_s"]) / 1e9)
    assert line["mfu/actor_train"] == pytest.approx(trained / (2 * line["time/actor_train_s"]) / 1e9)
    # two replicas: responses of 2 and 6 tokens after 3, of 1 and 2 after 5; the first token of each is not decoded
    weights = matrix_params(model) + model.hidden * model.vocab
    attended = (4) + (4 + 5 + 6 + 7 + 8) + (6)
    cached = 2 * model.n_layers * model.n_kv_heads * model.head_dim
    assert line["mbu/actor_gen"] == pytest.approx(
        4 * ((5 + 1) * weights + attended * cached) / (2 * line["time/actor_gen_s"]) / 1e8
    )


def test_steps_are_separate_and_freed(run: RunSpec) -> None:
    telemetry = Telemetry(run, Watcher(), [])
    one_step(telemetry)
    fetched = done(9, 0, (("fetch", 1, 2),))
    telemetry.reply(1, "", fetched)  # the next step's data, before this step is over
    telemetry.step_done(0)
    telemetry.reply(0, "", done(10, 0, (("save/actor", 1, 2),)))  # saving, after it is over
    telemetry.step_done(1)
    telemetry.close()
    first, second = lines(run.paths.metrics)
    assert second["step"] == 2 and "reward/mean" in first and "reward/mean" not in second
    assert second["tokens/per_s"] == second["flops/model_per_s"] == 0.0
    assert not telemetry._steps


def test_the_trace_is_a_chrome_trace(run: RunSpec) -> None:
    telemetry = Telemetry(run, Watcher(), [])
    one_step(telemetry)
    telemetry.step_done(0)
    telemetry.close()
    spans = json.loads(run.paths.trace.read_text())
    assert [(s["name"], s["pid"], s["ts"], s["dur"]) for s in spans[:2]] == [
        ("actor_gen/Transfer", 0, 100, 2000),
        ("actor_gen/Compute", 0, 2100, 500_000),
    ]
    assert len(spans) == 6 and all(s["ph"] == "X" and s["args"] == {"step": 1} for s in spans[:-1])


def test_a_run_without_steps_has_valid_files(run: RunSpec) -> None:
    view = Watcher()
    Telemetry(run, view, [view]).close()
    assert len(json.loads(run.paths.trace.read_text())) == 1
    assert run.paths.events.read_text() == "" and view.events == ["closed"]


def test_events_of_the_master_are_written(run: RunSpec) -> None:
    telemetry = Telemetry(run, Watcher(), [])
    one_step(telemetry)
    telemetry.close()
    events = lines(run.paths.events)
    assert [e["mfc"] for e in events] == ["actor_gen", "rew_inf", "actor_train"]
    assert events[0]["outputs"]["1"]["columns"]["tokens"] == {"dtype": "int64", "lengths": [6, 7]}


def test_parts_of_a_row_are_merged_into_one_line(run: RunSpec) -> None:
    text = {"prompt": "1+2=\n", "response": "#### 3 é", "answer_tokens": 7}
    parts = [
        {"prompt_id": 4, "sample": 1, "rewards": -1.0},
        {"prompt_id": 4, "sample": 0, "rewards": 1.0},
        {"prompt_id": 4, "sample": -1, "fields": {"query_id": "q4"}},
        {"prompt_id": 4, "sample": 1, **text},
        {"prompt_id": 2, "sample": 0, **text, "truncated": 0},
        {"prompt_id": 5, "sample": 0, "score_1": 2.0, "fields": {"id": 10**30, "odd": "\ud800"}},
    ]
    telemetry = Telemetry(run, Watcher(), [])
    telemetry.generations(3, parts, limit=-1)
    telemetry.generations(4, parts, limit=2)
    telemetry.close()
    rows = lines(run.paths.generations(3))
    assert rows == [
        {"prompt_id": 2, "sample": 0, **text, "truncated": 0, "fields": None},
        {"prompt_id": 4, "sample": 0, "rewards": 1.0, "fields": {"query_id": "q4"}},
        {"prompt_id": 4, "sample": 1, "rewards": -1.0, **text, "fields": {"query_id": "q4"}},
        {
            "prompt_id": 5,
            "sample": 0,
            "score_1": 2.0,
            "fields": {"id": 10**30, "odd": "\ud800"},
        },  # a row of its own for every response
    ]
    assert lines(run.paths.generations(4)) == rows[:2]


def test_paths_of_models_are_recorded(run: RunSpec) -> None:
    view = Watcher()
    telemetry = Telemetry(replace(run), view, [])
    telemetry.saved("actor", run.paths.model("actor", 3))
    telemetry.close()
    assert telemetry.models == {"actor": run.paths.model("actor", 3)} and view.events == [("actor", "step_3")]


def evaluate(telemetry: Telemetry, run: RunSpec) -> None:
    """Report an evaluation of four held-out rows in two steps."""
    first = run.eval_schedule.first_step
    for step in (first, first + 1):
        replies = [Done(1, rank, stats={"accuracy": (rank + step - first, 2.0), "none": (0.0, 0.0)}) for rank in (0, 1)]
        for reply in replies:
            telemetry.reply(step, "eval_rew", reply)
        telemetry.call_done(msgspec.structs.replace(call("eval_rew", ROWS), step=step), replies)


def test_evaluation_on_held_out_rows(run: RunSpec) -> None:
    """Two calls on two workers; evaluation steps are numbered after training steps."""
    eval_mfc = MFC("eval_rew", "actor", Kind.INFERENCE, SPEC, ("tokens",), (), 2)
    run = replace(run, graph=replace(run.graph, evaluation=(eval_mfc,)), n_held_out=4)
    view = Watcher()
    telemetry = Telemetry(run, view, [view])
    evaluate(telemetry, run)
    assert telemetry.evaluated(0) == {"eval/accuracy": 0.5, "eval/prompts": 4.0, "eval_rew/accuracy": 0.5}
    one_step(telemetry)
    evaluate(telemetry, run)
    telemetry.step_done(0, is_evaluated=True)
    assert len(lines(run.paths.metrics)) == 1
    metrics = telemetry.evaluated(1)
    before, found = lines(run.paths.evaluation)
    assert (before["step"], found["step"]) == (0, 1) and before["metrics"] == found["metrics"] == metrics
    assert found["seconds"] >= 0 and found["counts"] == {"eval_rew/accuracy": 8.0}
    at_start, line = lines(run.paths.metrics)
    assert at_start == {"step": 0, "time/eval_s": before["seconds"], **metrics}
    assert line["time/eval_s"] == found["seconds"] and line["step"] == 1 and "rew_inf/reward" in line
    assert {**line, **metrics} == line
    assert view.events == [at_start, ("evaluated", 0, metrics), 1, line, ("evaluated", 1, metrics)]
    for step in (1, 2):
        folder = run.paths.model("actor", step)
        folder.mkdir(parents=True)
        telemetry.saved("actor", folder)
    assert json.loads((run.paths.model("actor", 1) / "evaluation.json").read_text()) == found
    assert not (run.paths.model("actor", 2) / "evaluation.json").exists()
    telemetry.kept("eval/accuracy", 0.5, run.paths.best / "step_2")
    assert telemetry.best == run.paths.best / "step_2" and view.events[-1] == ("eval/accuracy", 0.5, "step_2")
    telemetry.close()


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "b"])), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.05, 0.25, 0.5, 1.0]),
    st.booleans(),
)
def test_the_limit_of_failures_is_for_the_step_over_all_ranks(
    run: RunSpec, parts: list[tuple[int, str]], limit: float, is_evaluation: bool
) -> None:
    """Calls of one step (resamples) with replies of two ranks; each part has three responses."""
    config = PPOMathExperiment(dataset=run.config.dataset, reward=RewardConfig(max_failures=limit))
    run, view = replace(run, config=config), Watcher()
    run.paths.failure.unlink(missing_ok=True)
    telemetry, step = Telemetry(run, view, []), run.eval_schedule.first_step if is_evaluation else 0
    where = "rew_inf of an evaluation" if is_evaluation else "rew_inf of step 1"
    failed = total = 0
    stopped = False
    for k in range(0, len(parts), 2):
        replies = [
            Done(1, rank, stats={"failed": (float(n), 3.0)}, values={"failure": text} if n and text else {})
            for rank, (n, text) in enumerate(parts[k : k + 2])
        ]
        failed, total = failed + sum(n for n, _ in parts[k : k + 2]), total + 3 * len(replies)
        try:
            telemetry.call_done(msgspec.structs.replace(call("rew_inf", ROWS), step=step), replies)
        except RunFailed as error:
            assert str(error).startswith(f"{where}: {failed} of {total} responses have no reward, more than a fraction")
            stopped = True
        assert stopped is (failed / total > limit)
        if stopped:
            break
    telemetry.close()
    first = next((k for k, (n, _) in enumerate(parts) if n), None)
    if first is None or first >= total // 3:
        assert view.events == [] and not run.paths.failure.exists()
    else:
        texts = [text for n, text in parts[first // 2 * 2 : first // 2 * 2 + 2] if n and text]
        assert view.events == [f"{where}: {texts[0] if texts else 'a reward is not a finite number'}"]
        assert run.paths.failure.read_text() == view.events[0] + "\n"


def test_worker_metrics_are_reduced_as_declared() -> None:
    step = StepMetrics(2)
    replies = (("gen", 0, 3), ("gen", 1, 4), ("gen", 0, 2), ("train", 1, 7))
    for mfc, rank, value in replies:
        step.add(mfc, Done(1, rank, metrics=(value * 10**6, value * 10**6, 0, value * 10**6)))
    assert step.metrics() == {
        "time/gen_s": 5.0,  # rank 0: 3 + 2
        "time/train_s": 7.0,
        "time/move_s": 11.0,  # rank 1: 4 + 7
        "memory/worker_gb": 7e-3,
    }
    assert list(step.metrics()) == ["time/gen_s", "time/train_s", "time/move_s", "memory/worker_gb"]
