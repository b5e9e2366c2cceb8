"""Compiles options into an execution plan: allocation strings, plan files and manual meshes."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from realhf.api.config import ExperimentConfig, MFCConfig, ModelSpec, ParallelConfig
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy, expert_degrees, is_expert_degree
from realhf.api.model_config import ModelConfig
from realhf.base.errors import UserError, did_you_mean
from realhf.plan.compile.call_degrees import call_problem, expert_problem, of_call
from realhf.plan.compile.check import contiguous_mesh, distance, nearest_strategy, strategy_problems
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.compile.plan_text import SUFFIX, read_call, read_plan, split_calls
from realhf.plan.compile.saving import NamedSaving, name_saving, saving_of

PLANNED = {"heuristic": "symmetric", **{rule: rule for rule in HEURISTICS}, "search": ""}
"""Allocation modes that the planner handles, and the heuristic of each."""
MODES = f"{', '.join(PLANNED)}, manual, d2t1p1, actor_gen:d2,*:d1, or FILE.json"
SERVERS = ("vllm", "sglang")
TOKENS = {"cpu": 4096, "cuda": 16384}
"""Default tokens per micro-batch by device: what fits in CPU caches; GPUs need larger matrix products."""
AXES = {"d": "dp", "t": "tp", "m": "tp", "c": "tp", "p": "pp", "e": "ep"}
Models = Mapping[str, ModelConfig]


@dataclass(frozen=True)
class _Assignment:
    """The strategy and mesh that the options request for an MFC; with an ``error``, the nearest that can be parsed."""

    strategy: ParallelStrategy
    mesh: DeviceMesh
    error: str = ""
    backend: Backend = Backend.native
    limits: Mapping[str, int] = field(default_factory=dict)  # given fields of the micro-batching
    saving: NamedSaving | None = None

    def problem(self, models: Collection[ModelConfig]) -> str:
        """Return why a call of these models cannot run with this layout, or an empty string."""
        world, size = self.strategy.world, len(self.mesh.ranks)
        problems = [f"its size is {world}, that of mesh {self.mesh} is {size}"] if world != size else []
        problems += [problem for model in models for problem in strategy_problems(model, self.strategy)]
        return self.error or (f"{self.strategy}: {', and '.join(problems)}" if problems else "")


Requests = tuple[dict[str, _Assignment], list[str]]  # requests by MFC name (or ``*``), and errors


def division_problems(mfcs: Sequence[MFC], options: Mapping[str, MFCConfig]) -> list[str]:
    """Return the values of ``prompts_per_call`` that training does not have, or that would have no effect."""
    problems = []
    for mfc in mfcs:
        size = options[mfc.name].prompts_per_call if mfc.name in options else None
        if size is not None and mfc.is_train:
            problems.append(f"{mfc.name}.prompts_per_call={size}: training takes all prompts of a step")
        elif size is not None and size > mfc.batch_size:
            problems.append(f"{mfc.name}.prompts_per_call={size}: a step has {mfc.batch_size} prompts")
    return problems


def micro_batching(option: MFCConfig, device: str) -> MicroBatching:
    """Return the micro-batching of a call on ``cpu`` or ``cuda``."""
    given = option.mb_spec.max_tokens_per_mb
    return MicroBatching(option.mb_spec.n_mbs, TOKENS[device] if given is None else given)


def allocate(
    graph: Graph, config: ExperimentConfig, options: Mapping[str, MFCConfig], models: Models, device: str,
    roles: Mapping[str, RoleSpec],
) -> ExecutionPlan:  # fmt: skip
    """Return the plan of ``config.allocation_mode``.

    ``models`` are the known architectures by role. Raises ``UserError`` with all layouts that cannot be parsed, do not
    match their mesh, or are invalid for their model, each with the nearest legal one, and with all memory savings that
    contradict the options of their role.
    """
    mode, n_workers = config.allocation_mode, config.n_nodes * config.n_gpus_per_node
    is_manual = mode == "manual"
    requests, problems = _manual(options, config) if is_manual else _from_text(config, graph, models)
    placements = {}
    for mfc in graph.mfcs:
        option = options[mfc.name]
        given = {"device_mesh": option.device_mesh is not None, "parallel": option.parallel != ParallelConfig()}
        problems += [f"{mfc.name}.{field} is set, but allocation_mode={mode} ignores it; set allocation_mode=manual"
                     for field, is_given in given.items() if is_given and not is_manual]  # fmt: skip
        if (request := requests.get(mfc.name)) is None:
            continue
        known = [model for role, model in models.items() if role == mfc.role]
        if problem := call_problem(mfc, request.strategy, roles.get(mfc.role or ""), request.backend):
            problems.append(f"{mfc.name}: {problem}")
        elif problem := request.problem(known):
            near = nearest_strategy(request.strategy, len(request.mesh.ranks), known)
            shown = _as_options(mfc.name, option.parallel, near) if is_manual else str(near)
            problems.append(f"{mfc.name}: {problem}; nearest legal: {shown}")
        else:
            layout = Layout(request.mesh, request.strategy)
            batching = replace(micro_batching(option, device), **request.limits)
            saving, problem = saving_of(mfc, request.saving, roles, device) if request.saving else (None, "")
            problems += [f"{mfc.name}: {problem}"] if problem else []
            placements[mfc.name] = Placement(layout, batching, request.backend, saving)
    if problems:
        raise UserError(problems)
    return with_backends(ExecutionPlan(n_workers, placements), graph, options)


def with_backends(plan: ExecutionPlan, graph: Graph, options: Mapping[str, MFCConfig]) -> ExecutionPlan:
    """Return the plan with the configured backends; raises ``UserError`` if a call does not support its backend."""
    placements, problems = dict(plan.placements), []
    for mfc in graph.mfcs:
        placement = placements[mfc.name]
        if placement.backend is Backend.native:
            placement = placements[mfc.name] = replace(placement, backend=options[mfc.name].backend)
        if placement.backend is Backend.native:
            continue
        name, strategy = f"{mfc.name}.backend={placement.backend.value}", placement.layout.strategy
        if placement.backend is Backend.megatron:
            problems.append(f"{name}: megatron-core is set per role, not per call; set {mfc.role}.backend=megatron")
        elif mfc.kind is not Kind.GENERATE:
            problems.append(f"{name}: this backend only generates, but this call does not generate")
        elif strategy.pp > 1:
            near = ParallelStrategy(strategy.dp * strategy.pp, strategy.tp)
            problem = f"this backend has no pipeline stages, {strategy} has {strategy.pp}"
            problems.append(f"{name}: {problem}; nearest legal: {near}")
        elif problem := expert_problem(mfc, strategy, RoleSpec(ModelSpec()), placement.backend):
            problems.append(f"{name}: {problem}")
    if problems:
        raise UserError(problems)
    return replace(plan, placements=placements)


def _from_text(config: ExperimentConfig, graph: Graph, models: Models) -> Requests:
    """Parse an allocation string; for planner modes, return data parallelism over all workers as a placeholder."""
    mode, n_workers = config.allocation_mode, config.n_nodes * config.n_gpus_per_node
    names = [mfc.name for mfc in graph.mfcs]
    given, problems = dict[str, _Assignment](), list[str]()
    if mode in PLANNED:
        given = {"*": _Assignment(ParallelStrategy(dp=n_workers), contiguous_mesh(n_workers))}
    elif mode.endswith(SUFFIX):
        given, problems = _from_file(mode, graph, n_workers)
    elif any(server in mode for server in SERVERS) and ("+" in mode or ":" not in mode):
        return _with_server(mode, graph, config, models)
    elif not any(letter.isdigit() for letter in mode):
        problems = [f"unknown mode; use {MODES}{did_you_mean(mode, (*PLANNED, 'manual'))}"]
    elif ":" in mode:
        given, problems = _per_mfc(mode, names, config, models.values())
    else:
        given, problems = _everywhere(mode, n_workers, models.values())
    requests = dict[str, _Assignment]()
    for mfc in graph.mfcs:
        if mfc.name in given:
            requests[mfc.name] = given[mfc.name]
        elif rest := given.get("*"):
            requests[mfc.name] = _of_rest(rest, mfc, models)
    if (rest := given.get("*")) and rest.saving and not any(m.is_train for m in graph.mfcs if m.name not in given):
        problems.append(f"'{rest.saving}' is for training calls, and none of the other calls trains; leave it out")
    return requests, [f"allocation_mode={mode}: {problem}" for problem in problems]


def _of_rest(rest: _Assignment, mfc: MFC, models: Models) -> _Assignment:
    """Return what ``*`` requests for a call; its memory saving is that of calls that train."""
    model = next((model for role, model in models.items() if role == mfc.role), None)
    rest = replace(rest, strategy=of_call(mfc, rest.strategy, model))
    return rest if mfc.is_train else replace(rest, saving=None)


def _from_file(path: str, graph: Graph, n_workers: int) -> Requests:
    """Read a plan file. The placements of evaluation calls follow from those of the others, and are ignored."""
    plan, names = read_plan(path), [mfc.name for mfc in graph.mfcs]
    known = {*names, *(mfc.name for mfc in graph.evaluation)}
    problems = [f"unknown call '{name}'; this experiment has {', '.join(names)}{did_you_mean(name, names)}"
                for name in plan.placements if name not in known]  # fmt: skip
    problems += [f"the plan has no placement of {name}" for name in names if name not in plan.placements]
    if plan.n_workers != n_workers:
        problems.append(f"the plan is for {plan.n_workers} workers, n_nodes * n_gpus_per_node is {n_workers}")
    requests = {}
    for name in names if not problems else []:
        placement = plan[name]
        mesh, limits = placement.layout.mesh, vars(placement.micro_batching)
        error = f"worker {max(mesh.ranks)} does not exist" if max(mesh.ranks) >= n_workers else ""
        saving = name_saving(placement.saving) if placement.saving else None
        requests[name] = _Assignment(placement.layout.strategy, mesh, error, placement.backend, limits, saving)
    return requests, problems


def _parse(text: str) -> tuple[ParallelStrategy, str]:
    """Parse a strategy; return (strategy, error), with the degrees that could be parsed if it is malformed."""
    try:
        return ParallelStrategy.parse(text), ""
    except ValueError as error:
        degrees = re.findall(r"([dtmpec])([1-9]\d*)", text.lower())
        found = {AXES[letter]: int(number) for letter, number in degrees}
        dp, tp, ep = (found.get(axis, 1) for axis in ("dp", "tp", "ep"))
        ep = min(expert_degrees(dp, tp), key=lambda legal: abs(legal - ep))
        return ParallelStrategy(dp, tp, found.get("pp", 1), ep=ep), str(error)  # without c


def _everywhere(text: str, n_workers: int, models: Collection[ModelConfig]) -> Requests:
    """Parse ``d2t1p1``: every call uses all workers."""
    strategy, problem = _parse(text)
    if not problem and strategy.world != n_workers:
        problem = f"its size is {strategy.world}, n_nodes * n_gpus_per_node is {n_workers}"
    if problem:
        return {}, [f"{problem}; nearest legal: {nearest_strategy(strategy, n_workers, models)}"]
    return {"*": _Assignment(strategy, contiguous_mesh(n_workers))}, []


def _per_mfc(text: str, names: Sequence[str], config: ExperimentConfig, models: Collection[ModelConfig]) -> Requests:
    """Parse ``actor_gen:d2@2-3,*:d1``: without a mesh, a call uses the first workers."""
    entries, requests, problems = split_calls(text), dict[str, _Assignment](), list[str]()
    n_workers = config.n_nodes * config.n_gpus_per_node
    for number, (name, placement) in enumerate(entries):
        if name != "*" and name not in names:
            problems.append(f"unknown call '{name}'; this experiment has {', '.join(names)}{did_you_mean(name, names)}")
        elif name in (before for before, _ in entries[:number]):
            problems.append(f"call '{name}' is given twice")
        else:
            call = read_call(placement)
            strategy, problem = _parse(call.strategy)
            if problem:
                problems.append(f"{name}: {problem}; nearest legal: {nearest_strategy(strategy, n_workers, models)}")
                continue
            mesh, error = contiguous_mesh(min(strategy.world, n_workers)), call.error
            try:
                mesh = DeviceMesh.parse(call.mesh, config.n_nodes, config.n_gpus_per_node) if call.mesh else mesh
            except ValueError as invalid:
                error = error or str(invalid)
            if error:
                problems.append(f"{name}: {error}")
            else:
                requests[name] = _Assignment(strategy, mesh, "", call.backend, call.limits, call.saving)
    given = {name for name, _ in entries}
    if missing := [name for name in names if not given & {name, "*"}]:
        problems.append(f"no strategy for {', '.join(missing)}; add '*:d{n_workers}' for the rest")
    return requests, problems


def _with_server(mode: str, graph: Graph, config: ExperimentConfig, models: Models) -> Requests:
    """Parse ``vllm.d4t1p1+d2t2p1`` (in any order): generation on separate workers."""
    n_workers = config.n_nodes * config.n_gpus_per_node
    halves = sorted((half.strip() for half in mode.split("+")), key=lambda half: half.partition(".")[0] not in SERVERS)
    backend, _, text = halves[0].partition(".")
    generating = [mfc for mfc in graph.mfcs if mfc.kind is Kind.GENERATE]
    where = f"allocation_mode={mode}:"
    if len(halves) != 2 or backend not in SERVERS or len(generating) != 1:
        problem = "an inference server for the one generation call is written like vllm.d4t1p1+d2t2p1"
        return {}, [f"{where} {problem}; use {MODES}"]
    names = [mfc.name for mfc in graph.mfcs if mfc not in generating]
    server, error = _parse(text)
    problems, entries = [error] if error else [], dict[str, _Assignment]()
    if is_list := ":" in halves[1]:
        entries, more = _per_mfc(halves[1], names, config, models.values())
        problems += more
        if "@" in halves[1]:
            problems.append("workers after @ cannot be combined with +; write vllm.d4t1p1@0-3 as the layout of a call")
    else:
        strategy, error = _parse(halves[1])
        entries["*"] = _Assignment(strategy, contiguous_mesh(strategy.world))
        problems += [error] if error else []
    rest = max((entry.strategy for entry in entries.values()), key=lambda s: s.world, default=ParallelStrategy())
    if server.pp > 1:
        problems.append(f"an inference server has no pipeline stages, {server} has {server.pp}")
    size = server.world + rest.world
    if size > n_workers or (size < n_workers and not is_list):
        problems.append(f"it needs {server.world} + {rest.world} separate workers, there are {n_workers}")
    own = [model for role, model in models.items() if role == generating[0].role]
    wanted = [(server, model) for model in own] + [(rest, model) for model in models.values()]
    problems += dict.fromkeys(problem for strategy, model in wanted for problem in strategy_problems(model, strategy))
    if problems:
        folded = ParallelStrategy(server.dp * server.pp, server.tp)
        near = _nearest_split(backend, folded, rest, n_workers, own, models.values())
        return {}, [f"{where} {', and '.join(problems)}; nearest legal: {near}"]
    if backend not in {known.value for known in Backend}:
        return {}, [f"{where} backend {backend} is not supported; use {MODES}"]
    requests = {generating[0].name: _Assignment(server, contiguous_mesh(server.world), backend=Backend(backend))}
    for name in names:
        entry = entries.get(name) or _of_rest(entries["*"], graph[name], models)
        requests[name] = replace(entry, mesh=contiguous_mesh(entry.strategy.world, server.world))
    return requests, []


def _nearest_split(
    backend: str, server: ParallelStrategy, rest: ParallelStrategy, n_workers: int, own: Collection[ModelConfig],
    models: Collection[ModelConfig],
) -> str:  # fmt: skip
    if n_workers == 1:
        return f"n_gpus_per_node={server.world + rest.world}"
    splits = [
        (nearest_strategy(server, n, own), nearest_strategy(rest, n_workers - n, models)) for n in range(1, n_workers)
    ]
    first, second = min(splits, key=lambda split: distance(split[0], server) * distance(split[1], rest))
    return f"{backend}.{first}+{second}"


def _manual(options: Mapping[str, MFCConfig], config: ExperimentConfig) -> Requests:
    n_workers = config.n_nodes * config.n_gpus_per_node
    requests, problems = {}, []
    for name, option in options.items():
        parallel, mesh = option.parallel, contiguous_mesh(n_workers)
        strategy, error = _degrees(parallel)
        try:
            if option.device_mesh:
                mesh = DeviceMesh.parse(option.device_mesh, config.n_nodes, config.n_gpus_per_node)
        except ValueError as invalid:
            problems.append(f"{name}: {invalid}")
            mesh = contiguous_mesh(min(strategy.world, n_workers))  # so that other errors are reported too
        requests[name] = _Assignment(strategy, mesh, error)
    return requests, problems


def _degrees(given: ParallelConfig) -> tuple[ParallelStrategy, str]:
    """Return the strategy of the options, or the nearest that is possible and the problem."""
    degrees = [*vars(given).values()]
    dp, tp, pp, ep, cp, vpp = (max(1, degree) for degree in degrees)
    if min(degrees) < 1:
        named = [f"{letter}{n}" for letter, n in zip("dtpecv", degrees, strict=True) if letter in "dtp" or n != 1]
        return ParallelStrategy(dp, tp, pp), f"parallel degrees must be positive, got {''.join(named)}"
    if vpp > 1 and pp == 1:
        error = f"virtual_pipeline_parallel_size={vpp} needs pipeline_parallel_size of at least 2"
        return ParallelStrategy(dp, tp), error
    if cp > 1:
        alone = tp == ep == 1
        error = f"context_parallel_size={cp} replaces the tensor- and expert-parallel sizes; set them to 1"
        return ParallelStrategy(dp, cp, pp, vpp=vpp, context=True), "" if alone else error
    if is_expert_degree(ep, dp, tp):
        return ParallelStrategy(dp, tp, pp, ep=ep, vpp=vpp), ""
    legal = expert_degrees(dp, tp)
    error = f"expert_parallel_size={ep} is none of {', '.join(map(str, legal))}"
    return ParallelStrategy(dp, tp, pp, ep=min(legal, key=lambda degree: abs(degree - ep)), vpp=vpp), error


def _as_options(name: str, given: ParallelConfig, near: ParallelStrategy) -> str:
    cp = near.tp // near.weight_tp
    degrees = vars(ParallelConfig(near.dp, near.weight_tp, near.pp, near.ep, cp, near.vpp)).items()
    return " ".join(f"{name}.parallel.{field}={value}" for field, value in degrees if value != vars(given)[field])
