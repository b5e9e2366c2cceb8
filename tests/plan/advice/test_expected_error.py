"""Errors of steps from errors of their parts: worked examples, and limits that hold for every machine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.machine import ExpectedErrors
from realhf.plan.advice.expected_error import (
    difference_error,
    margin_text,
    measured_errors,
    seconds_by_kind,
    seconds_error,
)
from realhf.plan.machines.profile import Fit, Point, Profile, ProfiledMachine
from tests.plan.search.planners import TOY, ppo_planner

ERRORS = ExpectedErrors(compute=0.1, decoding=0.2, links=0.3, memory=0.05)
SECONDS = st.fixed_dictionaries({kind: st.floats(0, 100) for kind in ("compute", "decoding", "links")})


def test_errors_of_different_kinds_are_independent() -> None:
    assert seconds_error({"compute": 30.0, "decoding": 20.0, "links": 0.0}, ERRORS) == pytest.approx(5.0)


def test_part_of_the_error_is_common_to_two_plans() -> None:
    first, second = {"compute": 10.0, "decoding": 0.0, "links": 0.0}, {"compute": 10.0, "decoding": 0.0, "links": 0.0}
    assert difference_error(first, second, ERRORS) == pytest.approx(1.0)  # of 1.41 if they were independent
    assert difference_error(first, dict.fromkeys(first, 0.0), ERRORS) == pytest.approx(1.0)


@given(SECONDS, SECONDS)
def test_a_difference_is_known_better_than_both_plans_alone(first: dict, second: dict) -> None:
    both = seconds_error(first, ERRORS) ** 2 + seconds_error(second, ERRORS) ** 2
    assert 0 <= difference_error(first, second, ERRORS) ** 2 <= both * (1 + 1e-9)
    assert difference_error(first, second, ERRORS) == pytest.approx(difference_error(second, first, ERRORS))


def test_kinds_of_work_on_the_critical_path() -> None:
    planner = ppo_planner(4, replace(TOY, call=0.0))
    prediction = planner.predict(planner.by_heuristic("symmetric"))
    seconds = seconds_by_kind(prediction.timeline, planner.graph)
    assert sum(seconds.values()) == pytest.approx(prediction.seconds)
    assert seconds["decoding"] > 0 and seconds["compute"] > 0
    compute, _ = prediction.call_seconds["actor_gen"]
    assert seconds["decoding"] == pytest.approx(compute, rel=0.01)


def test_the_memory_margin_names_its_cause() -> None:
    assert margin_text(replace(TOY, errors=ERRORS)) == "5% free for the expected error of 5%"
    assert margin_text(replace(TOY, errors=ERRORS, memory_reserve_fraction=0.2)) == "20% free"


def test_a_profile_gives_the_errors_of_what_it_measured() -> None:
    exact = Fit({"tokens": 1.0}, tuple(Point({"tokens": float(n)}, float(n), float(n), float(n), 3) for n in (1, 2, 4)))
    profile = Profile(ProfiledMachine("cpu", "here", 1, 1, "2"), 1.0, {"SHAPE/t1/train": exact})
    found = measured_errors(profile, ERRORS)
    assert found == replace(ERRORS, compute=pytest.approx(0.05))
