"""The planner of an experiment: its graph and models, what its rows will look like, and the machine it is for."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from realhf.api.codec import from_json
from realhf.api.config import ExperimentConfig, GenerationConfig
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import Graph
from realhf.api.machine import Hardware, Workload
from realhf.api.model_config import ModelConfig
from realhf.base.errors import UserError
from realhf.base.paths import KERNELS
from realhf.data.encode import EncodedRows
from realhf.data.order import rows_at
from realhf.plan.compile.allocate import PLANNED, micro_batching
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.cost.activation_memory import AnalyticMemory
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.hardware import read_hardware
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.cost.profile import Profile, ProfiledSpeed
from realhf.plan.cost.roofline import Roofline
from realhf.plan.cost.speed import Footprint, Speed
from realhf.plan.cost.traffic import RING_BYTES
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner

N_POSITIONS = 4096
"""Rows of the data set that a prediction looks at."""


@dataclass(frozen=True)
class MachineModel:
    """What a plan is for: limits, speed, and in words where both are from."""

    hardware: Hardware
    speed: Speed
    footprint: Footprint
    source: str
    is_measured: bool = False


def planned(planner: Planner, config: ExperimentConfig) -> ExecutionPlan:
    """Return the plan of a mode that is a rule, or a search."""
    if config.allocation_mode == "search":
        return planner.search(config.seed, config.planner.budget_s).plan
    return planner.by_heuristic(PLANNED[config.allocation_mode])


def replanned(planner: Planner, mode: str, plan: ExecutionPlan) -> ExecutionPlan:
    """Return what an allocation mode that gave ``plan`` gives for another planner; of a search, what a rule does."""
    if mode in PLANNED:
        plans = [planner.by_heuristic(rule) for rule in (HEURISTICS if mode == "search" else [PLANNED[mode]])]
        return next((some for some in plans if planner.fits(some)), plans[0])
    limits = planner.calls.limits
    return replace(plan, placements={n: replace(p, micro_batching=limits[n]) for n, p in plan.placements.items()})


def machine_of(
    config: ExperimentConfig, device: str, models: Mapping[str, ModelConfig], roles: Mapping[str, RoleSpec]
) -> MachineModel:
    """Return the machine that the options name: as it was measured, or by its limits where no profile can be used.

    Why a profile is passed over is said in ``source``.
    """
    options, limits = config.planner, limits_of(config, device)
    file = Path(options.profile or Path(config.fileroot) / "profile.json")
    if options.hardware and options.profile:
        raise UserError("planner.hardware and planner.profile are both set; predictions are from one of them")
    if options.profile and not file.is_file():
        raise UserError(f"planner.profile={file}: there is no such file; make it with realhf profile")
    if options.hardware or not file.is_file():
        return limits
    profile = _read_profile(file)
    measured = ProfiledSpeed(profile)
    unknown = [role for role, model in models.items() if not measured.knows(model, bool(roles[role].spec.bf16))]
    problems = [f"does not know the model of {', '.join(unknown)}"] if unknown else []
    if profile.machine.device != device:
        problems.append(f"is of a machine with device={profile.machine.device}")
    if config.n_nodes > 1:
        problems.append("knows no links between nodes")
    if problems:
        return replace(limits, source=f"{limits.source} (the profile {file} {' and '.join(problems)})")
    return MachineModel(
        replace(limits.hardware, reserved=profile.resident), measured, measured, f"the profile {file}", True
    )


def limits_of(config: ExperimentConfig, device: str) -> MachineModel:
    """Return the machine that the options name, by its limits."""
    options = config.planner
    name = options.hardware or ("cpu" if device == "cpu" else "h100")
    hardware = read_hardware(name, config.n_gpus_per_node)
    if name == "cpu":
        threads = config.threads_per_worker or 1
        share = _memory_of_this_machine() / config.n_gpus_per_node
        hardware = replace(hardware, memory=share, cores=max(1, (os.cpu_count() or 1) // threads))
    if options.memory_gb is not None:
        hardware = replace(hardware, memory=options.memory_gb * 1e9)
    if hardware.usable <= hardware.reserved:
        has, needs = hardware.memory / 1e9, hardware.reserved / 1e9
        raise UserError(f"a worker has {has:.3g} GB and needs {needs:.3g} GB before it has any model: "
                        "take fewer workers, or set planner.memory_gb")  # fmt: skip
    return MachineModel(hardware, Roofline(hardware), AnalyticMemory(device), f"the limits of {name}")


def _read_profile(file: Path) -> Profile:
    try:
        return from_json(file.read_text(), Profile)
    except Exception as error:  # whatever is in a file that is no profile
        raise UserError(f"planner.profile={file} is no profile ({type(error).__name__}: {error}); make it with realhf "
                        "profile") from error  # fmt: skip


def _memory_of_this_machine() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def workload_of(
    config: ExperimentConfig, task: Task, rows: EncodedRows | None, sampling: GenerationConfig | None, samples: int
) -> Workload:
    """Return what the rows of a run will look like: those of the data set in their order, answers as long as expected.

    Without data (None) every prompt has the longest length that is allowed.
    """
    batch = config.dataset.train_bs_n_seqs
    lengths: list[tuple[int, ...]]
    if rows is None:
        lengths = [(config.dataset.max_prompt_len if sampling else config.dataset.max_seqlen,)]
    else:
        positions = rows_at(config.seed, len(rows), 0, min(N_POSITIONS, 3 * batch), config.dataset.shuffle)
        read = [rows[i] for i in positions]
        if sampling:
            lengths = [(len(row.prompt),) for row in read]
        else:
            most = {Task.pairs: 2 * config.dataset.max_pairs_per_prompt, Task.ranked: config.dataset.max_responses}
            lengths = [row.sequence_lengths[: most.get(task, 1)] for row in read]
    if sampling is None:
        return Workload(tuple(lengths))
    return Workload(tuple(lengths), answer_lengths(config.planner.new_tokens, sampling.max_new_tokens), samples)


def answer_lengths(mean: float | None, longest: int, n: int = 16) -> tuple[int, ...]:
    """Return lengths that stand for all answers: evenly spread about the mean, none beyond the longest.

    They alternate, so that the samples of a prompt differ.
    """
    if mean is None or mean >= longest:
        return (longest,)
    spread = min(mean - 1, longest - mean)
    ramp = [round(mean + spread * (2 * k / (n - 1) - 1)) for k in range(n)]
    return tuple(max(1, ramp[k * 7 % n]) for k in range(n))


def planner_of(
    experiment: Experiment,
    graph: Graph,
    models: Mapping[str, ModelConfig],
    rows: EncodedRows | None,
    machine: MachineModel,
    device: str,
) -> Planner:
    """Return the planner of an experiment on a machine."""
    config, sampling, roles = experiment.config, experiment.sampling_options(), experiment.roles()
    workload = workload_of(config, experiment.task, rows, sampling, experiment.samples_per_prompt())
    shares = device == "cpu" and KERNELS.exists()  # what computes a prompt once for all its rows is compiled for CPU
    node = config.n_gpus_per_node
    cost = CostModel(graph, models, roles, machine.speed, workload, node, sampling, shares)
    # a worker's own ring is taken when it joins others of its host (comm/shared_memory.py)
    reserved = machine.hardware.reserved + (RING_BYTES if device == "cpu" and node > 1 else 0)
    memory = MemoryModel(graph, models, roles, workload, machine.footprint, reserved, device, sampling, shares, node,
                         config.vllm.kv_cache_gb * 2**30)  # fmt: skip
    limits = {name: micro_batching(option, device) for name, option in experiment.placements().items()}
    n_workers = config.n_nodes * config.n_gpus_per_node
    calls = Candidates(cost, memory, machine.hardware, config.dataset.train_bs_n_seqs, limits)
    return Planner(graph, calls, n_workers, config.max_staleness)
