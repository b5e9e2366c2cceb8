"""Predictions with their errors, and the comparison of measured steps with them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.apps.view.error_text import agreement_text, expected_step_text, with_error
from realhf.plan.run_spec import ExpectedPerformance

EXPECTED = ExpectedPerformance("the profile p.json", 10.0, {}, 1e9, step_error=0.15)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (0.0, "11 s"),
        (0.15, "11 s \u00b1 15%"),
        (0.0149, "11 s \u00b1 1%"),
        (0.002, "11 s \u00b1 0.2%"),
        (1.5, "11 s \u00b1 150%"),
    ],
)
def test_errors_are_percentages(error: float, text: str) -> None:
    assert with_error("11 s", error) == text


def test_the_measured_step_is_compared_with_the_prediction() -> None:
    assert agreement_text(11.0, EXPECTED) == "11 s (predicted 10 s \u00b1 15%): 10% slower, within the expected error"
    assert agreement_text(8.0, EXPECTED) == "8 s (predicted 10 s \u00b1 15%): 20% faster, outside the expected error"
    limit = replace(EXPECTED, is_measured=False)
    assert expected_step_text(limit) == "at least 10 s \u00b1 15%"
    assert agreement_text(30.0, limit) == "30 s (at least 10 s \u00b1 15%): 3 times this limit"
    assert agreement_text(11.0, limit).endswith(": 10% slower, within the expected error")
    assert agreement_text(8.0, limit).endswith(": 20% faster, outside the expected error")


def test_without_a_known_error_nothing_is_judged() -> None:
    assert agreement_text(11.0, replace(EXPECTED, step_error=0.0)) == "11 s (predicted 10 s)"
    assert agreement_text(11.0, replace(EXPECTED, step_s=0.0)) == "11 s (predicted 0 s \u00b1 15%)"


@given(st.floats(0.01, 1000), st.floats(0.01, 1000), st.floats(0.01, 0.5))
def test_a_step_is_within_the_error_exactly_if_it_is_between_its_ends(
    measured: float, step: float, error: float
) -> None:
    text = agreement_text(measured, replace(EXPECTED, step_s=step, step_error=error))
    low, high = step * (1 - error), step * (1 + error)
    assert ("within" in text) == (low <= measured <= high) or min(abs(measured - low), abs(measured - high)) < 1e-6
    assert "within" in text or "outside" in text
