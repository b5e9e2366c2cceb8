"""Distributions of response lengths against closed forms, and their notation."""

import math
import re
from statistics import NormalDist, fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.lengths import (
    DEFAULT_SIGMA,
    MAX_LENGTHS,
    MAX_SIGMA,
    MAX_TOKENS,
    FixedLengths,
    LengthDistribution,
    LogNormalLengths,
    MeasuredLengths,
    UniformLengths,
    clipped_mean,
    default_lengths,
    describe_lengths,
    parse_lengths,
    representative_lengths,
)
from tests.scaling import examples

DISTRIBUTIONS = st.one_of(
    st.builds(LogNormalLengths, st.floats(1, 3000), st.floats(0.01, 2.0)),
    st.builds(FixedLengths, st.integers(1, 4000)),
    st.tuples(st.integers(1, 4000), st.integers(1, 4000))
    .filter(lambda pair: pair[0] != pair[1])
    .map(lambda pair: UniformLengths(min(pair), max(pair))),
    st.lists(st.integers(1, 4000), min_size=1, max_size=50).map(lambda some: MeasuredLengths(tuple(some), "a file")),
)


@settings(max_examples=examples(50))
@given(st.floats(2, 5000), st.floats(0.05, 2.0), st.floats(0.001, 0.999))
def test_log_normal_lengths_have_closed_forms(mean: float, sigma: float, p: float) -> None:
    lengths, median = LogNormalLengths(mean, sigma), mean * math.exp(-(sigma**2) / 2)
    quantile = median * math.exp(sigma * NormalDist().inv_cdf(p))
    assert lengths.probability(median) == pytest.approx(0.5)
    assert lengths.probability(quantile) == pytest.approx(p)
    step = min(p, 1 - p) * 1e-4
    slope = (lengths.integral(p + step) - lengths.integral(p - step)) / (2 * step)
    assert slope == pytest.approx(quantile, rel=1e-4)
    assert (lengths.integral(0.0), lengths.integral(1.0)) == (0.0, mean)
    assert lengths.probability(0.0) == 0.0


def test_uniform_fixed_and_measured_lengths_have_closed_forms() -> None:
    lengths = UniformLengths(100, 900)
    assert [lengths.probability(n) for n in (50, 100, 300, 900, 1000)] == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert (lengths.integral(1.0), lengths.integral(0.5)) == (500.0, 100 * 0.5 + 800 / 8)
    assert clipped_mean(lengths, 300) == pytest.approx(0.25 * 200 + 0.75 * 300)
    assert (FixedLengths(7).integral(1.0), clipped_mean(FixedLengths(7), 5)) == (7.0, 5.0)
    measured = MeasuredLengths((30, 10, 20, 20), "a run")
    assert [measured.probability(n) for n in (9, 10, 20, 29, 30)] == [0.0, 0.25, 0.75, 0.75, 1.0]
    assert (measured.integral(1.0), measured.integral(0.375)) == (20.0, (10 + 0.5 * 20) / 4)
    assert clipped_mean(measured, 15) == pytest.approx((10 + 3 * 15) / 4)


@settings(max_examples=examples(100))
@given(DISTRIBUTIONS, st.integers(1, 300), st.integers(1, 5000))
def test_representative_lengths_have_the_mean_of_the_clipped_distribution(
    lengths: LengthDistribution, n: int, longest: int
) -> None:
    found = representative_lengths(lengths, n, longest)
    assert len(found) in (1, n) and min(found) >= 1 and max(found) <= longest
    expected = clipped_mean(lengths, longest)
    # rounding moves each by at most a half, and lengths below 1 up to 1
    assert expected - 0.51 <= fmean(found) <= max(expected + 0.51, 1.51) + 0.5
    assert found == representative_lengths(lengths, n, longest)


def test_representative_lengths_are_the_means_of_equally_likely_ranges() -> None:
    assert sorted(representative_lengths(UniformLengths(100, 900), 4, 10_000)) == [200, 400, 600, 800]
    assert sorted(representative_lengths(UniformLengths(100, 900), 4, 500)) == [200, 400, 500, 500]
    assert representative_lengths(FixedLengths(50), 8, 64) == (50,)
    found = representative_lengths(LogNormalLengths(930, 0.7), 1000, 100_000)
    sigmas = [math.log(max(found) / 728), math.log(728 / min(found))]  # the median is 930 / exp(0.245)
    assert [sigma / 0.7 for sigma in sigmas] == [pytest.approx(3.3, abs=0.3)] * 2  # expected extremes of 1,000 samples
    assert len(representative_lengths(LogNormalLengths(930, 0.7), 10**6, 100_000)) == MAX_LENGTHS


