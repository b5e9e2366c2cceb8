"""The planner in C++ (csrc/planner): found and loaded at first use, absent without complaint."""

import warnings
from collections.abc import Iterator
from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, byref, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from realhf.api.machine import Cost
from realhf.plan.search.mcmc import Chain, Evaluator, PythonEvaluator
from realhf.plan.search.problem import Choice, LayoutOption, Problem

Fill = CFUNCTYPE(c_int, c_int, c_int, c_int, POINTER(c_double))
MAX_MFCS = 16
"""A choice of this many MFCs cannot cut the ranks into more pieces than a word has bits."""


class _ChainStruct(Structure):
    _fields_ = [
        ("choice", POINTER(c_int32)),
        ("best", POINTER(c_int32)),
        ("value", c_double),
        ("best_value", c_double),
        ("random", c_uint64),
    ]


@cache
def load_library() -> CDLL | None:
    """Return the compiled library, or None where it was not built or does not load."""
    path = Path(__file__).with_name("_planner.so")
    if not path.exists():
        return None
    try:
        found = CDLL(str(path))
    except OSError as error:
        warnings.warn(
            f"{path.name} does not load and plans are searched in Python ({error}); "
            "build it anew with: python setup.py build_ext --inplace",
            stacklevel=2,
        )
        return None
    found.planner_new.restype = c_void_p
    found.planner_new.argtypes = [POINTER(c_int32), POINTER(c_double), Fill]
    found.planner_delete.argtypes = [c_void_p]
    found.planner_delete.restype = None
    found.planner_evaluate.argtypes = [c_void_p, POINTER(c_int32), POINTER(c_double), POINTER(c_double)]
    found.planner_walk.argtypes = [c_void_p, POINTER(_ChainStruct), c_int64, c_double]
    return found


def evaluator(problem: Problem) -> Evaluator:
    """Return the fastest way there is to evaluate choices of a problem."""
    found = load_library()
    return PythonEvaluator(problem) if found is None or len(problem.table) > MAX_MFCS else CppEvaluator(problem, found)


class CppEvaluator:
    """Choices evaluated in C++; tables are asked for entries when they are looked at."""

    def __init__(self, problem: Problem, found: CDLL) -> None:
        self.problem, self._library = problem, found
        self._error: BaseException | None = None
        self._fill = Fill(self._look)
        ints, reals = list(_ints(problem)), list(_reals(problem))
        self._handle: int = found.planner_new((c_int32 * len(ints))(*ints), (c_double * len(reals))(*reals), self._fill)
        self._choice = (c_int32 * len(problem.table))()

    def __del__(self) -> None:
        self._library.planner_delete(self._handle)

    def evaluate(self, choice: Choice) -> tuple[float, float]:
        self._choice[:] = list(choice)
        seconds, peak = c_double(), c_double()
        self._check(self._library.planner_evaluate(self._handle, self._choice, byref(seconds), byref(peak)))
        return seconds.value, peak.value

    def run_chain(self, walker: Chain, n: int, temperature: float) -> None:
        kind = c_int32 * len(walker.choice)
        at, best = kind(*walker.choice), kind(*walker.best)
        state = _ChainStruct(at, best, walker.value, walker.best_value, walker.rng.state)
        self._check(self._library.planner_walk(self._handle, byref(state), n, temperature))
        walker.choice, walker.value = tuple(at), state.value
        walker.best, walker.best_value, walker.rng.state = tuple(best), state.best_value, state.random

    def _look(self, table: int, row: int, column: int, entry: Any) -> int:
        """Write down what an entry of a table is; an exception waits until C++ has returned."""
        try:
            n = len(self.problem.table)
            if table < n:
                move = self.problem.realloc_cost(table, row, column)
                entry[0], entry[1], entry[2], entry[3] = (
                    move.cost.seconds,
                    move.cost.core_seconds,
                    move.nbytes,
                    move.rings,
                )
            else:
                cost = self.problem.sync_cost(table - n, row, column)
                entry[0], entry[1], entry[2], entry[3] = cost.seconds, cost.core_seconds, 0.0, 0.0
        except BaseException as error:
            self._error = error
            return 1
        return 0

    def _check(self, failed: int) -> None:
        if failed:
            assert self._error is not None, "only a table's entry can fail"
            raise self._error


def _ints(problem: Problem) -> Iterator[int]:
    """Yield the whole numbers of a problem in the order in which csrc/planner/api.cpp reads them."""
    yield from (problem.batch_size, problem.n_steps, problem.n_steady_steps, problem.max_staleness)
    yield from (len(problem.order), *problem.order)
    for wire, options in zip(problem.deps, problem.table, strict=True):
        yield from (len(wire.parents), *wire.parents, len(wire.row_sources), *wire.row_sources)
        yield from (wire.updater, wire.allowed_staleness, wire.home_mfc, wire.batch_size, wire.offloaded, len(options))
        for option in options:
            yield from (option.ranks.start, option.ranks.stop, option.holders.start, option.holders.stop)
    yield len(problem.ema_syncs)
    for follow in problem.ema_syncs:
        yield from (follow.after, follow.source, follow.target)


def _reals(problem: Problem) -> Iterator[float]:
    """Yield the other numbers, likewise."""
    yield from (problem.capacity, problem.call_seconds, problem.cores)
    for options in problem.table:
        for option in options:
            yield from _costs(option)
            yield from (option.transient, option.resident)


def _costs(option: LayoutOption) -> Iterator[float]:
    costs: tuple[Cost, ...] = (option.compute, option.transfer, option.load, option.offload)
    for cost in costs:
        yield from (cost.seconds, cost.core_seconds)
