"""The evaluator in C++ (csrc/planner), loaded on first use."""

import warnings
from collections.abc import Iterator
from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, byref, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

from realhf.base import native
from realhf.plan.search.evaluate import PythonEvaluator
from realhf.plan.search.mcmc import Chain
from realhf.plan.search.problem import Choice, Problem, ReallocCost

Ints, Reals = POINTER(c_int32), POINTER(c_double)
FillEntry = CFUNCTYPE(c_int, c_int, c_int, c_int, Reals)
MAX_MFCS = 16  # the options of so many MFCs have at most 65 bounds, which make the 64 rank classes of a bit mask


class _ChainStruct(Structure):
    _fields_ = [("choice", Ints), ("best", Ints), ("value", c_double), ("best_value", c_double),
                ("rng_state", c_uint64)]  # fmt: skip


@cache
def load_library() -> CDLL | None:
    """Return the compiled library, or None if it was not built or cannot be loaded."""
    path = native.ensure(native.PLANNER)
    if path is None:
        return None
    try:
        library = CDLL(str(path))
    except OSError as error:
        message = f"{path.name} cannot be loaded, so the slower Python evaluator is used ({error}); "
        warnings.warn(message + "rebuild it with: python setup.py build_ext --inplace", stacklevel=2)
        return None
    library.planner_new.restype, library.planner_new.argtypes = c_void_p, [Ints, Reals, FillEntry]
    library.planner_delete.restype, library.planner_delete.argtypes = None, [c_void_p]
    library.planner_evaluate.argtypes = [c_void_p, Ints, Reals, Reals]
    library.planner_run_chain.argtypes = [c_void_p, POINTER(_ChainStruct), c_int64, c_double]
    return library


def evaluator(problem: Problem) -> "PythonEvaluator | CppEvaluator":
    """Return the fastest available evaluator of a problem."""
    library = load_library()
    if library is None or len(problem.table) > MAX_MFCS:
        return PythonEvaluator(problem)
    return CppEvaluator(problem, library)


class CppEvaluator:
    """Evaluates choices in C++, which requests entries of the cost tables on demand."""

    def __init__(self, problem: Problem, library: CDLL) -> None:
        self.problem, self._library = problem, library
        self._error: BaseException | None = None
        self._fill = FillEntry(self._fill_entry)
        ints, reals = list(_ints(problem)), list(_reals(problem))
        arrays = (c_int32 * len(ints))(*ints), (c_double * len(reals))(*reals)
        self._handle: int = library.planner_new(*arrays, self._fill)
        self._choice = (c_int32 * len(problem.table))()

    def __del__(self) -> None:
        self._library.planner_delete(self._handle)

    def evaluate(self, choice: Choice) -> tuple[float, float]:
        self._choice[:] = list(choice)
        seconds, peak = c_double(), c_double()
        self._check(self._library.planner_evaluate(self._handle, self._choice, byref(seconds), byref(peak)))
        return seconds.value, peak.value

    def run_chain(self, chain: Chain, n: int, temperature: float) -> None:
        array = c_int32 * len(chain.choice)
        choice, best = array(*chain.choice), array(*chain.best)
        state = _ChainStruct(choice, best, chain.value, chain.best_value, chain.rng.state)
        self._check(self._library.planner_run_chain(self._handle, byref(state), n, temperature))
        chain.choice, chain.value = tuple(choice), state.value
        chain.best, chain.best_value, chain.rng.state = tuple(best), state.best_value, state.rng_state

    def _fill_entry(self, table: int, row: int, column: int, entry: Any) -> int:
        """Write an entry of a cost table; an exception is stored until C++ has returned."""
        try:
            if table < len(self.problem.table):
                realloc = self.problem.realloc_cost(table, row, column)
            else:
                realloc = ReallocCost(self.problem.sync_cost(table - len(self.problem.table), row, column))
        except BaseException as error:
            self._error = error
            return 1
        entry[0], entry[1] = realloc.cost.seconds, realloc.cost.core_seconds
        entry[2], entry[3] = realloc.nbytes, realloc.rings
        return 0

    def _check(self, failed: int) -> None:
        if failed:
            assert self._error is not None, "only a table entry can fail"
            raise self._error


def _ints(problem: Problem) -> Iterator[int]:
    """Yield the integers of a problem, and ``_reals`` its other numbers, in the order of csrc/planner/api.cpp."""
    yield from (problem.batch_size, problem.n_steps, *problem.steady_steps, problem.max_staleness)
    yield problem.filter_mfc
    yield from (len(problem.order), *problem.order)
    for deps, options in zip(problem.deps, problem.table, strict=True):
        yield from (len(deps.parents), *deps.parents, len(deps.row_sources), *deps.row_sources)
        for couriers in (deps.couriers.get(source, ()) for source in deps.row_sources):
            yield from (len(couriers), *couriers)
        yield from (deps.updater, deps.allowed_staleness, deps.home_mfc, deps.batch_size, deps.offloaded)
        yield from (deps.after_filter, len(options))
        for option in options:
            yield from (option.ranks.start, option.ranks.stop, option.holders.start, option.holders.stop)
            yield len(option.compute)
    yield len(problem.ema_syncs)
    for sync in problem.ema_syncs:
        yield from (sync.after, sync.source, sync.target)


def _reals(problem: Problem) -> Iterator[float]:
    yield from (problem.capacity, problem.call_seconds, problem.cores)
    for options in problem.table:
        for option in options:
            for cost in (*option.compute, option.transfer, option.load, option.offload):
                yield from (cost.seconds, cost.core_seconds)
            yield from (option.transient, option.resident)
