"""From the user's options to an execution plan: allocation strings and manual meshes."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from realhf.api.config import ExperimentConfig, MFCConfig, ParallelConfig
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.graph import Graph, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.base.errors import UserError, did_you_mean
from realhf.plan.compile.check import distance, nearest_strategy, strategy_problems
from realhf.plan.compile.heuristic import HEURISTICS

PLANNED = {"heuristic": "symmetric", **{rule: rule for rule in HEURISTICS}, "search": ""}
"""Modes that the planner decides, and the rule behind each."""
MODES = f"{', '.join(PLANNED)}, manual, d2t1p1, or actor_gen:d2,*:d1"
SERVERS = ("vllm", "sglang")
TOKENS = {"cpu": 4096, "cuda": 16384}
"""Of a micro-batch, by device: as many as stay in the caches of a CPU; a GPU wants large products."""
AXES = {"d": "dp", "t": "tp", "m": "tp", "p": "pp"}
Models = Mapping[str, ModelConfig]
Entries = tuple[dict[str, ParallelStrategy], list[str]]
"""Strategies by the name of an MFC or ``*``, and what could not be read."""


@dataclass(frozen=True)
class _Wish:
    """A strategy and its workers as the options name them; if ``why``, the nearest that could be made of these."""

    strategy: ParallelStrategy
    mesh: DeviceMesh
    why: str = ""
    backend: Backend = Backend.native

    def misfit(self, models: Collection[ModelConfig]) -> str:
        """Say why a call of these models cannot run like this; empty when it can."""
        world, size = self.strategy.world, len(self.mesh.ranks)
        why = [f"its size is {world}, that of mesh {self.mesh} is {size}"] if world != size else []
        why += [problem for model in models for problem in strategy_problems(model, self.strategy)]
        return self.why or (f"{self.strategy}: {', and '.join(why)}" if why else "")


Wishes = tuple[dict[str, _Wish], list[str]]
"""Where MFCs shall run, by name, and what could not be read."""


def micro_batching(option: MFCConfig, device: str) -> MicroBatching:
    """Return how a call's rows are cut on ``cpu`` or ``cuda``."""
    given = option.mb_spec.max_tokens_per_mb
    return MicroBatching(option.mb_spec.n_mbs, TOKENS[device] if given is None else given)


def allocate(
    graph: Graph, config: ExperimentConfig, options: Mapping[str, MFCConfig], models: Models, device: str
) -> ExecutionPlan:
    """Return the plan that ``config.allocation_mode`` asks for.

    ``models`` are the architectures by role, as far as they are known. ``UserError`` lists every layout that cannot be
    read, does not fit its workers, or is not allowed by its model, each with the nearest legal one.
    """
    mode, n_workers = config.allocation_mode, config.n_nodes * config.n_gpus_per_node
    if n_workers < 1:
        raise UserError(f"n_nodes * n_gpus_per_node must be positive, got {config.n_nodes} * {config.n_gpus_per_node}")
    is_manual = mode == "manual"
    wishes, problems = _manual(options, config) if is_manual else _from_text(mode, graph, n_workers, models)
    placements = {}
    for mfc in graph.mfcs:
        option = options[mfc.name]
        if not is_manual:
            problems += _unread(mfc.name, option, mode)
        batching = micro_batching(option, device)
        if batching.n_mbs < 1 or batching.max_tokens_per_mb < 1:
            problems.append(f"{mfc.name}.mb_spec: n_mbs and max_tokens_per_mb must be positive, got {option.mb_spec}")
        if (wish := wishes.get(mfc.name)) is None:
            continue
        known = [model for role, model in models.items() if role == mfc.role]
        if misfit := wish.misfit(known):
            near = nearest_strategy(wish.strategy, len(wish.mesh.ranks), known)
            shown = _as_options(mfc.name, option.parallel, near) if is_manual else str(near)
            problems.append(f"{mfc.name}: {misfit}; nearest legal: {shown}")
        else:
            placements[mfc.name] = Placement(Layout(wish.mesh, wish.strategy), batching, wish.backend)
    if problems:
        raise UserError(problems)
    return with_backends(ExecutionPlan(n_workers, placements), graph, options)


