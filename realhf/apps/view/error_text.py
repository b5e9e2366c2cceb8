"""Predictions with their expected errors as text, and whether a measurement agrees with them."""

from realhf.apps.view.report.text import duration_text
from realhf.plan.run_spec import ExpectedPerformance


def with_error(value: str, error: float) -> str:
    """Return a predicted value with its relative error, a standard deviation: ``11 s +- 15%``; 0 is an unknown error.

    The sign is U+00B1.
    """
    if not error:
        return value
    return f"{value} \u00b1 {error:.{0 if error >= 0.01 else 1}%}"


def expected_step_text(expected: ExpectedPerformance) -> str:
    """Return the predicted seconds of a step, or the limit if they are not based on a profile."""
    word = "predicted" if expected.is_measured else "at least"
    return f"{word} {with_error(duration_text(expected.step_s), expected.step_error)}"


def agreement_text(measured: float, expected: ExpectedPerformance) -> str:
    """Compare measured seconds of a step with the prediction: their ratio, and whether they differ by its error.

    A step may be slower than a limit, so that is not a wrong prediction.
    """
    text = f"{duration_text(measured)} ({expected_step_text(expected)})"
    if not expected.step_error or not expected.step_s:
        return text
    difference = measured / expected.step_s - 1
    if not expected.is_measured and difference > expected.step_error:
        return f"{text}: {1 + difference:.2g} times this limit"
    amount = f"{abs(difference):.0%} {'slower' if difference > 0 else 'faster'}"
    where = "within" if abs(difference) <= expected.step_error else "outside"
    return f"{text}: {amount}, {where} the expected error"
