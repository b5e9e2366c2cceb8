"""The error message for a plan that does not fit: which worker needs what, and the smallest change that helps."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial

from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import RoleSpec
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.candidates import MIN_MICRO_BATCH_TOKENS, MIN_NUM_SEQS
from realhf.plan.search.planner import Planner
from realhf.plan.search.timeline import Prediction

PlanFn = Callable[[Planner], ExecutionPlan]  # returns the plan that the same allocation mode gives for another planner
Change = tuple[str, Planner, PlanFn]  # options to set, the planner with these options, and how to make its plan
MAX_WORKER_FACTOR, MAX_NODE_SIZE = 8, 8  # largest suggested multiple of the number of workers; largest suggested node
TIMEOUT_S = 8.0  # CPU time, which is independent of other processes, after which no further change is tried


def out_of_memory_message(planner: Planner, prediction: Prediction, replan: PlanFn, max_num_seqs_option: str) -> str:
    """Return what the worker with the highest peak needs memory for, and which options to set so that the plan fits.

    ``max_num_seqs_option`` is the name of the option that limits the number of concurrently decoded sequences; it is
    empty if the planner chooses this number and the micro-batches.
    """
    rank, peak = max(prediction.memory.items(), key=lambda item: item[1].total)
    parts = sorted(((size, name) for name, size in asdict(peak).items()), reverse=True)
    shown = ", ".join(f"{name.replace('_', ' ')} {v / 1e9:.3g}" for v, name in parts if v >= 0.01 * peak.total)
    hardware = planner.calls.hardware
    return (f"worker {rank} would need {peak.total / 1e9:.4g} GB ({shown}), it has {hardware.memory / 1e9:.4g}, "
            f"of which plans leave {hardware.memory_reserve_fraction:.0%} free; "
            f"{suggest_fix(planner, replan, max_num_seqs_option)}")  # fmt: skip


def suggest_fix(planner: Planner, replan: PlanFn, max_num_seqs_option: str) -> str:
    """Return the first of the changes, ordered from smallest to largest, with which a plan fits."""
    deadline = time.process_time() + TIMEOUT_S
    for options, changed, made in _changes(planner, replan, max_num_seqs_option):
        if time.process_time() > deadline:
            break
        if changed.fits(made(changed)):
            return f"it fits with {options}"
    return "no change that was tried fits: use smaller models, more workers, or workers with more memory"


def _changes(planner: Planner, replan: PlanFn, max_num_seqs_option: str) -> Iterator[Change]:
    """Yield changes: first those that keep the numerics of a run, then bfloat16, then more workers."""
    recompute, recomputing = _with_models(planner, "gradient_checkpointing")
    bf16, half = _with_models(planner, "bf16")
    both, smallest = f"{bf16} {recompute}".strip(), _with_models(half, "gradient_checkpointing")[1]
    if max_num_seqs_option:
        yield from _smaller_batches(planner, replan, max_num_seqs_option)
    yield recompute, recomputing, replan
    if max_num_seqs_option:
        for options, changed, made in _smaller_batches(recomputing, replan, max_num_seqs_option):
            yield f"{recompute} {options}".strip(), changed, made
    zero3, sharded = _with_zero3(planner)
    yield zero3, sharded, replan
    zero3_recompute, smaller = f"{zero3} {recompute}".strip(), _with_zero3(recomputing)[1]
    yield zero3_recompute, smaller, replan
    rules = {f"allocation_mode={name}": partial(Planner.by_heuristic, name=name) for name in HEURISTICS}
    yield from ((option, planner, rule) for option, rule in rules.items())
    yield bf16, half, replan
    yield both, smallest, replan
    yield from ((f"{both} {option}".strip(), smallest, rule) for option, rule in rules.items())
    yield from _more_workers(planner)


def _smaller_batches(planner: Planner, replan: PlanFn, max_num_seqs_option: str) -> Iterator[Change]:
    """Yield smaller micro-batches of the calls that need them, then fewer concurrent sequences."""
    limits = planner.calls.limits
    cap = max(limit.max_tokens_per_mb for limit in limits.values()) // 2
    while cap >= MIN_MICRO_BATCH_TOKENS:
        caps = {name: min(cap, limit.max_tokens_per_mb) for name, limit in limits.items()}
        if (smaller := _capped(planner, caps)).fits(replan(smaller)):
            for name, limit in limits.items():
                larger = _capped(planner, {**caps, name: limit.max_tokens_per_mb})
                if larger.fits(replan(larger)):
                    caps[name] = limit.max_tokens_per_mb
            changed = {name: n for name, n in caps.items() if n != limits[name].max_tokens_per_mb}
            options = " ".join(f"{name}.mb_spec.max_tokens_per_mb={n}" for name, n in changed.items())
            yield options, _capped(planner, caps), replan
        cap //= 2
    calls, sampling = planner.calls, planner.calls.cost.sampling
    n = sampling.max_num_seqs // 2 if sampling else 0
    while sampling and n >= MIN_NUM_SEQS:
        fewer = replace(sampling, max_num_seqs=n)
        cost, memory = replace(calls.cost, sampling=fewer), replace(calls.memory, sampling=fewer)
        yield f"{max_num_seqs_option}={n}", replace(planner, calls=replace(calls, cost=cost, memory=memory)), replan
        n //= 2


def _capped(planner: Planner, caps: Mapping[str, int]) -> Planner:
    limits = {name: replace(limit, max_tokens_per_mb=caps[name]) for name, limit in planner.calls.limits.items()}
    return replace(planner, calls=replace(planner.calls, limits=limits))


def _with_models(planner: Planner, option: str) -> tuple[str, Planner]:
    """Enable ``gradient_checkpointing`` of trained models, or ``bf16`` of all models."""
    calls, graph = planner.calls, planner.graph

    def switched(name: str, role: RoleSpec) -> RoleSpec:
        if option == "bf16":
            return replace(role, spec=replace(role.spec, bf16=True))
        recompute = role.spec.gradient_checkpointing or graph.trainer(name) is not None
        return replace(role, spec=replace(role.spec, gradient_checkpointing=recompute))

    roles = {name: switched(name, role) for name, role in calls.cost.roles.items()}
    named = [name for name, role in roles.items() if role != calls.cost.roles[name] and role.starts_as is None]
    cost, memory = replace(calls.cost, roles=roles), replace(calls.memory, roles=roles)
    options = " ".join(f"{name}.{option}=True" for name in named)
    return options, replace(planner, calls=replace(calls, cost=cost, memory=memory))


def _with_zero3(planner: Planner) -> tuple[str, Planner]:
    """Set ``zero_stage=3`` of trained models without adapters."""
    calls, roles = planner.calls, dict(planner.calls.cost.roles)
    for name, role in roles.items():
        is_native = role.spec.backend is Backend.native and not role.spec.lora.rank
        if is_native and planner.graph.trainer(name) is not None:
            roles[name] = replace(role, spec=replace(role.spec, zero_stage=3))
    named = [name for name, role in roles.items() if role != calls.cost.roles[name] and role.starts_as is None]
    cost, memory = replace(calls.cost, roles=roles), replace(calls.memory, roles=roles)
    options = " ".join(f"{name}.zero_stage=3" for name in named)
    return options, replace(planner, calls=replace(calls, cost=cost, memory=memory))


def _more_workers(planner: Planner) -> Iterator[Change]:
    """Yield larger clusters; more workers on CPU do not help, since they share the memory."""
    calls, n, node_size = planner.calls, planner.n_workers, planner.cluster.node_size
    one_node = n == node_size
    while n < MAX_WORKER_FACTOR * planner.n_workers and not calls.hardware.cores:
        n *= 2
        node_size = n if one_node and n <= MAX_NODE_SIZE else node_size
        hardware, cost = replace(calls.hardware, node_size=node_size), replace(calls.cost, node_size=node_size)
        larger = replace(planner, n_workers=n, calls=replace(calls, hardware=hardware, cost=cost))
        options = f"n_nodes={n // node_size} n_gpus_per_node={node_size} allocation_mode=symmetric"
        yield options, larger, partial(Planner.by_heuristic, name="symmetric")
