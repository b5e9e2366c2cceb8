"""The exact optimum of small problems by branch and bound."""

from collections.abc import Sequence
from math import inf

from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import Assignment, objective, peak_bytes
from realhf.plan.search.problem import FREE, Choice, LayoutOption, Problem, ReallocCost
from realhf.plan.search.search import search

Partial = Sequence[int | None]


class PartialAssignment(Assignment):
    """A choice with an option, or None, for every MFC; an MFC without an option costs nothing."""

    def __init__(self, problem: Problem, partial: Partial) -> None:
        super().__init__(problem, tuple(i or 0 for i in partial))
        self.partial = partial
        nothing = LayoutOption(range(0), range(0), (FREE,))
        self.options = [nothing if i is None else o for i, o in zip(partial, self.options, strict=True)]

    def realloc_cost(self, mfc: int) -> ReallocCost | None:
        realloc = super().realloc_cost(mfc)
        is_known = self.partial[mfc] is not None and self.partial[self.problem.deps[mfc].home_mfc] is not None
        return realloc if realloc is None or is_known else ReallocCost()


def branch_and_bound(problem: Problem) -> tuple[Choice, float]:
    """Return a choice with the smallest objective, and the objective.

    ``lower_bound`` is loose by up to a factor of two, so this is only feasible for small problems.
    """
    plans = evaluator(problem)
    best = search(problem).choice
    value = objective(problem, *plans.evaluate(best))
    order = sorted(range(len(best)), key=lambda mfc: (problem.deps[mfc].home_mfc != mfc, -_least(problem, mfc)))
    stack: list[Partial] = [[None] * len(best)]
    while stack:
        partial = stack.pop()
        mfc = next((m for m in order if partial[m] is None), None)
        if mfc is None:
            choice = tuple(i for i in partial if i is not None)
            if (new := objective(problem, *plans.evaluate(choice))) < value:
                best, value = choice, new
        elif lower_bound(problem, partial) < value:
            stack += [[*partial[:mfc], i, *partial[mfc + 1 :]] for i in range(len(problem.table[mfc]))]
    return best, value


def lower_bound(problem: Problem, partial: Partial) -> float:
    """Return a lower bound of the objective over all completions of a partial choice.

    The first step ends with an MFC without children; all work that starts later must finish within the window.
    """
    assignment, n, mfcs = PartialAssignment(problem, partial), problem.n_steady_steps, range(len(partial))
    if n:
        ends = set(mfcs) - {parent for deps in problem.deps for parent in deps.parents}
        seconds = min(_window(assignment, n, [0.0 if m == end else -inf for m in mfcs]) for end in ends) / n
    else:
        seconds = _window(assignment, 1, [0.0 for _ in mfcs])
    return objective(problem, seconds * (1 - 1e-12), peak_bytes(assignment))  # sums are rounded


def _window(assignment: PartialAssignment, n: int, first: list[float]) -> float:
    """Return a lower bound of the time until ``n`` more steps end, if each MFC finishes a step at ``first``.

    -inf stands for an unknown time.
    """
    problem = assignment.problem
    done = [first]
    for step in range(1, n + 1):
        now = [-inf] * len(first)
        ahead = step - 2 - problem.max_staleness
        fetched = max(done[ahead]) if ahead >= 0 else -inf
        for mfc in problem.order:
            deps, call = problem.deps[mfc], _seconds(assignment, mfc) + problem.call_seconds
            fresh = (
                done[step - deps.allowed_staleness - 1][deps.updater]
                if deps.updater >= 0 and step > deps.allowed_staleness
                else -inf
            )
            begin = max(fetched, fresh, done[-1][mfc])
            rows = max((now[parent] for parent in deps.parents), default=-inf)
            now[mfc] = max(begin + _calls(problem, mfc) * call, rows + call)
        done.append(now)
    steps = [sum(now[mfc] > -inf for now in done[1:]) for mfc in range(len(first))]
    return max(*done[-1], _load(assignment, steps))


def _least(problem: Problem, mfc: int) -> float:
    return min(_busy(o) for o in problem.table[mfc])


def _busy(option: LayoutOption) -> float:
    """Return the seconds of transfer and computation of the fastest call."""
    return option.transfer.seconds + min(cost.seconds for cost in option.compute)


def _seconds(assignment: PartialAssignment, mfc: int) -> float:
    """Return a lower bound of the time that a call occupies its workers."""
    if assignment.partial[mfc] is None:
        return _least(assignment.problem, mfc)
    option, realloc = assignment.options[mfc], assignment.realloc_cost(mfc)
    return _busy(option) + (realloc.cost.seconds if realloc else 0.0)


def _calls(problem: Problem, mfc: int) -> int:
    """Return the number of calls per step."""
    return -(-problem.batch_size // problem.deps[mfc].batch_size)


def _load(assignment: PartialAssignment, steps: Sequence[int]) -> float:
    """Return the time of the busiest worker, or the average over workers, for a number of steps of every MFC."""
    busy = [0.0] * assignment.n_rank_classes
    total = 0.0
    for mfc, n in enumerate(steps):
        calls = n * _calls(assignment.problem, mfc)
        if assignment.partial[mfc] is None:
            total += calls * min(len(o.ranks) * _busy(o) for o in assignment.problem.table[mfc])
        else:
            seconds = calls * _seconds(assignment, mfc)
            total += len(assignment.options[mfc].ranks) * seconds
            for rank in assignment.rank_classes(assignment.options[mfc].ranks):
                busy[rank] += seconds
    return max(*busy, total / assignment.problem.n_ranks, 0.0)
