"""What to say of a plan that does not fit: which worker lacks what, and the smallest change with which it fits."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial

from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import RoleSpec
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.planner import Planner
from realhf.plan.search.prediction import Prediction

PlanFn = Callable[[Planner], ExecutionPlan]
"""The plan that the same allocation mode gives for another planner."""
Change = tuple[str, Planner, PlanFn]
"""Options to set, the planner with them, and how it makes its plan."""
MIN_MICRO_BATCH_TOKENS, MIN_NUM_SEQS = 512, 8
MOST_TIMES, FULL_NODE = 8, 8
"""Of the workers there are; devices that a node has room for."""
TIMEOUT_S = 8.0
"""After so much time of the processor no further change is tried: neighbours that keep it busy change no answer."""


def out_of_memory_message(planner: Planner, prediction: Prediction, replan: PlanFn, slots_option: str) -> str:
    """Say what the fullest worker has too little memory for, and what to set so that the plan fits.

    ``slots_option`` is the name of the option that bounds the rows which are decoded at a time; it is empty where the
    planner itself chooses those and micro-batches.
    """
    rank, worst = max(prediction.memory.items(), key=lambda item: item[1].total)
    parts = sorted(((size, name) for name, size in asdict(worst).items()), reverse=True)
    words = ", ".join(f"{name.replace('_', ' ')} {v / 1e9:.3g}" for v, name in parts if v >= 0.01 * worst.total)
    hardware = planner.calls.hardware
    return (f"worker {rank} would need {worst.total / 1e9:.4g} GB ({words}), it has {hardware.memory / 1e9:.4g}, "
            f"of which plans leave {hardware.memory_reserve_fraction:.0%} free; {suggest_fix(planner, replan, slots_option)}")  # fmt: skip


def suggest_fix(planner: Planner, replan: PlanFn, slots_option: str) -> str:
    """Return the first of the changes, from the smallest to the largest, with which a plan fits."""
    deadline = time.process_time() + TIMEOUT_S
    for words, changed, made in _changes(planner, replan, slots_option):
        if time.process_time() > deadline:
            break
        if changed.fits(made(changed)):
            return f"it fits with {words}"
    return "nothing that was tried fits: take smaller models, more workers, or workers with more memory"


def _changes(planner: Planner, replan: PlanFn, slots_option: str) -> Iterator[Change]:
    """Yield what could be set: first what leaves the numbers of a run as they are, then bfloat16, then more workers."""
    recompute, recomputing = _with_models(planner, "gradient_checkpointing")
    bf16, short = _with_models(planner, "bf16")
    both, leanest = f"{bf16} {recompute}".strip(), _with_models(short, "gradient_checkpointing")[1]
    if slots_option:
        yield from _finer(planner, replan, slots_option)
    yield recompute, recomputing, replan
    if slots_option:
        for words, changed, made in _finer(recomputing, replan, slots_option):
            yield f"{recompute} {words}".strip(), changed, made
    yield from _rules(planner, "")
    yield bf16, short, replan
    yield both, leanest, replan
    yield from _rules(leanest, both)
    yield from _more_workers(planner)


def _rules(planner: Planner, words: str) -> Iterator[Change]:
    for name in HEURISTICS:
        yield f"{words} allocation_mode={name}".strip(), planner, partial(Planner.by_heuristic, name=name)


def _finer(planner: Planner, replan: PlanFn, slots_option: str) -> Iterator[Change]:
    """Yield smaller micro-batches of the calls that need them, then fewer slots."""
    limits = planner.calls.limits
    cap = max(limit.max_tokens_per_mb for limit in limits.values()) // 2
    while cap >= MIN_MICRO_BATCH_TOKENS:
        caps = {name: min(cap, limit.max_tokens_per_mb) for name, limit in limits.items()}
        if (finer := _capped(planner, caps)).fits(replan(finer)):
            for name, limit in limits.items():
                wider = _capped(planner, {**caps, name: limit.max_tokens_per_mb})
                if wider.fits(replan(wider)):
                    caps[name] = limit.max_tokens_per_mb
            changed = {name: n for name, n in caps.items() if n != limits[name].max_tokens_per_mb}
            words = " ".join(f"{name}.mb_spec.max_tokens_per_mb={n}" for name, n in changed.items())
            yield words, _capped(planner, caps), replan
        cap //= 2
    calls, sampling = planner.calls, planner.calls.cost.sampling
    slots = sampling.max_num_seqs // 2 if sampling else 0
    while sampling and slots >= MIN_NUM_SEQS:
        fewer = replace(sampling, max_num_seqs=slots)
        cost, memory = replace(calls.cost, sampling=fewer), replace(calls.memory, sampling=fewer)
        yield f"{slots_option}={slots}", replace(planner, calls=replace(calls, cost=cost, memory=memory)), replan
        slots //= 2


def _capped(planner: Planner, caps: Mapping[str, int]) -> Planner:
    limits = {name: replace(limit, max_tokens_per_mb=caps[name]) for name, limit in planner.calls.limits.items()}
    return replace(planner, calls=replace(planner.calls, limits=limits))


def _with_models(planner: Planner, option: str) -> tuple[str, Planner]:
    """Set a switch of models: ``gradient_checkpointing`` where they are trained, or ``bf16`` everywhere."""
    calls, graph = planner.calls, planner.graph

    def switched(name: str, role: RoleSpec) -> RoleSpec:
        if option == "bf16":
            return replace(role, spec=replace(role.spec, bf16=True))
        recompute = role.spec.gradient_checkpointing or graph.trainer(name) is not None
        return replace(role, spec=replace(role.spec, gradient_checkpointing=recompute))

    roles = {name: switched(name, role) for name, role in calls.cost.roles.items()}
    named = [name for name, role in roles.items() if role != calls.cost.roles[name] and role.starts_as is None]
    cost, memory = replace(calls.cost, roles=roles), replace(calls.memory, roles=roles)
    words = " ".join(f"{name}.{option}=True" for name in named)
    return words, replace(planner, calls=replace(calls, cost=cost, memory=memory))


def _more_workers(planner: Planner) -> Iterator[Change]:
    """Yield more devices, node by node; workers on CPU share one memory, however many they are."""
    calls, n, node_size = planner.calls, planner.n_workers, planner.cluster.node_size
    one_node = n == node_size
    while n < MOST_TIMES * planner.n_workers and not calls.hardware.cores:
        n *= 2
        node_size = n if one_node and n <= FULL_NODE else node_size
        hardware, cost = replace(calls.hardware, node_size=node_size), replace(calls.cost, node_size=node_size)
        larger = replace(planner, n_workers=n, calls=replace(calls, hardware=hardware, cost=cost))
        words = f"n_nodes={n // node_size} n_gpus_per_node={node_size} allocation_mode=symmetric"
        yield words, larger, partial(Planner.by_heuristic, name="symmetric")
