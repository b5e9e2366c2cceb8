"""Names of points, dates and times in several notations."""

import calendar
import datetime
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from realhf.rewards.math.equality import same_answer
from tests.scaling import examples


@given(st.text("ABCDEFGPQR", min_size=2, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=examples(100))
def test_the_order_of_letters_matters(letters: str, random) -> None:
    other = "".join(random.sample(letters, len(letters)))
    assert same_answer(other, letters) is same_answer(rf"\text{{{other}}}", letters) is (other == letters)


@pytest.mark.parametrize("mark", [r"\overline", r"\angle"])
def test_segments_and_angles_may_be_reversed(mark: str) -> None:
    for letters in itertools.permutations("ABC", 2 if mark == r"\overline" else 3):
        name = "".join(letters)
        assert same_answer(f"{mark}{{{name}}}", f"{mark} {{{name[::-1]}}}")
        assert not same_answer(f"{mark}{{{name}}}", f"{mark}{{{name[1:] + name[0]}Z}}")
    assert not same_answer(r"\angle ABC", r"\angle BAC") and not same_answer(r"\angle AB", r"\overline{AB}")


days = st.dates(datetime.date(1900, 1, 1), datetime.date(2099, 12, 31))


def date_forms(day: datetime.date, with_year: bool) -> list[str]:
    month, year = calendar.month_name[day.month], f", {day.year}" if with_year else ""
    ordinal = "th" if 4 <= day.day <= 20 or 24 <= day.day <= 30 else ["st", "nd", "rd"][day.day % 10 - 1]
    return [
        rf"\text{{{month} {day.day}{year}}}",
        f"{day.day} {month}{year}",
        f"{month[:3]}. {day.day}{ordinal}{year}",
        rf"{day.day}\text{{ {month}}}{year}",
    ]


@given(days, days, st.booleans(), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=examples(150))
def test_dates(a: datetime.date, b: datetime.date, with_year: bool, form: int, gold_form: int) -> None:
    same = a == b if with_year else (a.month, a.day) == (b.month, b.day)
    assert same_answer(date_forms(a, with_year)[form], date_forms(a, with_year)[gold_form])
    assert same_answer(date_forms(a, with_year)[form], date_forms(b, with_year)[gold_form]) is same


def test_words_that_begin_like_months() -> None:
    assert same_answer("3", r"3\text{ marbles}") and not same_answer(r"3\text{ marbles}", r"4\text{ marbles}")


def time_forms(hour: int, minute: int) -> list[str]:
    half, shown = ("a", "p")[hour // 12], (hour + 11) % 12 + 1
    forms = [rf"{shown}:{minute:02d}\text{{ {half}.m.}}", f"{shown}:{minute:02d} {half.upper()}M"]
    if minute == 0:
        forms += [rf"{shown}\text{{ {half}m}}"]
        forms += {12: [r"12\text{ noon}", "12:00 noon"], 0: [r"12:00\text{ midnight}"]}.get(hour, [])
    return forms


@given(st.integers(0, 23), st.integers(0, 23), st.sampled_from([0, 0, 5, 30]), st.sampled_from([0, 0, 5, 30]))
@settings(max_examples=examples(100))
def test_times(hour: int, other: int, minute: int, other_minute: int) -> None:
    assume(minute or other_minute or hour != other)
    for a in time_forms(hour, minute):
        assert all(same_answer(a, b) for b in time_forms(hour, minute) if ":" in a + b)
        assert not any(same_answer(a, b) for b in time_forms(other, other_minute)) or (hour, minute) == (
            other,
            other_minute,
        )
