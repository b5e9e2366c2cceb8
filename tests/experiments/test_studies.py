"""Verdicts, tables and figures of the registered studies, from results that were made up."""

import re
from collections.abc import Callable
from importlib import import_module
from itertools import product
from typing import Any

import pytest
from matplotlib.figure import Figure

from experiments.all import studies
from experiments.studies import Outcome, Results, Study, mean_and_error, verdict_of
from experiments.sums import training_part

N = 5


def study_of(name: str) -> Study:
    found: Study = import_module(f"experiments.{name}.study").STUDY
    return found


def constants(name: str) -> Any:
    return import_module(f"experiments.{name}.study")


def spread(value: float, **others: float) -> list[dict[str, float]]:
    """Return a row per seed with a small error of ``accuracy``."""
    return [{"accuracy": value + 0.001 * i, **others} for i in range(N)]


def kl_results(holds: bool) -> Results:
    own = constants("kl")
    cases = [own.FREE, *(f"{p}/{e}/{b}" for p, e, b in product(own.PLACES, own.ESTIMATORS, own.BETAS))]
    sums = {case: spread(0.5, kl=20.0 if holds and case == "loss/k1/1.0" else 1.0) for case in cases}
    places = [f"{p}/{e}" for p, e in product(own.PLACES, own.ESTIMATORS)]
    biases = {case: [{"bias": 0.0 if holds and case == "reward/k1" else 1.0, "cosine": 0.5}] * N for case in places}
    optima = {f"{case}/{beta}": [{"kl": 1.0}] * N for case in places for beta in own.BETAS}
    return {"sums": sums, "biases": biases, "optima": optima,
            "best": {f"{beta}": [{"kl": 1.0 if holds else 2.0}] * N for beta in own.BETAS}}  # fmt: skip


def restem_results(holds: bool) -> Results:
    many, few = (
        ((0.5, 0.6, 0.65, 0.66), (0.4, 0.5, 0.4, 0.39)) if holds else ((0.2, 0.3, 0.4, 0.6), (0.3, 0.4, 0.5, 0.6))
    )
    rounds = [[[{"accuracy": value + 0.001 * i, "kept": 9, "share": 0.5} for value in values] for i in range(N)]
              for values in (many, few)]  # fmt: skip
    return {"start": 0.25, "rounds": dict(zip(constants("restem").CASES, rounds, strict=True))}


def staleness_results(holds: bool) -> Results:
    own, found = constants("staleness"), {}
    for loss, k in product(own.LOSSES, own.STALENESS):
        accuracy = 0.2 if k and holds is (loss == "coupled") else 0.6
        found[f"{loss}/{k}"] = spread(accuracy, step_s=0.5 if holds and k else 1.0, tokens=1000.0)
    return {"runs": found}


def layouts_results(holds: bool) -> Results:
    own = constants("layouts")
    one = {"weights": 1e-5 if holds else 0.1, "different": [0 if holds else 9] * own.STEPS, "accuracy": 0.5}
    return {"layouts": {case: [one] * N for case in own.LAYOUTS if case != "d1"}}


def vineppo_results(holds: bool) -> Results:
    """Without an algorithm that reaches the target, none is faster."""
    own, runs = constants("vineppo"), {}
    for name, steps in own.STEPS.items():
        best = 0.9 if holds else 0.3
        runs[name] = [[{"step": step, "seconds": float(step), "accuracy": best * step / steps}
                       for step in range(0, steps + 1, own.EVAL_EVERY)] for _ in range(N)]  # fmt: skip
    mc = 0.8 if holds else 0.5
    return {"runs": runs, "values": [{"chance": 0.3, "critic": 0.5, "monte_carlo": mc, "n_states": 200}] * N}


def dpo_results(holds: bool) -> Results:
    masses = {"DPO, tabular": 0.0, "DPO, shared": 0.95, "PPO, tabular": 0.0, "PPO, shared": 0.01}
    values = {"start": 0.2, "DPO": 0.3, "iterative DPO": 0.4, "PPO": 0.5}
    if not holds:
        masses, values = dict.fromkeys(masses, 0.5), dict.fromkeys(values, 0.3)
    sums = [{name: value + 0.001 * i for name, value in values.items()} for i in range(N)]
    return {"toy": {name: [value] * N for name, value in masses.items()}, "sums": sums}


def reward_results(holds: bool) -> Results:
    own, runs = constants("reward_design"), {}
    for case in own.REWARDS:
        is_naive = case == "success, PRM"
        grows, last = holds and is_naive, 0.2 if is_naive is holds else 0.8
        lengths = [30.0 if not grows or step < 50 else 120.0 for step in range(own.STEPS)]
        runs[case] = [{"accuracy": [0.2] * 5 + [last + 0.001 * i], "length": lengths} for i in range(N)]
    if not holds:
        runs["success"] = [{**one, "accuracy": [0.2] * 5 + [0.9]} for one in runs["success"]]
        runs["success, PRM"] = [{**one, "accuracy": [0.2] * 5 + [0.95]} for one in runs["success, PRM"]]
        runs["success, PRM, Clip"] = [{**one, "accuracy": [0.1] * 6} for one in runs["success, PRM, Clip"]]
    return {"runs": runs}


