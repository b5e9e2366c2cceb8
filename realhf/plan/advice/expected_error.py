"""Expected errors of predictions, from the errors of what they add up: passes, decoding steps and transfers.

Errors of one kind of work have a common cause, so they add up within a prediction. Errors of different kinds are
independent. Two plans of the same machine share part of the error of a kind, so their difference is known better than
each of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import hypot, sqrt

from realhf.api.graph import MFC, Graph, Kind
from realhf.api.machine import ExpectedErrors, Hardware
from realhf.api.program import Compute
from realhf.plan.machines.profile import Profile
from realhf.plan.search.timeline import Timeline

SHARED_ERROR = 0.5
"""Correlation of the errors of two plans in one kind of work: half is the machine's, half depends on the layout."""
COMPOSITION_ERROR = 0.05
"""Of a step that is added up from measured operations: predictions on CPUs are within 7 % of runs, see RESULTS.md."""
OPERATIONS = {"compute": "train", "decoding": "decode", "links": "exchange"}
"""The operation of a profile that stands for a kind of work."""


def seconds_by_kind(timeline: Timeline, graph: Graph) -> dict[str, float]:
    """Return the seconds per step of every kind of work on the critical path."""
    start, end = timeline.steady_state
    share = timeline.seconds_per_step / (end - start) if end > start else 0.0
    seconds = dict.fromkeys(OPERATIONS, 0.0)
    for number in timeline.critical_path:
        activity = timeline.activities[number]
        inside = max(0.0, min(activity.end, end) - max(activity.start, start))
        computes = isinstance(activity.instruction, Compute)
        seconds[kind_of_work(graph[activity.mfc]) if computes else "links"] += inside * share
    return seconds


def kind_of_work(mfc: MFC) -> str:
    """Return the kind of the computation of a call."""
    return "decoding" if mfc.kind is Kind.GENERATE else "compute"


def seconds_error(seconds: Mapping[str, float], errors: ExpectedErrors) -> float:
    """Return the standard deviation of a step's seconds, given those of each kind."""
    return hypot(*(value * getattr(errors, kind) for kind, value in seconds.items()))


def difference_error(first: Mapping[str, float], second: Mapping[str, float], errors: ExpectedErrors) -> float:
    """Return the standard deviation of the difference of two plans' seconds."""
    variance = 0.0
    for kind, a in first.items():
        b = second[kind]
        variance += getattr(errors, kind) ** 2 * (a * a + b * b - 2 * SHARED_ERROR * a * b)
    return sqrt(max(0.0, variance))


def measured_errors(profile: Profile, unmeasured: ExpectedErrors) -> ExpectedErrors:
    """Return the errors of predictions by a profile; operations it lacks keep those of the machine's limits."""
    known = profile.errors
    found = {kind: hypot(known[name], COMPOSITION_ERROR) for kind, name in OPERATIONS.items() if name in known}
    return replace(unmeasured, **found)


def margin_text(hardware: Hardware) -> str:
    """Return the part of a device's memory that plans leave free, and why if it follows from an expected error."""
    text = f"{hardware.reserve_fraction:.0%} free"
    is_given = hardware.memory_reserve_fraction is not None
    return text if is_given else f"{text} for the expected error of {hardware.errors.memory:.0%}"
