"""One chain of Metropolis-Hastings over the choices of a problem (Metropolis et al., 1953).

``csrc/planner/walk.cpp`` takes the same steps, bit for bit.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import exp
from typing import Protocol

from realhf.plan.search.evaluate import evaluate, objective
from realhf.plan.search.problem import Choice, Problem

P_EXTRA_MUTATION = 0.25
"""Share of proposals that change one more MFC."""
MASK = (1 << 64) - 1


@dataclass
class SplitMix64:
    """Random numbers: SplitMix64 (Steele, Lea and Flood, 2014)."""

    state: int

    def next(self) -> int:
        """Return 64 random bits."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = ((self.state ^ (self.state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def uniform(self) -> float:
        """Return a number 0 <= x < 1."""
        return (self.next() >> 11) * 2.0**-53

    def random_choice(self, problem: Problem) -> Choice:
        """Return any option of every MFC."""
        return tuple(self.next() % len(options) for options in problem.table)


@dataclass
class Chain:
    """Where a chain stands, and the best that it has seen."""

    rng: SplitMix64
    choice: Choice
    value: float
    best: Choice
    best_value: float

    @staticmethod
    def start(dice: SplitMix64, choice: Choice, value: float) -> "Chain":
        return Chain(dice, choice, value, choice, value)


class Evaluator(Protocol):
    """Who evaluates choices and walks among them: Python, or C++ where it was built."""

    def evaluate(self, choice: Choice) -> tuple[float, float]:
        """Return seconds per step and the bytes of the fullest worker."""

    def run_chain(self, walker: Chain, n: int, temperature: float) -> None:
        """Make ``n`` proposals; what is worse by ``temperature`` times the best is taken in one of e cases."""


class PythonEvaluator:
    """The definition. What was evaluated lately is remembered."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._evaluate = lru_cache(1 << 16)(lambda choice: evaluate(problem, choice))

    def evaluate(self, choice: Choice) -> tuple[float, float]:
        return self._evaluate(choice)

    def run_chain(self, walker: Chain, n: int, temperature: float) -> None:
        sizes = [len(options) for options in self.problem.table]
        free = [mfc for mfc, size in enumerate(sizes) if size > 1]
        for _ in range(n if free else 0):
            candidate = _propose(walker.rng, walker.choice, free, sizes)
            value = objective(self.problem, *self.evaluate(candidate))
            worse, scale = value - walker.value, temperature * walker.best_value
            if worse > 0 and (not scale or walker.rng.uniform() >= exp(-worse / scale)):
                continue
            walker.choice, walker.value = candidate, value
            if value < walker.best_value:
                walker.best, walker.best_value = candidate, value


def _propose(dice: SplitMix64, choice: Choice, free: list[int], sizes: list[int]) -> Choice:
    """Give one MFC another option, and with some luck one more."""
    candidate = list(choice)
    while True:
        mfc = free[dice.next() % len(free)]
        candidate[mfc] = (candidate[mfc] + 1 + dice.next() % (sizes[mfc] - 1)) % sizes[mfc]
        if dice.uniform() >= P_EXTRA_MUTATION:
            return tuple(candidate)