def algorithms_results(holds: bool) -> Results:
    own, curves = constants("algorithms"), {}
    for i, name in enumerate(own.STEPS):
        ends = [0.2 + (0.4 if holds else -0.1 + 0.15 * i) + 0.001 * seed for seed in range(N)]
        ends = [0.1 if not holds and name == "ppo-math" else end for end in ends]
        curves[name] = [[(0.0, 0.2), (own.TOKENS * 0.9, end), (own.TOKENS * 1.1, end)] for end in ends]
    return {"curves": curves}


def code_results(holds: bool) -> Results:
    own, runs = constants("ppo_code"), {}
    for method in own.METHODS:
        end = 0.2 + (0.2 if holds else -0.05) * len(method)
        runs[own.label(method)] = [
            {"tokens": [0.0, 1.1 * own.TOKENS], "passed": [0.1, end + 0.001 * i]} for i in range(N)
        ]
    return {"runs": runs}


def srl_results(holds: bool) -> Results:
    own, runs = constants("srl"), {}
    for workers, ring in product(own.WORKERS, own.RINGS):
        seconds = 8.0 / workers / ring if holds else 8.0
        runs[f"{workers}/{ring}"] = [{"seconds": seconds, "predicted": seconds if holds else 2 * seconds}] * N
    speeds = [float(n) if holds else 1.0 for n in own.CLUSTER]
    return {"runs": runs, "simulated": {f"{ring}": speeds for ring in own.SIMULATED_RINGS}}


def precision_results(holds: bool) -> Results:
    """Without equal curves, those of bfloat16 are lower."""
    own, n = constants("precision"), constants("precision").STEPS // constants("precision").EVAL_EVERY + 1
    curves = {name: [[0.5 + 0.01 * i - (0.3 if not holds and name == "bfloat16" else 0.0)] * n
                     for i in range(len(own.SEEDS))] for name in own.TYPES}  # fmt: skip
    return {"curves": curves}


def ensemble_results(holds: bool) -> Results:
    """Gold scores of one reward model fall after a peak, or those of ensembles do."""
    own, groups = constants("rm_ensemble"), constants("rm_ensemble").GROUPS
    falling, rising = (0.5, 0.05), (-0.2, 0.1)
    ends = {name: falling if holds is (name == "single") else rising for name in own.OBJECTIVES}
    peaks = [(0.1 * min(i, 5), 0.05) for i in range(len(own.GRID))]
    bon = {
        "curves": {group: dict.fromkeys(own.OBJECTIVES, peaks) for group in groups}, "best": peaks,
        "drops": dict.fromkeys(groups, ends), "members": {group: [0.1 * k for k in range(5)] for group in groups},
        "own_gain": dict.fromkeys(own.ENSEMBLES, (0.2 if holds else 0.0, 0.1)),
        "correlations": {group: {"gold": 0.4, "members": 0.8, "errors": 0.7} for group in groups},
    }  # fmt: skip
    runs = {}
    for name, kl in product(own.OBJECTIVES, own.KL):
        last = 0.2 if holds is (name == "single") else 0.9
        gold = [[0.0, *[0.8 + 0.001 * seed] * (len(own.READ) - 2), last] for seed in range(N)]
        runs[f"{name}, KL {kl:g}"] = [{"gold": some, "proxy": some, "kl": some} for some in gold]
    return {"bon": bon, "ppo": runs, "accuracies": {name: [0.6, 0.7] for name in ("gold", *groups)}}


MADE: dict[str, Callable[[bool], Results]] = {
    "algorithms": algorithms_results, "dpo_vs_ppo": dpo_results, "kl": kl_results, "layouts": layouts_results,
    "ppo_code": code_results, "precision": precision_results, "restem": restem_results,
    "reward_design": reward_results, "rm_ensemble": ensemble_results, "srl": srl_results,
    "staleness": staleness_results, "vineppo": vineppo_results,
}  # fmt: skip


def test_every_study_is_here() -> None:
    assert studies() == sorted(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_verdict_follows_from_the_results(name: str) -> None:
    verdicts = {holds: study_of(name).verdict(MADE[name](holds)) for holds in (True, False)}
    assert verdicts[True].outcome is Outcome.REPRODUCED, verdicts[True]
    assert verdicts[False].outcome is Outcome.NOT, verdicts[False]
    assert verdicts[True].figures != verdicts[False].figures


@pytest.mark.parametrize("name", MADE)
def test_a_study_writes_a_table_and_a_labelled_figure(name: str) -> None:
    study, figure = study_of(name), Figure(figsize=study_of(name).size)
    results = MADE[name](True)
    lines = [line for line in study.table(results).splitlines() if line.startswith("|")]
    assert len(lines) > 3 and not re.search(r"\bnan\b", "\n".join(lines))
    study.draw(results, figure)
    assert figure.axes and all(panel.get_ylabel() or panel.get_yticklabels() for panel in figure.axes)
    assert all(panel.get_xlabel() or any(tick.get_text() for tick in panel.get_xticklabels()) for panel in figure.axes)
    figure.canvas.draw()


def test_means_errors_and_outcomes() -> None:
    assert mean_and_error([1.0, 3.0]) == (2.0, 1.0) and mean_and_error([4.0]) == (4.0, 0.0)
    assert [verdict_of(some, "").outcome for some in ([True, True], [True, False], [False])] == [*Outcome]


def test_parts_of_the_data_go_on_at_the_start(tmp_path) -> None:
    task = tmp_path / "task64"
    task.mkdir()
    (task / "train.jsonl").write_text("".join(f"{i}\n" for i in range(5)))
    assert training_part(tmp_path, "part", 64, 13, 4).read_text().split() == ["3", "4", "0", "1"]