def with_backends(plan: ExecutionPlan, graph: Graph, options: Mapping[str, MFCConfig]) -> ExecutionPlan:
    """Return the plan with the backends that options name; ``UserError`` where a call cannot have its own."""
    placements, problems = dict(plan.placements), []
    for mfc in graph.mfcs:
        placement = placements[mfc.name]
        if placement.backend is Backend.native:
            placement = placements[mfc.name] = replace(placement, backend=options[mfc.name].backend)
        if placement.backend is Backend.native:
            continue
        name, strategy = f"{mfc.name}.backend={placement.backend.value}", placement.layout.strategy
        if placement.backend is Backend.megatron:
            problems.append(f"{name}: it is a role that megatron-core trains; set {mfc.role}.backend=megatron")
        elif mfc.kind is not Kind.GENERATE:
            problems.append(f"{name}: it generates, and this call does not")
        elif strategy.pp > 1:
            near = ParallelStrategy(strategy.dp * strategy.pp, strategy.tp)
            problems.append(f"{name}: it has no pipeline stages, {strategy} has {strategy.pp}; nearest legal: {near}")
    if problems:
        raise UserError(problems)
    return replace(plan, placements=placements)


def _from_text(mode: str, graph: Graph, n_workers: int, models: Models) -> Wishes:
    """Read an allocation string; for what the planner decides, data parallelism over all workers stands in."""
    names = [mfc.name for mfc in graph.mfcs]
    given: dict[str, ParallelStrategy] = {}
    if mode in PLANNED:
        given, problems = {"*": ParallelStrategy(dp=n_workers)}, []
    elif any(server in mode for server in SERVERS):
        return _with_server(mode, graph, n_workers, models)
    elif not any(letter.isdigit() for letter in mode):
        problems = [f"there is no such mode; use {MODES}{did_you_mean(mode, (*PLANNED, 'manual'))}"]
    elif ":" in mode:
        given, problems = _per_mfc(mode, names, n_workers, models.values())
    else:
        given, problems = _everywhere(mode, n_workers, models.values())
    found = {name: given[name if name in given else "*"] for name in names if name in given or "*" in given}
    wishes = {name: _Wish(strategy, _first(min(strategy.world, n_workers))) for name, strategy in found.items()}
    return wishes, [f"allocation_mode={mode}: {problem}" for problem in problems]


def _first(n_workers: int) -> DeviceMesh:
    return _run(0, n_workers)


def _run(first: int, n_workers: int) -> DeviceMesh:
    return DeviceMesh(tuple(range(first, first + n_workers)))


def _read(text: str) -> tuple[ParallelStrategy, str]:
    """Read a strategy; of a malformed one, return what can be made of it, and why it is none."""
    try:
        return ParallelStrategy.parse(text), ""
    except ValueError as error:
        degrees = re.findall(r"([dtmp])([1-9]\d*)", text.lower())
        return ParallelStrategy(**{AXES[letter]: int(number) for letter, number in degrees}), str(error)


def _everywhere(text: str, n_workers: int, models: Collection[ModelConfig]) -> Entries:
    """Read ``d2t1p1``: every call has all workers."""
    strategy, problem = _read(text)
    if not problem and strategy.world != n_workers:
        problem = f"its size is {strategy.world}, n_nodes * n_gpus_per_node is {n_workers}"
    if problem:
        return {}, [f"{problem}; nearest legal: {nearest_strategy(strategy, n_workers, models)}"]
    return {"*": strategy}, []


def _per_mfc(text: str, names: Sequence[str], n_workers: int, models: Collection[ModelConfig]) -> Entries:
    """Read ``actor_gen:d2,*:d1``: each call has the first workers."""
    entries = [tuple(part.strip() for part in entry.partition(":")[::2]) for entry in text.split(",")]
    strategies, problems = {}, []
    for place, (name, wish) in enumerate(entries):
        if name != "*" and name not in names:
            problems.append(f"'{name}' is no MFC of this experiment ({', '.join(names)}){did_you_mean(name, names)}")
        elif name in (before for before, _ in entries[:place]):
            problems.append(f"'{name}' is given twice")
        else:
            strategies[name], problem = _read(wish)
            if problem:
                near = nearest_strategy(strategies.pop(name), n_workers, models)
                problems.append(f"{name}: {problem}; nearest legal: {near}")
    given = {name for name, _ in entries}
    if missing := [name for name in names if not given & {name, "*"}]:
        problems.append(f"no strategy for {', '.join(missing)}; add '*:d{n_workers}' for the rest")
    return strategies, problems


