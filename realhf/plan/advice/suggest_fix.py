"""The error message for a plan that does not fit: which worker needs what, and the cheapest change that helps."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from realhf.api.execution_plan import ExecutionPlan
from realhf.plan.advice.expected_error import margin_text
from realhf.plan.advice.remedies import (
    MICRO_BATCHING,
    SAME_NUMERICS,
    Step,
    changed_options,
    fewest_sequences,
    larger_clusters,
    may_fit,
    smallest_micro_batches,
    use_bf16,
    with_caps,
    with_cluster,
    with_num_seqs,
)
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.candidates import MIN_MICRO_BATCH_TOKENS, MIN_NUM_SEQS
from realhf.plan.search.planner import Planner
from realhf.plan.search.timeline import Prediction

PlanFn = Callable[[Planner], ExecutionPlan]  # returns the plan that the same allocation mode gives for another planner
TIMEOUT_S = 8.0  # CPU time, which is independent of other processes, after which no further change is tried
RULES: dict[str, PlanFn] = {name: partial(Planner.by_heuristic, name=name) for name in HEURISTICS}


def out_of_memory_message(
    planner: Planner, plan: ExecutionPlan, prediction: Prediction, replan: PlanFn, max_num_seqs_option: str
) -> str:
    """Return what the worker with the highest peak needs memory for, and which options to set so that the plan fits.

    ``max_num_seqs_option`` is the name of the option that limits the number of concurrently decoded sequences; it is
    empty if the planner chooses this number and the micro-batches.
    """
    rank, peak = max(prediction.memory.items(), key=lambda item: item[1].total)
    parts = sorted(((size, name) for name, size in asdict(peak).items()), reverse=True)
    shown = ", ".join(f"{name.replace('_', ' ')} {v / 1e9:.3g}" for v, name in parts if v >= 0.01 * peak.total)
    hardware = planner.calls.hardware
    return (f"worker {rank} would need {peak.total / 1e9:.4g} GB ({shown}), it has {hardware.memory / 1e9:.4g}, "
            f"of which plans leave {margin_text(hardware)}; "
            f"{_fix_of(planner, plan, replan, max_num_seqs_option)}")  # fmt: skip


def _fix_of(planner: Planner, plan: ExecutionPlan, replan: PlanFn, max_num_seqs_option: str) -> str:
    """Return the change that makes a plan fit; ``replan`` drops limits and savings that ``allocation_mode`` names."""
    if max_num_seqs_option and (layouts_alone := replan(planner)) != plan:
        words = "without the micro-batches and memory savings that allocation_mode names"
        if planner.fits(layouts_alone):
            return f"it fits {words}"
        fix = suggest_fix(planner, replan, max_num_seqs_option)
        return fix.replace("it fits with", f"it fits {words}, and with")
    return suggest_fix(planner, replan, max_num_seqs_option)


def suggest_fix(planner: Planner, replan: PlanFn, max_num_seqs_option: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the change that costs least among those that were tried within ``timeout_s`` seconds of CPU time."""
    tried = _Trials(planner, time.process_time() + timeout_s)
    for remedies in _groups(tried, replan, bool(max_num_seqs_option)):
        if found := list(remedies):
            best = found[0] if len(found) == 1 else min(found, key=tried.seconds)
            words = changed_options(planner, best.planner, max_num_seqs_option)
            words += [f"allocation_mode={best.rule}"] if best.rule else []
            return f"it fits with {' '.join(words)}"
    return "no change that was tried fits: use smaller models, more workers, or workers with more memory"


@dataclass(frozen=True)
class _Remedy:
    """A planner with changed options under which a plan fits; ``rule`` is the new allocation mode, if it changes."""

    planner: Planner
    replan: PlanFn
    rule: str = ""


class _TimeIsUp(Exception):
    pass


