"""Texts of the page."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.apps.view.report.text import clean, duration_text, number_text, shortened, size_text


@given(st.text(st.characters(exclude_categories=())))
def test_clean_texts_can_be_encoded_and_have_no_control_characters(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    assert not any(ord(c) < 32 and c not in "\n\t\r" for c in cleaned) and clean(cleaned) == cleaned


def test_replaced_characters() -> None:
    assert clean("a\x00b\x1b\ud800\x7f\r\nd\u202e\U0001f600") == "a\u2400b\u241b\ufffd\u2421\nd\u202e\U0001f600"


@given(st.text(), st.integers(0, 20))
def test_shortened_texts(text: str, limit: int) -> None:
    kept, n_omitted = shortened(text, limit)
    assert text.startswith(kept) and len(kept) + n_omitted == len(text) and len(kept) <= limit


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.84321, "0.8432"), (-0.5, "-0.5"), (12345.6, "12,346"), (999.99, "1000"), (3e-4, "0.0003"),
     (3.07e-6, "3.07e-06"), (2.5e12, "2.5e+12"), (nan, "NaN"), (inf, "infinite"), (-inf, "-infinite")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "0.0123 s"),
        (99, "99 s"),
        (250, "4 min 10 s"),
        (7500, "2 h 5 min"),
        (200000, "2 d 7 h"),
        (nan, "unknown"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_sizes() -> None:
    assert [size_text(n) for n in (12, 1500, 2.5e6, 8e10)] == ["12 B", "1.5 kB", "2.5 MB", "80 GB"]
