"""The best choice of a small problem, without doubt: branch and bound."""

from collections.abc import Sequence
from math import inf

from realhf.plan.search.cpp_evaluator import evaluator
from realhf.plan.search.evaluate import Assignment, objective, peak_bytes
from realhf.plan.search.problem import Choice, Problem
from realhf.plan.search.search import search

Partial = Sequence[int | None]


def branch_and_bound(problem: Problem) -> tuple[Choice, float]:
    """Return a choice with the smallest objective, and that.

    Branches are cut where ``lower_bound`` shows that they hold nothing better. It may be half of the truth, so this is
    for small problems.
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
    """Return an objective that no choice beats which gives options to the MFCs that have none (None) in a partial one.

    The first step ends with some MFC that nobody waits for; what is known to begin after that must be done by the end.
    """
    chosen, n, mfcs = Assignment(problem, partial), problem.n_steady_steps, range(len(partial))
    if n:
        ends = set(mfcs) - {parent for wire in problem.deps for parent in wire.parents}
        seconds = min(_window(chosen, n, [0.0 if m == end else -inf for m in mfcs]) for end in ends) / n
    else:
        seconds = _window(chosen, 1, [0.0 for _ in mfcs])
    return objective(problem, seconds * (1 - 1e-12), peak_bytes(chosen))  # sums are rounded


def _window(chosen: Assignment, n: int, first: list[float]) -> float:
    """Return how long it takes to end ``n`` more steps at the least if each MFC is done with a step at ``first``.

    -inf stands for no knowledge.
    """
    problem = chosen.problem
    done = [first]
    for step in range(1, n + 1):
        now = [-inf] * len(first)
        ahead = step - 2 - problem.max_staleness
        fetched = max(done[ahead]) if ahead >= 0 else -inf
        for mfc in problem.order:
            wire, call = problem.deps[mfc], _seconds(chosen, mfc) + problem.call_seconds
            fresh = (
                done[step - wire.allowed_staleness - 1][wire.updater]
                if wire.updater >= 0 and step > wire.allowed_staleness
                else -inf
            )
            begin = max(fetched, fresh, done[-1][mfc])
            rows = max((now[parent] for parent in wire.parents), default=-inf)
            now[mfc] = max(begin + _calls(problem, mfc) * call, rows + call)
        done.append(now)
    steps = [sum(now[mfc] > -inf for now in done[1:]) for mfc in range(len(first))]
    return max(*done[-1], _load(chosen, steps))


def _least(problem: Problem, mfc: int) -> float:
    return min(o.transfer.seconds + o.compute.seconds for o in problem.table[mfc])


def _seconds(chosen: Assignment, mfc: int) -> float:
    """Return how long a call keeps the workers that it runs on, at the least."""
    if chosen.choice[mfc] is None:
        return _least(chosen.problem, mfc)
    option, move = chosen.options[mfc], chosen.realloc_cost(mfc)
    return option.transfer.seconds + option.compute.seconds + (move.cost.seconds if move else 0.0)


def _calls(problem: Problem, mfc: int) -> int:
    """Return how many calls a step takes."""
    return -(-problem.batch_size // problem.deps[mfc].batch_size)


def _load(chosen: Assignment, steps: Sequence[int]) -> float:
    """Return how long the busiest worker works on so many steps of every MFC, or all of them on average."""
    busy = [0.0] * chosen.n_rank_classes
    total = 0.0
    for mfc, n in enumerate(steps):
        calls = n * _calls(chosen.problem, mfc)
        if chosen.choice[mfc] is None:
            total += calls * min(
                len(o.ranks) * (o.transfer.seconds + o.compute.seconds) for o in chosen.problem.table[mfc]
            )
        else:
            seconds = calls * _seconds(chosen, mfc)
            total += len(chosen.ranks(mfc)) * seconds
            for atom in chosen.rank_classes(chosen.ranks(mfc)):
                busy[atom] += seconds
    return max(*busy, total / chosen.problem.n_ranks, 0.0)
