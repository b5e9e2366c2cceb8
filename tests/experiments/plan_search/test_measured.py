"""Options, tables and figures of the measured study. Its runs need minutes and are no test."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from experiments.plan_search.measured import WORKLOADS, call, table, words
from experiments.plan_search.measured_chart import chart
from experiments.plan_search.measurements import PlanResult, WorkloadResult
from realhf.apps.commands.quickstart import read_words

RESULT = WorkloadResult("short", (PlanResult(("searched", "real"), "d4", 1.0, 1.2, 0.1),
                                  PlanResult(("random 1",), "t4", 2.0, 1.1, 0.0),
                                  PlanResult(("split",), "p4", 3.0, 3.3, 0.3)))  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_options_of_runs_are_known(name: str, tmp_path: Path) -> None:
    experiment, paths = read_words("ppo", words(WORKLOADS[name], tmp_path, "d2t2", "trial"))
    assert experiment.allocation_mode == "d2t2"
    assert {"actor", "ref", "rew"} <= experiment.roles().keys() == WORKLOADS[name].models.keys()
    assert paths.root == tmp_path / "runs" / "measured" / "trial"


def test_the_table_says_whether_the_target_is_met() -> None:
    assert "| short | 3 | 1.200 +- 0.100 | 1.100 +- 0.000 | random 1 | 1.091 | 0.50 |" in table([RESULT], 1.05)
    assert "in each workload): met. Drift, last round / first: 1.05" in table([RESULT], 1.05)
    slow = WorkloadResult("long", (PlanResult(("searched",), "d4", 1.0, 1.3, 0.1), *RESULT.plans[1:]))
    assert "in each workload): not met" in table([RESULT, slow], 1.0)


def test_the_figure_has_axes_and_is_reproducible(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        chart([RESULT, RESULT], tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text == (tmp_path / "b.svg").read_text()
    assert text.count("predicted step (s)") and text.count("measured step (s)")


def test_a_failed_or_hanging_command_ends_the_study_with_its_output() -> None:
    with pytest.raises(SystemExit, match="(?s)false.*broken"):
        call("sh", "-c", "echo broken; false")
    with pytest.raises(SystemExit, match=r"took more than 0\.1 s"):
        call("sleep", "60", timeout_s=0.1)