class _Trials:
    """Tries changes of ``planner`` until a time of the CPU clock."""

    def __init__(self, planner: Planner, deadline: float) -> None:
        self.planner, self.deadline = planner, deadline

    def fits(self, planner: Planner, replan: PlanFn) -> bool:
        if time.process_time() > self.deadline:
            raise _TimeIsUp
        return may_fit(planner) and planner.fits(replan(planner))

    def seconds(self, remedy: _Remedy) -> float:
        return remedy.planner.predict(remedy.replan(remedy.planner)).seconds

    def ladder(self, steps: Sequence[Step], replan: PlanFn, rule: str = "", climb: bool = True) -> Iterator[_Remedy]:
        """Yield the remedy of the first steps that fit together (or of all, without ``climb``), if there is one."""
        try:
            for n in range(1 if climb else len(steps), len(steps) + 1):
                if self.fits(_apply(self.planner, steps[:n]), replan):
                    yield _Remedy(self.needed_only(self.planner, steps[:n], replan), replan, rule)
                    return
        except _TimeIsUp:
            return

    def needed_only(self, base: Planner, steps: Sequence[Step], replan: PlanFn) -> Planner:
        """Undo steps that are not needed, the most expensive ones first, and enlarge batches as far as they fit."""
        kept = list(steps)
        try:
            for step in reversed(steps):
                fewer = [other for other in kept if other is not step]
                if self.fits(_apply(base, fewer), replan):
                    kept = fewer
            return self._larger_batches(base, kept, replan)
        except _TimeIsUp:
            return _apply(base, kept)

    def _larger_batches(self, base: Planner, steps: Sequence[Step], replan: PlanFn) -> Planner:
        rest = _apply(base, [step for step in steps if step not in MICRO_BATCHING])
        caps = dict.fromkeys(base.calls.limits, MIN_MICRO_BATCH_TOKENS) if smallest_micro_batches in steps else {}
        n_seqs = MIN_NUM_SEQS if fewest_sequences in steps else 0
        sampling = base.calls.cost.sampling

        def made() -> Planner:
            return with_num_seqs(with_caps(rest, caps), n_seqs) if n_seqs else with_caps(rest, caps)

        if sampling and n_seqs:
            for n in _halves(sampling.max_num_seqs, MIN_NUM_SEQS):
                if self.fits(with_num_seqs(with_caps(rest, caps), n), replan):
                    n_seqs = n
                    break
        given = {name: limit.max_tokens_per_mb for name, limit in base.calls.limits.items()}
        for cap in _halves(max(given.values()), MIN_MICRO_BATCH_TOKENS) if caps else ():
            before, caps = caps, dict.fromkeys(given, cap)
            if self.fits(made(), replan):
                break
            caps = before
        for name in list(caps):
            cap = caps.pop(name)
            if not self.fits(made(), replan):
                caps[name] = cap
        return made()


def _halves(largest: int, smallest: int) -> Iterator[int]:
    while (largest := largest // 2) >= smallest:
        yield largest


def _apply(planner: Planner, steps: Sequence[Step]) -> Planner:
    for step in steps:
        planner = step(planner)
    return planner


def _groups(tried: _Trials, replan: PlanFn, is_fixed: bool) -> Iterator[Iterator[_Remedy]]:
    """Yield groups of remedies; those of a group are compared by the time of a step, and the first group wins.

    Micro-batches come first. Then recomputation and offloading compete with other layouts. Numerics (bfloat16) and
    the size of the cluster change only if nothing else helps.
    """
    planned = tuple(step for step in SAME_NUMERICS if step not in MICRO_BATCHING)
    steps = SAME_NUMERICS if is_fixed else planned
    if is_fixed:
        yield tried.ladder([smallest_micro_batches], replan)
        yield tried.ladder([smallest_micro_batches, fewest_sequences], replan)
    yield _alternatives(tried, replan, steps)
    for numerics in ((), (use_bf16,)):
        yield _first(tried, (*steps, *numerics), {"": replan})
        yield _first(tried, (*planned, *numerics), RULES)
    yield _more_workers(tried, (*planned, use_bf16))


def _alternatives(tried: _Trials, replan: PlanFn, steps: Sequence[Step]) -> Iterator[_Remedy]:
    yield from tried.ladder(steps, replan)
    for rule, by_rule in RULES.items():
        yield from tried.ladder([], by_rule, rule, climb=False)


def _first(tried: _Trials, steps: Sequence[Step], plans: dict[str, PlanFn]) -> Iterator[_Remedy]:
    for rule, made in plans.items():
        for remedy in tried.ladder(steps, made, rule, climb=False):
            yield remedy
            return


def _more_workers(tried: _Trials, steps: Sequence[Step]) -> Iterator[_Remedy]:
    """Yield the smallest larger cluster on which a plan fits, by binary search, with the options that it needs."""
    rule, clusters = "symmetric", larger_clusters(tried.planner)
    made = RULES[rule]

    def fits(index: int) -> bool:
        return tried.fits(_apply(with_cluster(tried.planner, *clusters[index]), steps), made)

    enough = None
    try:
        low = next((i for i, c in enumerate(clusters) if may_fit(_apply(with_cluster(tried.planner, *c), steps))), None)
        if low is None:
            return
        step = 1
        while not fits(min(low, len(clusters) - 1)):
            if low >= len(clusters) - 1:
                return
            low, step = low + step, 2 * step
        enough = min(low, len(clusters) - 1)
        low = max(0, enough - step // 2)
        while low < enough:
            middle = (low + enough) // 2
            low, enough = (low, middle) if fits(middle) else (middle + 1, enough)
    except _TimeIsUp:
        pass
    if enough is not None:
        larger = with_cluster(tried.planner, *clusters[enough])
        yield _Remedy(tried.needed_only(larger, steps, made), made, rule)