def _with_server(mode: str, graph: Graph, n_workers: int, models: Models) -> Wishes:
    """Read ``vllm.d4t1p1+d2t2p1``, or the halves turned: generation on workers of its own, the rest on others."""
    halves = sorted((half.strip() for half in mode.split("+")), key=lambda half: half.partition(".")[0] not in SERVERS)
    backend, _, text = halves[0].partition(".")
    generating = [mfc for mfc in graph.mfcs if mfc.kind is Kind.GENERATE]
    where = f"allocation_mode={mode}:"
    if len(halves) != 2 or backend not in SERVERS or len(generating) != 1:
        return {}, [f"{where} a server for the one call that generates is written like vllm.d4t1p1+d2t2p1; use {MODES}"]
    names = [mfc.name for mfc in graph.mfcs if mfc not in generating]
    server, unread = _read(text)
    problems, entries = [unread] if unread else [], dict[str, ParallelStrategy]()
    if is_list := ":" in halves[1]:
        entries, more = _per_mfc(halves[1], names, n_workers, models.values())
        problems += more
    else:
        entries["*"], unread = _read(halves[1])
        problems += [unread] if unread else []
    rest = max(entries.values(), key=lambda strategy: strategy.world, default=ParallelStrategy())
    if server.pp > 1:
        problems.append(f"a server has no pipeline stages, {server} has {server.pp}")
    size = server.world + rest.world
    if size > n_workers or (size < n_workers and not is_list):
        problems.append(f"without overlap it needs {server.world} + {rest.world} workers, there are {n_workers}")
    own = [model for role, model in models.items() if role == generating[0].role]
    wanted = [(server, model) for model in own] + [(rest, model) for model in models.values()]
    problems += dict.fromkeys(problem for strategy, model in wanted for problem in strategy_problems(model, strategy))
    if problems:
        folded = ParallelStrategy(server.dp * server.pp, server.tp)
        near = _nearest_split(backend, folded, rest, n_workers, own, models.values())
        return {}, [f"{where} {', and '.join(problems)}; nearest legal: {near}"]
    if backend not in {known.value for known in Backend}:
        return {}, [f"{where} backend {backend} is not in this version; use {MODES}"]
    found = {generating[0].name: _Wish(server, _run(0, server.world), backend=Backend(backend))}
    for name in names:
        strategy = entries[name if name in entries else "*"]
        found[name] = _Wish(strategy, _run(server.world, strategy.world))
    return found, []


def _nearest_split(
    backend: str, server: ParallelStrategy, rest: ParallelStrategy, n_workers: int, own: Collection[ModelConfig],
    models: Collection[ModelConfig],
) -> str:  # fmt: skip
    """Return what to type for a server and a rest that share all workers out."""
    if n_workers == 1:
        return f"n_gpus_per_node={server.world + rest.world}"
    splits = [
        (nearest_strategy(server, n, own), nearest_strategy(rest, n_workers - n, models)) for n in range(1, n_workers)
    ]
    first, second = min(splits, key=lambda split: distance(split[0], server) * distance(split[1], rest))
    return f"{backend}.{first}+{second}"


def _unread(name: str, option: MFCConfig, mode: str) -> list[str]:
    """Say which options of an MFC this mode passes over."""
    given = {"device_mesh": option.device_mesh is not None, "parallel": option.parallel != ParallelConfig()}
    return [
        f"{name}.{field} is set, but allocation_mode={mode} does not read it; set allocation_mode=manual"
        for field, is_given in given.items()
        if is_given
    ]


def _manual(options: Mapping[str, MFCConfig], config: ExperimentConfig) -> Wishes:
    """Read every MFC's own mesh and degrees."""
    n_workers = config.n_nodes * config.n_gpus_per_node
    wishes, problems = {}, []
    for name, option in options.items():
        parallel, mesh = option.parallel, _first(n_workers)
        degrees = (parallel.data_parallel_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        strategy = ParallelStrategy(*(max(1, degree) for degree in degrees))
        try:
            if option.device_mesh:
                mesh = DeviceMesh.parse(option.device_mesh, config.n_nodes, config.n_gpus_per_node)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            mesh = _first(min(strategy.world, n_workers))  # one that fits: what else is wrong is still said
        why = "" if min(degrees) > 0 else "parallel degrees must be positive, got d{}t{}p{}".format(*degrees)
        wishes[name] = _Wish(strategy, mesh, why)
    return wishes, problems


def _as_options(name: str, given: ParallelConfig, near: ParallelStrategy) -> str:
    """Return what to type for a strategy."""
    wanted = vars(ParallelConfig(near.dp, near.tp, near.pp)).items()
    return " ".join(f"{name}.parallel.{field}={value}" for field, value in wanted if value != vars(given)[field])
