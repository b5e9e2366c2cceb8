"""Console output of steps: columns of measured and predicted times."""

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realhf.api.config import ExperimentConfig, LoraOptions, ModelSpec
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.machine import ExpectedErrors
from realhf.api.messages import Ready
from realhf.apps.view.console import COLUMNS, Console, step_line
from realhf.base.paths import RunDir
from realhf.plan.run_spec import ExpectedPerformance, RunSpec
from realhf.system.metrics.telemetry import EVAL_ALIASES
from tests.plan.search.planners import layout
from tests.scaling import examples

METRICS = {"step": 3.0, "time/step_s": 2.0, "time/gen_s": 1.5, "time/train_s": 0.4, "time/gen_share": 0.5,
           "time/train_share": 0.3, "time/move_share": 0.001, "reward/mean": -0.25, "tokens/per_s": 1234.5,
           "predicted/step_s": 1.75}  # fmt: skip


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], *steps: dict[str, float]) -> list[str]:
    """The lines that a console prints for steps."""
    console = Console(run_of(tmp_path))
    for metrics in steps:
        console.step(metrics)
    return capsys.readouterr().out.splitlines()


def run_of(root: Path, **options: Any) -> RunSpec:
    graph = Graph((MFC("gen", "actor", Kind.GENERATE, InterfaceSpec("any"), ("prompts",), ("tokens",), 2),))
    plan = ExecutionPlan(2, {"gen": Placement(layout("t2"))})
    return RunSpec("test", ExperimentConfig(), Task.prompt, graph, {}, plan, RunDir(root), "cpu", 4, **options)


def test_the_columns_are_those_of_the_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, line, again = shown(tmp_path, capsys, METRICS, {**METRICS, "step": 4})
    assert header.split() == ["step", "reward", "tok/s", "time", "(pred)", "share", "of", "worker", "time"]
    assert line.split() == ["3", "-0.250", "1234", "2.00s", "(1.75s)", "gen", "50%", "train", "30%", "idle", "20%"]
    assert header.index("(pred)") + 6 == line.index("(1.75s)") + 7, "columns are aligned"
    assert again.split()[0] == "4", "the header is printed once"


@pytest.mark.parametrize(("value", "shown"), [(-4e-5, "0.0000"), (-6e-5, "-0.0001"), (nan, "nan"), (-inf, "-inf")])
def test_numbers_that_round_to_zero_have_no_sign(value: float, shown: str) -> None:
    (column,) = (c for c in COLUMNS if c.title == "kl")
    assert column.cell({"kl/ref": value}).strip() == shown


def test_a_metric_that_comes_later_adds_its_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(tmp_path, capsys, METRICS, {**METRICS, "kl/ref": 0.5}, METRICS)
    assert [("kl" in line, "0.5000" in line) for line in lines] == [
        (False, False), (False, False), (True, False), (False, True), (False, False)]  # fmt: skip
    assert " - " in lines[4], "a step without the metric keeps the column"


@settings(max_examples=examples(30))
@given(st.sets(st.sampled_from([name for column in COLUMNS for name in column.metrics])))
def test_every_set_of_metrics_fills_its_columns(names: set[str]) -> None:
    metrics = dict.fromkeys(names, 1.0)
    columns = [column for column in COLUMNS if names & set(column.metrics)]
    cells = step_line(metrics, columns)
    assert len(cells.split()) == len(columns) and "-" not in cells
    assert len(cells) == max(0, sum(column.width + 1 for column in columns) - 1)


def test_the_banner_shows_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path)
    Console(run).banner()
    assert "s per step" not in capsys.readouterr().out
    expected = ExpectedPerformance("the profile p.json", 1.75, {"gen": 1.5}, 2.5e9)
    Console(replace(run, expected=expected)).banner()
    shown = capsys.readouterr().out
    assert "predicted 1.75 s per step, peak memory over workers 2.50 GB, from the profile p.json\n" in shown
    assert "d1t2p1@0-1" in shown


