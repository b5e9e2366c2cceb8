"""A seeded search for the best choice of a problem. The result is never worse than any of the starting points."""

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from statistics import mean

from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import objective
from realhf.plan.search.mcmc import Chain, SplitMix64
from realhf.plan.search.problem import Choice, LayoutOption, Problem

HOT, COLD = 0.1, 0.001  # first and last temperature, relative to the best value
MAX_EVALUATIONS_PER_OPTION = 1000  # default budget
N_CHAINS = 4
N_ROUNDS = 40  # the temperature decreases from round to round
PATIENCE = 10  # rounds without improvement after which the search stops if all chains agree
N_LEADERS = 16
PROPOSALS_PER_CHECK = 256  # between two checks of the clock


class StopReason(Enum):
    """Why a search ended. Unless it is the clock, the result depends only on the problem, the starts and the seed."""

    AGREED = "agreed"
    BUDGET = "budget"
    CLOCK = "clock"


@dataclass(frozen=True)
class SearchResult:
    """The best choice, its seconds per step and peak bytes; ``history`` has (evaluations, objective) improvements.

    ``leaders`` are the best distinct choices, the best one first.
    """

    choice: Choice
    seconds: float
    peak: float
    fits: bool
    history: tuple[tuple[int, float], ...]
    n_evaluated: int
    stop: StopReason
    leaders: tuple[Choice, ...]


def search(
    problem: Problem, starts: Sequence[Choice] = (), seed: int = 1, budget: int | None = None, budget_s: float = inf
) -> SearchResult:
    """Return the best choice found within ``budget`` evaluations and ``budget_s`` seconds.

    Coordinate descent from ``starts``, the fastest options and random choices is followed by simulated annealing with
    several Metropolis-Hastings chains until they agree, and a final descent. (ReaL, section 5, uses one temperature.)
    """
    if budget is None:
        budget = MAX_EVALUATIONS_PER_OPTION * sum(len(options) for options in problem.table)
    state = _Search(problem, budget, time.monotonic() + budget_s)
    rngs = [SplitMix64(seed * (N_CHAINS + 1) + i) for i in range(N_CHAINS)]
    try:
        minima = state.descend_all([*starts, greedy(problem), *(rng.random_choice(problem) for rng in rngs)])
        stop = state.anneal([Chain.start(rng, *minima[i % len(minima)]) for i, rng in enumerate(rngs)])
        state.descend(state.best, state.best_value)
    except _BudgetExhausted as exhausted:
        stop = exhausted.stop
    seconds, peak = state.evaluator.evaluate(state.best)
    fits = peak <= problem.capacity
    leaders = tuple(choice for _, choice in state.leaders)
    return SearchResult(state.best, seconds, peak, fits, tuple(state.history), state.n_evaluated, stop, leaders)


def greedy(problem: Problem) -> Choice:
    """Return, for every MFC, the fastest option that fits on its own."""

    def rank(option: LayoutOption) -> tuple[bool, float]:
        seconds = option.transfer.seconds + mean(cost.seconds for cost in option.compute)
        return option.transient + option.resident > problem.capacity, seconds

    return tuple(min(range(len(some)), key=[rank(o) for o in some].__getitem__) for some in problem.table)


class _BudgetExhausted(Exception):
    def __init__(self, stop: StopReason) -> None:
        self.stop = stop


class _Search:
    def __init__(self, problem: Problem, budget: int, deadline: float) -> None:
        self.problem, self.budget, self.deadline = problem, budget, deadline
        self.evaluator = evaluator(problem)
        self.best: Choice = ()
        self.best_value = inf
        self.n_evaluated = 0
        self.history: list[tuple[int, float]] = []
        self.leaders: list[tuple[float, Choice]] = []  # ascending, at most N_LEADERS

    def descend_all(self, starts: Sequence[Choice]) -> list[tuple[Choice, float]]:
        """Return the local minima reached from all starts, best first."""
        known = [(start, self._value(start)) for start in dict.fromkeys(starts)]
        minima = dict(self.descend(start, value) for start, value in sorted(known, key=lambda k: k[1]))
        return sorted(minima.items(), key=lambda minimum: minimum[1])

    def descend(self, choice: Choice, value: float) -> tuple[Choice, float]:
        """Change one MFC at a time until no change helps."""
        n_settled = mfc = 0
        while n_settled < len(choice):
            n_settled += 1
            for option in range(len(self.problem.table[mfc])):
                candidate = (*choice[:mfc], option, *choice[mfc + 1 :])
                if candidate != choice:
                    self._check_budget()
                    new = self._value(candidate)
                    if new < value:
                        choice, value, n_settled = candidate, new, 1
            mfc = (mfc + 1) % len(choice)
        return choice, value

    def anneal(self, chains: Sequence[Chain]) -> StopReason:
        """Run the chains with decreasing temperature until they agree or the budget is spent."""
        length = (self.budget - self.n_evaluated) // (N_ROUNDS * len(chains))
        n_unchanged = 0
        for number in range(N_ROUNDS if length else 0):
            temperature = HOT * (COLD / HOT) ** (number / (N_ROUNDS - 1))
            before = self.best_value
            for chain in chains:
                for start in range(0, length, PROPOSALS_PER_CHECK):
                    n = min(PROPOSALS_PER_CHECK, length - start)
                    self._check_budget(0)
                    self.evaluator.run_chain(chain, n, temperature)
                    self.n_evaluated += n
                    self._record(chain.best, chain.best_value)
            n_unchanged = 0 if self.best_value < before else n_unchanged + 1
            if n_unchanged >= PATIENCE and all(chain.best_value == self.best_value for chain in chains):
                return StopReason.AGREED
        return StopReason.BUDGET

    def _value(self, choice: Choice) -> float:
        value = objective(self.problem, *self.evaluator.evaluate(choice))
        self.n_evaluated += 1
        self._record(choice, value)
        return value

    def _check_budget(self, n: int = 1) -> None:
        if self.n_evaluated + n > self.budget:
            raise _BudgetExhausted(StopReason.BUDGET)
        if time.monotonic() > self.deadline:
            raise _BudgetExhausted(StopReason.CLOCK)

    def _record(self, choice: Choice, value: float) -> None:
        if value < self.best_value:
            self.best, self.best_value = choice, value
            self.history.append((self.n_evaluated, value))
        entry = value, choice
        if (len(self.leaders) < N_LEADERS or entry < self.leaders[-1]) and entry not in self.leaders:
            insort(self.leaders, entry)
            del self.leaders[N_LEADERS:]
