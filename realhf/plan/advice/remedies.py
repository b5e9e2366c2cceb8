"""Changes of options that lower the memory of a plan, each a planner with these options, ordered from cheap to dear."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from realhf.api.config import OptimizerType
from realhf.api.config.choices import Backend, Recompute
from realhf.api.config.model import ModelSpec
from realhf.api.layout import ParallelStrategy
from realhf.plan.search.candidates import MIN_MICRO_BATCH_TOKENS, MIN_NUM_SEQS
from realhf.plan.search.planner import Planner

Step = Callable[[Planner], Planner]
MODEL_OPTIONS = ("bf16", "gradient_checkpointing", "recompute_granularity", "offload", "zero_stage")
MAX_NODE_SIZE, MAX_WORKER_FACTOR = 8, 64  # largest suggested node; largest suggested multiple of the workers


def smallest_micro_batches(planner: Planner) -> Planner:
    return with_caps(planner, dict.fromkeys(planner.calls.limits, MIN_MICRO_BATCH_TOKENS))


def fewest_sequences(planner: Planner) -> Planner:
    return with_num_seqs(planner, MIN_NUM_SEQS)


def recompute_selectively(planner: Planner) -> Planner:
    """Recompute norms and MLP activations of models that keep everything."""

    def changed(name: str, spec: ModelSpec) -> ModelSpec:
        if spec.gradient_checkpointing or planner.graph.trainer(name) is None:
            return spec
        return replace(spec, gradient_checkpointing=True, recompute_granularity=Recompute.selective)

    return _with_models(planner, changed)


def recompute_fully(planner: Planner) -> Planner:
    def changed(name: str, spec: ModelSpec) -> ModelSpec:
        if planner.graph.trainer(name) is None:
            return spec
        return replace(spec, gradient_checkpointing=True, recompute_granularity=Recompute.full)

    return _with_models(planner, changed)


def offload_frozen_models(planner: Planner) -> Planner:
    """Keep the weights of models that do not change in host memory between their calls."""
    graph = planner.graph
    averages = {sync.target for sync in graph.syncs}
    roles = planner.calls.cost.roles
    frozen = [role for role in graph.roles if graph.updater(role) is None and role not in averages]
    frozen = [role for role in frozen if roles[role].starts_as is None and roles[role].spec.lora.rank == 0]
    if planner.calls.memory.device == "cpu":  # the host's memory is that of the workers
        return planner
    changed = _with_models(planner, lambda name, spec: replace(spec, offload=True) if name in frozen else spec)
    graph = replace(graph, offloaded=(*graph.offloaded, *(role for role in frozen if role not in graph.offloaded)))
    calls = changed.calls
    cost, memory = replace(calls.cost, graph=graph), replace(calls.memory, graph=graph)
    return replace(changed, graph=graph, calls=replace(calls, cost=cost, memory=memory))


def offload_optimizers(planner: Planner) -> Planner:
    """Keep optimizer state in host memory, which is possible on GPUs."""

    def changed(name: str, spec: ModelSpec) -> ModelSpec:
        if planner.graph.trainer(name) is None or spec.optimizer.type is OptimizerType.none:
            return spec
        return replace(spec, optimizer=replace(spec.optimizer, offload=True))

    return planner if planner.calls.memory.device == "cpu" else _with_models(planner, changed)


def share_weights(planner: Planner) -> Planner:
    """Share weights and gradients of trained models without adapters among data-parallel ranks."""

    def changed(name: str, spec: ModelSpec) -> ModelSpec:
        is_native = spec.backend is Backend.native and not spec.lora.rank
        return replace(spec, zero_stage=3) if is_native and planner.graph.trainer(name) is not None else spec

    return _with_models(planner, changed)


def use_bf16(planner: Planner) -> Planner:
    return _with_models(planner, lambda _, spec: replace(spec, bf16=True))


MICRO_BATCHING = (smallest_micro_batches, fewest_sequences)
"""Steps that only matter if the planner does not choose micro-batches."""
SAME_NUMERICS: tuple[Step, ...] = (smallest_micro_batches, recompute_selectively, recompute_fully, fewest_sequences,
                                   offload_frozen_models, offload_optimizers, share_weights)  # fmt: skip
"""Steps that keep the numerics of a run, from cheap to dear."""


def with_caps(planner: Planner, caps: Mapping[str, int]) -> Planner:
    """Cap the tokens per micro-batch of the calls."""
    limits = {n: replace(limit, max_tokens_per_mb=min(limit.max_tokens_per_mb, caps.get(n, limit.max_tokens_per_mb)))
              for n, limit in planner.calls.limits.items()}  # fmt: skip
    return replace(planner, calls=replace(planner.calls, limits=limits))


def with_num_seqs(planner: Planner, n: int) -> Planner:
    """Cap the number of sequences that are decoded at a time."""
    calls, sampling = planner.calls, planner.calls.cost.sampling
    if sampling is None or sampling.max_num_seqs <= n:
        return planner
    fewer = replace(sampling, max_num_seqs=n)
    cost, memory = replace(calls.cost, sampling=fewer), replace(calls.memory, sampling=fewer)
    return replace(planner, calls=replace(calls, cost=cost, memory=memory))


def _with_models(planner: Planner, changed: Callable[[str, ModelSpec], ModelSpec]) -> Planner:
    calls = planner.calls
    roles = {name: replace(role, spec=changed(name, role.spec)) for name, role in calls.cost.roles.items()}
    cost, memory = replace(calls.cost, roles=roles), replace(calls.memory, roles=roles)
    return replace(planner, calls=replace(calls, cost=cost, memory=memory))


def with_cluster(planner: Planner, n_nodes: int, node_size: int) -> Planner:
    calls = planner.calls
    hardware, cost = replace(calls.hardware, node_size=node_size), replace(calls.cost, node_size=node_size)
    memory = replace(calls.memory, node_size=node_size)
    made = replace(calls, hardware=hardware, cost=cost, memory=memory)
    return replace(planner, n_workers=n_nodes * node_size, calls=made)


def larger_clusters(planner: Planner) -> list[tuple[int, int]]:
    """Return larger clusters as (nodes, workers per node): larger nodes first, then 2**k and 3 * 2**k nodes.

    Empty on CPU, where more workers share the same memory.
    """
    n, size = planner.n_workers, planner.cluster.node_size
    if planner.calls.hardware.cores:
        return []
    found = []
    while n == size and 2 * size <= MAX_NODE_SIZE:
        n, size = 2 * n, 2 * size
        found.append((1, size))
    most = MAX_WORKER_FACTOR * planner.n_workers // size
    counts = sorted({factor << k for factor in (1, 3) for k in range(17)})
    return found + [(count, size) for count in counts if n // size < count <= most]


def changed_options(before: Planner, after: Planner, num_seqs_option: str) -> list[str]:
    """Return the options, as ``key=value``, by which the planner ``after`` differs from ``before``."""
    old, new = before.calls, after.calls
    words = []
    for option in (*MODEL_OPTIONS[:3], "optimizer.offload", *MODEL_OPTIONS[3:]):
        for name, role in new.cost.roles.items():
            was, now = (_value(of.cost.roles[name].spec, option) for of in (old, new))
            if was != now and role.starts_as is None:
                words.append(f"{name}.{option}={now}")
    words += [f"{name}.mb_spec.max_tokens_per_mb={limit.max_tokens_per_mb}" for name, limit in new.limits.items()
              if limit != old.limits[name]]  # fmt: skip
    if new.cost.sampling != old.cost.sampling and new.cost.sampling:
        words.append(f"{num_seqs_option}={new.cost.sampling.max_num_seqs}")
    if after.n_workers != before.n_workers:
        size = after.cluster.node_size
        words.append(f"n_nodes={after.n_workers // size} n_gpus_per_node={size}")
    return words


def _value(spec: ModelSpec, option: str) -> object:
    value = spec.optimizer.offload if option == "optimizer.offload" else vars(spec)[option]
    return value.value if isinstance(value, Recompute) else value


def may_fit(planner: Planner) -> bool:
    """Return False if weights, gradients and optimizer state exceed the memory of all workers, under any layout."""
    memory, graph = planner.calls.memory, planner.graph
    needed = sum(memory.resident(role, ParallelStrategy(), with_base=False).total
                 for role in graph.roles if role not in graph.offloaded)  # fmt: skip
    return needed <= planner.n_workers * planner.calls.capacity
