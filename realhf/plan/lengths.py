"""Distributions of response lengths: their notation, their quantiles, and lengths that represent a step."""

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Protocol

from realhf.base.errors import did_you_mean

DEFAULT_SIGMA = 0.7
"""Spread of the logarithm of lengths of which only the mean is known: one in a hundred is 5 times the median."""
MAX_LENGTHS = 4096
"""Lengths that represent a step of more responses; the longest stands for one response in as many."""
MAX_TOKENS, MAX_SIGMA = 2**31 - 1, 5.0
ORDER_SEED = 26
NORMAL = NormalDist()
NOTATIONS = {"lognormal": "lognormal(MEAN,SIGMA)", "uniform": "uniform(MIN,MAX)", "fixed": "fixed(N)"}
EXAMPLES = {"lognormal": "lognormal(930,0.7)", "uniform": "uniform(100,900)", "fixed": "fixed(512)"}
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?")


class LengthDistribution(Protocol):
    """A distribution of response lengths in tokens. ``str`` returns its notation."""

    def probability(self, length: float) -> float:
        """Return the probability of a length up to ``length``."""

    def integral(self, p: float) -> float:
        """Return the integral of the quantile function from 0 to ``p``; of 1 it is the mean."""


@dataclass(frozen=True)
class LogNormalLengths:
    """Lengths whose logarithm is normally distributed with deviation ``sigma``; ``mean`` is in tokens."""

    mean: float
    sigma: float

    def probability(self, length: float) -> float:
        if length <= 0:
            return 0.0
        return NORMAL.cdf((math.log(length / self.mean) + self.sigma**2 / 2) / self.sigma)

    def integral(self, p: float) -> float:
        if not 0 < p < 1:
            return self.mean if p >= 1 else 0.0
        return self.mean * NORMAL.cdf(NORMAL.inv_cdf(p) - self.sigma)

    def __str__(self) -> str:
        return f"lognormal({_text(self.mean)},{_text(self.sigma)})"


@dataclass(frozen=True)
class UniformLengths:
    """Lengths between ``low`` and ``high``, all equally likely."""

    low: int
    high: int

    def probability(self, length: float) -> float:
        if length >= self.high:
            return 1.0
        return max(0.0, (length - self.low) / (self.high - self.low))

    def integral(self, p: float) -> float:
        return self.low * p + (self.high - self.low) * p * p / 2

    def __str__(self) -> str:
        return f"uniform({self.low},{self.high})"


@dataclass(frozen=True)
class FixedLengths:
    """One length."""

    length: int

    def probability(self, length: float) -> float:
        return float(length >= self.length)

    def integral(self, p: float) -> float:
        return self.length * p

    def __str__(self) -> str:
        return f"fixed({self.length})"


@dataclass(frozen=True)
class MeasuredLengths:
    """The distribution of measured lengths, at least one; ``source`` names their origin."""

    lengths: tuple[int, ...]
    source: str

    @cached_property
    def _sorted(self) -> tuple[int, ...]:
        return tuple(sorted(self.lengths))

    @cached_property
    def _sums(self) -> tuple[int, ...]:
        return tuple(accumulate(self._sorted, initial=0))

    def probability(self, length: float) -> float:
        return bisect_right(self._sorted, length) / len(self.lengths)

    def integral(self, p: float) -> float:
        n = len(self.lengths)
        whole = min(int(p * n), n - 1)
        return (self._sums[whole] + self._sorted[whole] * (p * n - whole)) / n

    def __str__(self) -> str:
        return f"{len(self.lengths):,} lengths of {self.source}"


def default_lengths(mean: float | None, longest: int) -> LengthDistribution:
    """Return the distribution of which only the ``mean`` after clipping at ``longest`` is known.

    It is log-normal with ``DEFAULT_SIGMA``, and its mean before clipping has four digits. Without a smaller mean all
    lengths are the longest.
    """
    if mean is None or mean >= longest:
        return FixedLengths(longest)
    low, high = math.log(max(1.0, mean)), math.log(longest) + 20 * DEFAULT_SIGMA
    for _ in range(60):  # the mean after clipping grows with the mean before it
        middle = (low + high) / 2
        if clipped_mean(LogNormalLengths(math.exp(middle), DEFAULT_SIGMA), longest) < mean:
            low = middle
        else:
            high = middle
    return LogNormalLengths(max(1.0, float(f"{math.exp(low):.4g}")), DEFAULT_SIGMA)


def clipped_mean(lengths: LengthDistribution, longest: int) -> float:
    """Return the mean of lengths of which those above ``longest`` count as ``longest``."""
    return _clipped_integral(lengths, 1.0, longest, lengths.probability(longest))