def test_long_and_short_lengths_are_mixed() -> None:
    found = representative_lengths(UniformLengths(1, 1000), 512, 1000)
    halves = [fmean(found[:256]), fmean(found[256:])]
    assert found != tuple(sorted(found)) and abs(halves[0] - halves[1]) < 100
    assert min(max(found[i : i + 16]) for i in range(0, 512, 16)) > 700


@settings(max_examples=examples(100))
@given(st.floats(1, 3000), st.integers(1, 3000))
def test_a_mean_is_that_of_clipped_log_normal_lengths(mean: float, longest: int) -> None:
    lengths = default_lengths(mean, longest)
    assert clipped_mean(lengths, longest) == pytest.approx(min(mean, longest), rel=1e-3)
    assert isinstance(lengths, FixedLengths) == (mean >= longest)
    assert not isinstance(lengths, LogNormalLengths) or lengths.sigma == DEFAULT_SIGMA


def test_without_a_mean_all_lengths_are_the_longest() -> None:
    assert default_lengths(None, 64) == default_lengths(64, 64) == default_lengths(90.0, 64) == FixedLengths(64)
    assert max(representative_lengths(default_lengths(0.2, 64), 64, 64)) <= 6


NUMBERS = st.one_of(st.integers(1, MAX_TOKENS).map(float), st.floats(1, MAX_TOKENS))


@settings(max_examples=examples(200))
@given(st.one_of(
    st.builds(LogNormalLengths, NUMBERS, st.floats(0, MAX_SIGMA, exclude_min=True)),
    st.builds(FixedLengths, st.integers(1, MAX_TOKENS)),
    st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).map(lambda p: UniformLengths(p[0], p[0] + p[1])),
))  # fmt: skip
def test_the_notation_is_parsed_back(lengths: LengthDistribution) -> None:
    assert parse_lengths(str(lengths)) == lengths
    spaced = str(lengths).replace(",", " , ").replace("(", " ( ")
    assert parse_lengths(f" {spaced} ") == lengths


@settings(max_examples=examples(300))
@given(
    st.sampled_from(["lognormal", "uniform", "fixed"]),
    st.lists(st.one_of(st.floats(-10, 1e12).map(str), st.integers(-3, 10**12).map(str), st.text(max_size=4),
                       st.sampled_from(["nan", "inf", "1e999", "1_000", "", "0", "0.0", "1e3", "+5"])), max_size=4),
)  # fmt: skip
def test_an_invalid_notation_is_answered_with_a_valid_one(name: str, numbers: list[str]) -> None:
    text = f"{name}({','.join(numbers)})"
    try:
        found = parse_lengths(text)
    except ValueError as error:
        nearest = re.search(r"did you mean (\S+) \?", str(error))
        assert nearest and nearest[1].startswith(name)
        assert str(parse_lengths(nearest[1])) == nearest[1]
    else:
        assert found is None or parse_lengths(str(found)) == found


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("lognormal(930)", "lognormal(930,0.7)"),
        ("lognormal(930,-1)", "lognormal(930,0.7)"),
        ("lognormal(930,0)", "lognormal(930,0.7)"),
        ("lognormal(930,0.7,3)", "lognormal(930,0.7)"),
        ("lognormal(0.2,90)", "lognormal(1,5)"),
        ("uniform(900,100)", "uniform(100,900)"),
        ("uniform(5,5)", "uniform(5,6)"),
        ("uniform(1.5,9.2)", "uniform(2,9)"),
        ("fixed(0)", "fixed(1)"),
        ("fixed()", "fixed(512)"),
        ("fixed(2.6)", "fixed(3)"),
    ],
)
def test_messages_have_the_nearest_notation(text: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"did you mean {nearest} ?")):
        parse_lengths(text)


def test_other_texts_are_no_notation() -> None:
    assert parse_lengths("runs/e/t") is None and parse_lengths("930") is None
    with pytest.raises(ValueError, match=re.escape("did you mean lognormal ?")):
        parse_lengths("lognorm(930,0.7)")


def test_lengths_are_described_in_one_line() -> None:
    lengths = UniformLengths(100, 900)
    text = describe_lengths(lengths, representative_lengths(lengths, 4, 500), 500)
    assert text == (
        "uniform(100,900), limit 500: mean 400 tokens per response, median 500, 99 % up to 500, longest 500"
    )
    assert describe_lengths(FixedLengths(64), (64,), 64) == "64 tokens per response (fixed(64), limit 64)"
    assert str(MeasuredLengths((1,) * 5000, "steps 1 to 9 of e/t")) == "5,000 lengths of steps 1 to 9 of e/t"
