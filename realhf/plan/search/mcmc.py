"""A Metropolis-Hastings chain over choices (Metropolis et al., 1953); ``csrc/planner/mcmc.cpp`` is equivalent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

from realhf.plan.search.problem import Choice, Problem

P_EXTRA_MUTATION = 0.25  # probability that a proposal changes one more MFC
MASK = (1 << 64) - 1


@dataclass
class SplitMix64:
    """The random number generator SplitMix64 (Steele, Lea and Flood, 2014)."""

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
        return tuple(self.next() % len(options) for options in problem.table)


@dataclass
class Chain:
    """The state of a chain, and the best choice it has visited."""

    rng: SplitMix64
    choice: Choice
    value: float
    best: Choice
    best_value: float

    @staticmethod
    def start(rng: SplitMix64, choice: Choice, value: float) -> "Chain":
        return Chain(rng, choice, value, choice, value)


def run_chain(
    objective: Callable[[Choice], float], n_options: Sequence[int], chain: Chain, n: int, temperature: float
) -> None:
    """Make ``n`` proposals, which are accepted with probability ``exp(-increase / (temperature * best value))``."""
    free = [mfc for mfc, size in enumerate(n_options) if size > 1]
    for _ in range(n if free else 0):
        candidate = _propose(chain.rng, chain.choice, free, n_options)
        value = objective(candidate)
        increase, scale = value - chain.value, temperature * chain.best_value
        if increase > 0 and (not scale or chain.rng.uniform() >= exp(-increase / scale)):
            continue
        chain.choice, chain.value = candidate, value
        if value < chain.best_value:
            chain.best, chain.best_value = candidate, value


def _propose(rng: SplitMix64, choice: Choice, free: Sequence[int], n_options: Sequence[int]) -> Choice:
    """Change the option of one MFC, and of further ones with probability ``P_EXTRA_MUTATION`` each."""
    candidate = list(choice)
    while True:
        mfc = free[rng.next() % len(free)]
        candidate[mfc] = (candidate[mfc] + 1 + rng.next() % (n_options[mfc] - 1)) % n_options[mfc]
        if rng.uniform() >= P_EXTRA_MUTATION:
            return tuple(candidate)
