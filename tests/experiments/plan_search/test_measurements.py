"""The order of runs, resumption, and statistics of the measured study."""

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.plan_search.measurements import (
    Design,
    MeasuredRun,
    PlanEntry,
    Plans,
    Results,
    drift,
    read_results,
    schedule,
    spearman,
    summarize,
)

DESIGN = Design(seed=3, n_random=2, rounds=2)
PLANS: Plans = {
    "short": {"d4": PlanEntry(("searched", "symmetric"), 1.0), "t4": PlanEntry(("random 1",), 3.0),
              "p4": PlanEntry(("random 2",), 2.0)},
    "long": {"d2t2": PlanEntry(("searched",), 0.5), "d4": PlanEntry(("split",), 0.7)},
}  # fmt: skip


def measured(allocation: str, step_s: tuple[float, ...], number: int = 0, predicted: float = 1.0) -> MeasuredRun:
    return MeasuredRun("short", allocation, number, step_s, predicted, load=0.0)


def test_every_plan_runs_once_per_round_in_an_order_of_the_seed() -> None:
    keys = schedule(PLANS, DESIGN)
    assert [key.round for key in keys] == [0] * 5 + [1] * 5
    assert set(Counter((key.workload, key.allocation) for key in keys).values()) == {2}
    assert keys == schedule(PLANS, DESIGN)
    others = [schedule(PLANS, Design(seed, 2, 2)) for seed in range(20)]
    assert len({tuple(other[:5]) for other in others}) > 10
    assert any([k.allocation for k in other[:5]] != [k.allocation for k in other[5:]] for other in others)


@given(st.integers(0, 10))
def test_an_interrupted_study_continues_with_the_remaining_runs(n_done: int) -> None:
    keys = schedule(PLANS, DESIGN)
    done = [MeasuredRun(key.workload, key.allocation, key.round, (1.0, 1.0), 1.0, 0.0) for key in keys[:n_done]]
    assert Results(DESIGN, PLANS, done).pending() == keys[n_done:]


def test_results_survive_a_file(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    assert read_results(file, DESIGN) == Results(DESIGN, {}, [])
    results = Results(DESIGN, PLANS, [measured("d4", (2.0, 1.0, 1.5)), measured("t4", (2.0, 1.25), 1)])
    results.write(file)
    assert read_results(file, DESIGN) == results


def test_results_of_another_design_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    Results(DESIGN, PLANS, []).write(file)
    with pytest.raises(SystemExit, match="repeat its options"):
        read_results(file, Design(seed=3, n_random=20, rounds=2))
    for text in (
        "",
        "{}",
        '{"design": 1, "plans": {}, "runs": []}',
        '{"design": {"seed": 3, "n_random": 2, "rounds": 2}, "plans": {"short": ["d4"]}, "runs": []}',
        file.read_text()[:-20],
    ):
        file.write_text(text)
        with pytest.raises(SystemExit, match="not a results file"):
            read_results(file, DESIGN)


def test_slow_plans_run_for_fewer_steps() -> None:
    assert [PlanEntry(("split",), s).n_steps for s in (0.01, 0.5, 0.8, 60.0)] == [10, 8, 5, 4]


def test_a_run_counts_its_median_step_without_the_first() -> None:
    assert measured("d4", (9.0, 1.0, 5.0, 2.0)).seconds == 2.0


def test_a_workload_is_summarized_by_the_means_of_its_plans() -> None:
    runs = [measured("d4", (9.0, 2.0), 0, 1.0), measured("d4", (9.0, 3.0), 1, 1.0), measured("t4", (9.0, 2.0), 0, 3.0),
            MeasuredRun("long", "d4", 0, (9.0, 0.1), 1.0, 0.0)]  # fmt: skip
    result = summarize(PLANS["short"], runs, "short")
    assert result is not None and len(result.plans) == 2  # p4 has not been run
    assert result.chosen.names == ("searched", "symmetric")
    assert (result.chosen.measured_s, result.chosen.error) == (2.5, pytest.approx(0.5))
    assert (result.best.names, result.best.error) == (("random 1",), 0.0)
    assert result.ratio == 1.25
    assert result.correlation == pytest.approx(-1.0)
    assert result.prediction_error == pytest.approx((0.6 + 0.5) / 2)
    assert summarize(PLANS["short"], runs[2:], "short") is None  # without the searched plan


def test_drift_compares_rounds_of_the_same_plan() -> None:
    assert drift([measured("d4", (9.0, 2.0), 1), measured("d4", (9.0, 1.0), 0), measured("t4", (9.0, 7.0), 0)]) == 2.0
    assert drift([measured("t4", (9.0, 7.0))]) == 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20, unique=True))
def test_rank_correlation_depends_on_order_only(values: list[float]) -> None:
    order = [float(sorted(values).index(value)) for value in values]
    assert spearman(values, order) == pytest.approx(1.0)
    assert spearman(values, [-rank for rank in order]) == pytest.approx(-1.0)


def test_rank_correlation_of_equal_values() -> None:
    # ranks 0.5 0.5 2 3 and 0 1 2 3: covariance 4.5 / sqrt(4.5 * 5)
    assert spearman([1.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1.0, 1.0], [1.0, 2.0]))
