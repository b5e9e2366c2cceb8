"""Rows of rollouts, sent to where they are needed before the same workers begin the next rollout.

Workers handle requests in order. A worker that has begun the next rollout sends rows only after it. With rollouts ahead
of training, or several per step, a call that starts as soon as a rollout has finished therefore also gets what later
calls read.
"""

from collections.abc import Collection
from typing import TypeVar

from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import MFC, Graph, Kind

Call = TypeVar("Call")


def rollouts_ahead(graph: Graph) -> tuple[MFC, ...]:
    """Return the calls that may be ahead of training: they generate, and need no other call."""
    return tuple(m for m in graph.mfcs if m.kind is Kind.GENERATE and not graph.parents(m))


def uninterrupted_rollouts(graph: Graph, max_staleness: int) -> tuple[MFC, ...]:
    """Return the calls after one of which the next may begin at once: they are ahead of training, or divided."""
    return tuple(m for m in rollouts_ahead(graph) if max_staleness or graph.is_divided(m))


def couriers(graph: Graph, rollout: MFC) -> tuple[MFC, ...]:
    """Return the calls that start when a rollout has finished: they need no other call and no recent weights."""
    readers = (m for m in graph.topological if graph.parents(m) == (rollout,))
    return tuple(m for m in readers if m.role is None or graph.updater(m.role) is None)


def later_readers(graph: Graph, rollout: MFC) -> tuple[MFC, ...]:
    """Return the calls that read rows of a rollout, or data rows on its workers, but start later."""
    held, now = set(held_keys(graph, rollout)), couriers(graph, rollout)
    return tuple(m for m in graph.mfcs if m not in (rollout, *now) and held & set(m.inputs))


def held_keys(graph: Graph, rollout: MFC) -> tuple[str, ...]:
    """Return the keys of the rows that only the workers of a rollout have; those of the data if they read it."""
    return (*rollout.outputs, *(graph.dataset_keys if graph.fetcher == rollout else ()))


def choose_courier(
    available: Collection[tuple[Call, frozenset[int]]], reader: frozenset[int], rollout: frozenset[int]
) -> Call | None:
    """Return which of the calls on given workers brings rows to a reader on other workers than the rollout.

    It is the first one on a worker of the reader, or else the first one without a worker of the rollout.
    """
    free = [(call, ranks) for call, ranks in available if ranks.isdisjoint(rollout)]
    if not free or not reader.isdisjoint(rollout):
        return None
    return next((call for call, ranks in free if not ranks.isdisjoint(reader)), free[0][0])


def forwarded_keys(graph: Graph, plan: ExecutionPlan, max_staleness: int) -> dict[str, tuple[str, ...]]:
    """Return, by call, the keys of the rows that it gets for later calls."""

    def ranks(mfc: MFC) -> frozenset[int]:
        return frozenset(plan[mfc.name].layout.mesh.ranks)

    found: dict[str, dict[str, None]] = {}
    for rollout in uninterrupted_rollouts(graph, max_staleness):
        held, available = held_keys(graph, rollout), [(m, ranks(m)) for m in couriers(graph, rollout)]
        for reader in later_readers(graph, rollout):
            if (courier := choose_courier(available, ranks(reader), ranks(rollout))) is not None:
                keys = (key for key in reader.inputs if key in held and key not in courier.inputs)
                found.setdefault(courier.name, {}).update(dict.fromkeys(keys))
    return {name: tuple(keys) for name, keys in found.items() if keys}


def busy_ranks(graph: Graph, plan: ExecutionPlan, max_staleness: int) -> frozenset[int]:
    """Return the workers that may have begun the next rollout when a call starts."""
    rollouts = uninterrupted_rollouts(graph, max_staleness)
    return frozenset().union(*(plan[mfc.name].layout.mesh.ranks for mfc in rollouts))