def test_hardware_limits_are_not_labelled_as_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ExpectedPerformance("the limits of cpu", 1.75, {"gen": 1.5}, 2.5e9, is_measured=False)
    console = Console(run_of(tmp_path, expected=expected))
    console.banner()
    console.ready({0: Ready(0)})
    console.step({"step": 1.0, "time/step_s": 2.0, "limit/step_s": 1.75})
    shown = capsys.readouterr().out
    assert "limits  at least 1.75 s per step" in shown and "from the limits of cpu; realhf profile measures" in shown
    assert "predicted" not in shown and "(pred)" not in shown and shown.count("1.75") == 1


def test_a_prediction_is_shown_with_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = ExpectedErrors(memory=0.05)
    expected = ExpectedPerformance("the profile p.json", 1.75, {}, 2.5e9, step_error=0.125, errors=errors)
    console = Console(run_of(tmp_path, expected=expected))
    console.banner()
    for seconds in (9.0, 1.9, 2.0, 1.0):  # the first step is longer
        console.step({**METRICS, "time/step_s": seconds})
    console.summary({})
    banner, *_, header, first, _, _, _, _, step, _, _ = capsys.readouterr().out.splitlines()
    assert banner.startswith("realhf ")
    assert "(1.75s \u00b1 12%)" in first and header.index("(pred)") + 6 == first.index("12%)") + 4
    assert step == "step    1.9 s (predicted 1.75 s \u00b1 12%): 9% slower, within the expected error"
    Console(run_of(tmp_path, expected=expected)).banner()
    assert (
        "predicted 1.75 s \u00b1 12% per step, peak memory over workers 2.50 GB \u00b1 5%, " in capsys.readouterr().out
    )


def test_an_evaluation_has_one_line_per_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(run_of(tmp_path, n_held_out=3))
    console.banner()
    console.evaluated(7, {"a/loss": 0.25, "b/accuracy": 1.0, "b/loss": 0.5})
    shown = capsys.readouterr().out
    assert ": 4 rows, 3 held out, " in shown
    assert shown.endswith("eval    step 7: a  loss 0.2500\neval    step 7: b  accuracy 1.0000  loss 0.5000\n")


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.sampled_from([*(n for names in EVAL_ALIASES.values() for n in names), "eval_rew/verifier_error"])))
def test_every_result_of_an_evaluation_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: set[str]
) -> None:
    values = {name: 100.5 + i for i, name in enumerate(sorted(names))}
    aliased = {alias: values[n] for alias, of in EVAL_ALIASES.items() for n in of if n in names}
    Console(run_of(tmp_path)).evaluated(1, {**aliased, **values})
    shown = capsys.readouterr().out
    assert all(shown.count(f"{value:.4f}") <= 1 for value in values.values())
    assert all(f"{value:.4f}" in shown for value in aliased.values())


def test_a_warning_is_shown_while_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {**METRICS, "actor_gen/truncated": 1.0}
    lines = shown(tmp_path, capsys, bad, bad, METRICS, bad)
    assert [i for i, line in enumerate(lines) if "100% of the responses are truncated" in line] == [2, 6]


def test_the_summary_ends_with_the_report_and_the_use_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "with space"
    roles = {"actor": RoleSpec(ModelSpec()), "critic": RoleSpec(ModelSpec(), scalar_head=True)}
    run = replace(run_of(root), roles=roles)
    Console(run).summary({role: root / role for role in roles})
    *_, report, use = capsys.readouterr().out.splitlines()
    assert report == f"report  realhf report '{root}'"
    assert use.startswith(f"use     vllm serve '{root}/actor'") and "critic" not in use
    Console(replace(run, roles={"model": roles["critic"]})).summary({"model": root}, best=root / "best")
    assert capsys.readouterr().out.splitlines()[-1] == f"use     realhf quickstart ppo rew.path='{root}/best/model' ..."


def test_adapters_of_a_random_base_have_no_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uses = []
    for options in ({"init_from_scratch": True}, {"path": "/base"}):
        roles = {"actor": RoleSpec(ModelSpec(lora=LoraOptions(rank=4), **options))}
        Console(replace(run_of(tmp_path), roles=roles)).summary({"actor": tmp_path / "actor"})
        uses.append(capsys.readouterr().out.splitlines()[-1])
    assert "is not saved; set actor.lora.merge_on_save=True" in uses[0]
    assert f"vllm serve /base --enable-lora --lora-modules actor={tmp_path / 'actor'}" in uses[1]