def representative_lengths(lengths: LengthDistribution, n: int, longest: int) -> tuple[int, ...]:
    """Return ``n`` lengths that represent a step: the means of ``n`` equally likely ranges, clipped at ``longest``.

    Their sum is that of a step on average, and each is about the expected length of its rank in a step (stratified
    sampling). They are in a fixed pseudo-random order, so that the samples of a prompt differ. ``n`` is limited to
    ``MAX_LENGTHS``.
    """
    n, inside = max(1, min(n, MAX_LENGTHS)), lengths.probability(longest)
    integrals = [_clipped_integral(lengths, k / n, longest, inside) for k in range(n + 1)]
    means = [(b - a) * n for a, b in zip(integrals, integrals[1:], strict=False)]
    found = [max(1, min(longest, round(mean))) for mean in means]
    Random(ORDER_SEED).shuffle(found)
    return (found[0],) if len(set(found)) == 1 else tuple(found)


def _clipped_integral(lengths: LengthDistribution, p: float, longest: int, inside: float) -> float:
    """Return ``integral(p)`` of the clipped lengths, of which the fraction ``inside`` is not clipped."""
    return lengths.integral(min(p, inside)) + longest * max(0.0, p - inside)


def describe_lengths(lengths: LengthDistribution, found: Sequence[int], longest: int) -> str:
    """Return one line about assumed response lengths: the distribution, and mean and quantiles of ``found``."""
    ordered = sorted(found)
    median, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, 99 * len(ordered) // 100)]
    if ordered[0] == ordered[-1]:
        return f"{ordered[0]:,} tokens per response ({lengths}, limit {longest:,})"
    return (f"{lengths}, limit {longest:,}: mean {sum(found) / len(found):,.0f} tokens per response, median "
            f"{median:,}, 99 % up to {p99:,}, longest {ordered[-1]:,}")  # fmt: skip


def parse_lengths(text: str) -> LengthDistribution | None:
    """Return the distribution that ``text`` is the notation of; None if it is not of the form ``NAME(...)``.

    Raises ValueError with the nearest valid notation.
    """
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    name, numbers = match[1], [part.strip() for part in match[2].split(",")]
    if name not in NOTATIONS:
        known = ", ".join(NOTATIONS.values())
        raise ValueError(f"unknown distribution {name}; known are {known}{did_you_mean(name, NOTATIONS)}")
    nearest = _nearest(name, [float(part) for part in numbers if _NUMBER.fullmatch(part)])
    n_expected = 1 if name == "fixed" else 2
    are_valid = len(numbers) == n_expected and all(_NUMBER.fullmatch(part) for part in numbers)
    if not are_valid or not _is_same(nearest, [float(part) for part in numbers]):
        raise ValueError(f"expected {NOTATIONS[name]} with {_RULES[name]}  did you mean {nearest} ?")
    return nearest


_RULES = {
    "lognormal": f"a mean of at least 1 token and a deviation of the logarithm above 0, at most {MAX_SIGMA:g};",
    "uniform": "whole numbers of tokens, 1 <= MIN < MAX;",
    "fixed": "a whole number of tokens, at least 1;",
}


def _nearest(name: str, numbers: list[float]) -> LengthDistribution:
    """Return a valid distribution close to the first ``numbers``, completed by those of the example."""
    _, example = EXAMPLES[name].rstrip(")").split("(")
    defaults = [float(part) for part in example.split(",")]
    values = [min(MAX_TOKENS, x) for x in (numbers + defaults[len(numbers) :])]
    if name == "fixed":
        return FixedLengths(_whole(values[0]))
    if name == "uniform":
        low, high = sorted(map(_whole, values[:2]))
        return UniformLengths(min(low, MAX_TOKENS - 1), max(high, min(low, MAX_TOKENS - 1) + 1))
    sigma = min(values[1], MAX_SIGMA)
    return LogNormalLengths(max(1.0, values[0]), sigma if sigma > 0 else DEFAULT_SIGMA)


def _whole(value: float) -> int:
    return max(1, round(value))


def _is_same(lengths: LengthDistribution, numbers: list[float]) -> bool:
    match lengths:
        case FixedLengths(length):
            return [length] == numbers
        case UniformLengths(low, high):
            return [low, high] == numbers
        case LogNormalLengths(mean, sigma):
            return [mean, sigma] == numbers
    return False


def _text(number: float) -> str:
    """Return the shortest text of a number, which is read back as the same number."""
    return str(int(number)) if number == int(number) else repr(number)
