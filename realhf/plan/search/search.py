"""The best choice of a problem that a seeded search finds: never worse than any choice that it starts from."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import objective
from realhf.plan.search.mcmc import Chain, SplitMix64
from realhf.plan.search.problem import Choice, LayoutOption, Problem

HOT, COLD = 0.1, 0.001
"""First and last temperature: what takes longer than the best by this share of it is accepted in one of e cases."""
MAX_EVALUATIONS_PER_OPTION = 1000
"""Evaluations for each option of the problem, where no budget is given."""
ROUNDS = 40
"""The temperature falls from round to round."""
PATIENCE = 10
"""Rounds without a gain after which chains that agree stop."""
PROPOSALS_PER_CHECK = 256
"""Evaluations between two looks at the clock."""


class StopReason(Enum):
    """Why a search ended. By the clock: the result depends on the machine; else on problem, starts and seed alone."""

    AGREED = "agreed"
    BUDGET = "budget"
    CLOCK = "clock"


@dataclass(frozen=True)
class SearchResult:
    """The best choice, its seconds per step and peak bytes; ``history`` has (evaluations, objective) of every gain."""

    choice: Choice
    seconds: float
    peak: float
    fits: bool
    history: tuple[tuple[int, float], ...]
    n_evaluated: int
    stop: StopReason


def search(
    problem: Problem,
    starts: Sequence[Choice] = (),
    seed: int = 1,
    budget: int | None = None,
    budget_s: float = inf,
    chains: int = 4,
) -> SearchResult:
    """Return the best choice found within ``budget`` evaluations, or ``budget_s`` seconds where those are over earlier.

    From ``starts``, the fastest options and random choices: coordinate descent, then chains of Metropolis-Hastings that
    cool down from round to round until they agree, then descent again. (ReaL, section 5, walks at one temperature.)
    """
    if budget is None:
        budget = MAX_EVALUATIONS_PER_OPTION * sum(len(options) for options in problem.table)
    found = _Search(problem, budget, time.monotonic() + budget_s)
    dice = [SplitMix64(seed * (chains + 1) + i) for i in range(chains)]
    try:
        ends = found.descend_all([*starts, greedy(problem), *(d.random_choice(problem) for d in dice)])
        stop = found.walk([Chain.start(d, *ends[i % len(ends)]) for i, d in enumerate(dice)])
        found.descend(found.best, found.best_value)
    except _BudgetExhausted as over:
        stop = over.stop
    seconds, peak = found.evaluator.evaluate(found.best)
    fits = peak <= problem.capacity
    return SearchResult(found.best, seconds, peak, fits, tuple(found.history), found.n_evaluated, stop)


def greedy(problem: Problem) -> Choice:
    """Return the option of every MFC that is fastest among those that fit while nothing else is there."""
    return tuple(min(range(len(some)), key=[_rank(problem, o) for o in some].__getitem__) for some in problem.table)


def _rank(problem: Problem, option: LayoutOption) -> tuple[bool, float]:
    return option.transient + option.resident > problem.capacity, option.transfer.seconds + option.compute.seconds


class _BudgetExhausted(Exception):
    def __init__(self, stop: StopReason) -> None:
        self.stop = stop


class _Search:
    """What has been evaluated, and the best of it."""

    def __init__(self, problem: Problem, budget: int, deadline: float) -> None:
        self.problem, self.budget, self.deadline = problem, budget, deadline
        self.evaluator = evaluator(problem)
        self.best: Choice = ()
        self.best_value = inf
        self.n_evaluated = 0
        self.history: list[tuple[int, float]] = []

    def descend_all(self, starts: Sequence[Choice]) -> list[tuple[Choice, float]]:
        """Return the ends of descents from every start, best first."""
        known = [(start, self._value(start)) for start in dict.fromkeys(starts)]
        ends = dict(self.descend(start, value) for start, value in sorted(known, key=lambda k: k[1]))
        return sorted(ends.items(), key=lambda end: end[1])

    def descend(self, choice: Choice, value: float) -> tuple[Choice, float]:
        """Change one MFC at a time as long as that helps."""
        settled = 0
        mfc = 0
        while settled < len(choice):
            settled += 1
            for option in range(len(self.problem.table[mfc])):
                candidate = (*choice[:mfc], option, *choice[mfc + 1 :])
                if candidate != choice:
                    self._spend()
                    new = self._value(candidate)
                    if new < value:
                        choice, value, settled = candidate, new, 1
            mfc = (mfc + 1) % len(choice)
        return choice, value

    def walk(self, walkers: Sequence[Chain]) -> StopReason:
        """Walk round after round; say whether the chains agreed or the budget was spent."""
        length = (self.budget - self.n_evaluated) // (ROUNDS * len(walkers))
        quiet = 0
        for number in range(ROUNDS if length else 0):
            temperature = HOT * (COLD / HOT) ** (number / (ROUNDS - 1))
            before = self.best_value
            for walker in walkers:
                for start in range(0, length, PROPOSALS_PER_CHECK):
                    n = min(PROPOSALS_PER_CHECK, length - start)
                    self._spend(0)
                    self.evaluator.run_chain(walker, n, temperature)
                    self.n_evaluated += n
                    self._note(walker.best, walker.best_value)
            quiet = 0 if self.best_value < before else quiet + 1
            if quiet >= PATIENCE and all(w.best_value == self.best_value for w in walkers):
                return StopReason.AGREED
        return StopReason.BUDGET

    def _value(self, choice: Choice) -> float:
        value = objective(self.problem, *self.evaluator.evaluate(choice))
        self.n_evaluated += 1
        self._note(choice, value)
        return value

    def _spend(self, n: int = 1) -> None:
        if self.n_evaluated + n > self.budget:
            raise _BudgetExhausted(StopReason.BUDGET)
        if time.monotonic() > self.deadline:
            raise _BudgetExhausted(StopReason.CLOCK)

    def _note(self, choice: Choice, value: float) -> None:
        if value < self.best_value:
            self.best, self.best_value = choice, value
            self.history.append((self.n_evaluated, value))
