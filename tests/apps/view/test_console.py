"""Console output of steps: columns of measured and predicted times."""

from dataclasses import replace
from pathlib import Path

import pytest

from realhf.api.config import ExperimentConfig
from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.experiment import Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.messages import Ready
from realhf.apps.view.console import HEADER, HEADER_LIMITS, Console, step_line
from realhf.base.paths import RunDir
from realhf.plan.run_spec import ExpectedPerformance, RunSpec
from tests.plan.search.planners import layout

METRICS = {"step": 3.0, "time/step_s": 2.0, "time/gen_s": 1.5, "time/train_s": 0.4, "time/move_s": 0.001,
           "reward/mean": -0.25, "tokens/per_s": 1234.5, "predicted/step_s": 1.75}  # fmt: skip


def cell(column: str, line: str) -> str:
    """The right-aligned cell below a word of the header."""
    end = HEADER.index(column) + len(column)
    return line[:end].split(" ")[-1]


def test_the_prediction_is_next_to_the_measurement() -> None:
    line = step_line(METRICS)
    assert (cell("step", line), cell("reward", line), cell("tok/s", line)) == ("3", "-0.250", "1234")
    assert (cell("time", line), cell("(pred)", line)) == ("2.00s", "(1.75s)")
    assert line.endswith("  gen 75% train 20%")  # calls below half a percent are omitted
    assert cell("kl", line) == "-"


def test_without_a_prediction_its_column_is_empty() -> None:
    line = step_line({name: value for name, value in METRICS.items() if name != "predicted/step_s"})
    assert (cell("time", line), cell("(pred)", line)) == ("2.00s", "")
    assert line.index("gen 75%") == step_line(METRICS).index("gen 75%")


def test_the_banner_shows_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph((MFC("gen", "actor", Kind.GENERATE, InterfaceSpec("any"), ("prompts",), ("tokens",), 2),))
    plan = ExecutionPlan(2, {"gen": Placement(layout("t2"))})
    run = RunSpec("test", ExperimentConfig(), Task.prompt, graph, {}, plan, RunDir(tmp_path), "cpu", 4)
    Console(run).banner()
    assert "s per step" not in capsys.readouterr().out
    expected = ExpectedPerformance("the profile p.json", 1.75, {"gen": 1.5}, 2.5e9)
    Console(replace(run, expected=expected)).banner()
    shown = capsys.readouterr().out
    assert "predicted 1.75 s per step, peak memory over workers 2.50 GB, from the profile p.json\n" in shown
    assert "d1t2p1@0-1" in shown


def test_hardware_limits_are_not_labelled_as_a_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph((MFC("gen", "actor", Kind.GENERATE, InterfaceSpec("any"), ("prompts",), ("tokens",), 2),))
    expected = ExpectedPerformance("the limits of cpu", 1.75, {"gen": 1.5}, 2.5e9, is_measured=False)
    plan = ExecutionPlan(2, {"gen": Placement(layout("t2"))})
    run = RunSpec("test", ExperimentConfig(), Task.prompt, graph, {}, plan, RunDir(tmp_path), "cpu", 4, expected)
    console = Console(run)
    console.banner()
    console.ready({0: Ready(0)})
    shown = capsys.readouterr().out
    assert "limits  1.75 s per step" in shown and "from the limits of cpu; realhf profile measures" in shown
    assert (
        "predicted" not in shown
        and HEADER_LIMITS.index("(limit)") + 1 == HEADER.index("(pred)")
        and HEADER_LIMITS in shown
    )


def test_an_evaluation_has_one_line_per_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph((MFC("gen", "actor", Kind.GENERATE, InterfaceSpec("any"), ("prompts",), ("tokens",), 2),))
    plan = ExecutionPlan(2, {"gen": Placement(layout("t2"))})
    run = RunSpec("test", ExperimentConfig(), Task.prompt, graph, {}, plan, RunDir(tmp_path), "cpu", 4, n_held_out=3)
    console = Console(run)
    console.banner()
    console.evaluated(7, {"a/loss": 0.25, "b/accuracy": 1.0, "b/loss": 0.5})
    shown = capsys.readouterr().out
    assert ": 4 rows, 3 held out, " in shown
    assert shown.endswith("eval    step 7: a  loss 0.2500\neval    step 7: b  accuracy 1.0000  loss 0.5000\n")
