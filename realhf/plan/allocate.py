"""From the user's options to an execution plan: allocation strings, manual meshes, and the default heuristic."""

from collections.abc import Mapping

from realhf.api.config import ExperimentConfig, MFCConfig, ParallelConfig
from realhf.api.graph import Graph
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.plan import ExecutionPlan, MicroBatching, Placement
from realhf.base.errors import UserError, did_you_mean

MODES = "heuristic, manual, dN, or actor_gen:d2,*:d1"


def allocate(graph: Graph, config: ExperimentConfig, options: Mapping[str, MFCConfig]) -> ExecutionPlan:
    """Return the plan that ``config.allocation_mode`` asks for; ``UserError`` lists every layout that is impossible."""
    n_workers = config.n_nodes * config.n_gpus_per_node
    placements, problems = {}, []
    if n_workers < 1:
        raise UserError(f"n_nodes * n_gpus_per_node must be positive, got {config.n_nodes} * {config.n_gpus_per_node}")
    try:
        layouts = _layouts_of(config, graph, options, n_workers)
    except ValueError as error:
        raise UserError(f"allocation_mode={config.allocation_mode}: {error}") from error
    for name, layout in layouts.items():
        if config.allocation_mode != "manual":
            problems += _unread(name, options[name], config.allocation_mode)
        if isinstance(layout, str):
            problems.append(layout)
            continue
        wish = options[name].mb_spec
        if wish.n_mbs < 1 or wish.max_tokens_per_mb < 1:
            problems.append(f"{name}.mb_spec: n_mbs and max_tokens_per_mb must be positive, got {wish}")
        placements[name] = Placement(layout, MicroBatching(wish.n_mbs, wish.max_tokens_per_mb))
    if problems:
        raise UserError(problems)
    return ExecutionPlan(n_workers, placements)


def _layouts_of(
    config: ExperimentConfig, graph: Graph, options: Mapping[str, MFCConfig], n_workers: int
) -> dict[str, Layout | str]:
    """Return a layout, or the words for why there is none, for every MFC."""
    mode, names = config.allocation_mode, [m.name for m in graph.mfcs]
    if mode == "manual":
        return {name: _manual(name, options[name], config) for name in names}
    if mode == "heuristic":
        return {name: _first(ParallelStrategy(dp=n_workers), n_workers) for name in names}
    if mode == "search" or "vllm" in mode or "sglang" in mode:
        raise ValueError(f"this version has no such mode; use {MODES}")
    if ":" not in mode:
        if not any(letter.isdigit() for letter in mode):
            raise ValueError(f"there is no such mode; use {MODES}{did_you_mean(mode, ('heuristic', 'manual'))}")
        strategy = ParallelStrategy.parse(mode)
        if strategy.world != n_workers:
            raise ValueError(f"{strategy} needs {strategy.world} workers, n_nodes * n_gpus_per_node gives {n_workers}")
        return {name: _first(strategy, n_workers) for name in names}
    return _per_mfc(mode, names, n_workers)


def _per_mfc(mode: str, names: list[str], n_workers: int) -> dict[str, Layout | str]:
    entries: dict[str, ParallelStrategy] = {}
    for entry in mode.split(","):
        name, _, text = (part.strip() for part in entry.partition(":"))
        if name != "*" and name not in names:
            raise ValueError(f"'{name}' is no MFC of this experiment ({', '.join(names)}){did_you_mean(name, names)}")
        if name in entries:
            raise ValueError(f"'{name}' is given twice")
        entries[name] = ParallelStrategy.parse(text)
    if missing := [n for n in names if n not in entries and "*" not in entries]:
        raise ValueError(f"no strategy for {', '.join(missing)}; add '*:d{n_workers}' for the rest")
    layouts: dict[str, Layout | str] = {}
    for name in names:
        strategy = entries.get(name) or entries["*"]
        fits = strategy.world <= n_workers
        layouts[name] = _first(strategy, n_workers) if fits else (
            f"allocation_mode: {name}:{strategy} needs {strategy.world} workers, there are {n_workers}"
        )  # fmt: skip
    return layouts


def _first(strategy: ParallelStrategy, n_workers: int) -> Layout:
    """Lay a strategy out on the first workers."""
    return Layout(DeviceMesh(tuple(range(min(strategy.world, n_workers)))), strategy)


def _unread(name: str, wish: MFCConfig, mode: str) -> list[str]:
    """Say which options of an MFC this mode passes over."""
    given = {"device_mesh": wish.device_mesh is not None, "parallel": wish.parallel != ParallelConfig()}
    return [
        f"{name}.{option} is set, but allocation_mode={mode} does not read it; set allocation_mode=manual"
        for option, is_given in given.items()
        if is_given
    ]


def _manual(name: str, wish: MFCConfig, config: ExperimentConfig) -> Layout | str:
    parallel = wish.parallel
    try:
        strategy = ParallelStrategy(
            parallel.data_parallel_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        )
        text = wish.device_mesh
        n_workers = config.n_nodes * config.n_gpus_per_node
        mesh = (
            DeviceMesh.parse(text, config.n_nodes, config.n_gpus_per_node)
            if text
            else DeviceMesh(tuple(range(n_workers)))
        )
        return Layout(mesh, strategy)
    except ValueError as error:
        return f"{name}: {error}"
