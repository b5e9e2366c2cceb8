"""The planner of an experiment, with its cost model, its expected workload and its machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from realhf.api.codec import from_json
from realhf.api.config import ExperimentConfig, GenerationConfig
from realhf.api.config.choices import Device
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import Graph
from realhf.api.machine import Hardware, Workload
from realhf.api.model_config import ModelConfig
from realhf.base import native
from realhf.base.errors import UserError
from realhf.base.host_memory import host_bytes
from realhf.data.encode import EncodedRows
from realhf.data.order import rows_at
from realhf.plan.compile.allocate import PLANNED, micro_batching
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.hardware import read_hardware
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.cost.profile import Profile, ProfiledSpeed
from realhf.plan.cost.roofline import AnalyticMemory, Roofline
from realhf.plan.cost.speed import Footprint, Speed
from realhf.plan.cost.traffic import RING_BYTES
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner

MAX_ROWS = 4096  # of the dataset in the workload of a prediction


@dataclass(frozen=True)
class MachineModel:
    """Hardware, speed and memory models of a machine; ``source`` describes their origin."""

    hardware: Hardware
    speed: Speed
    footprint: Footprint
    source: str
    is_measured: bool = False


def plan_for_mode(planner: Planner, config: ExperimentConfig) -> ExecutionPlan:
    if config.allocation_mode == "search":
        return planner.search(config.seed, config.planner.budget_s).plan
    return planner.by_heuristic(PLANNED[config.allocation_mode])


def replan(planner: Planner, mode: str, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan of an allocation mode for a modified planner, where ``plan`` was that of the original one.

    A search is approximated by the heuristics.
    """
    if mode in PLANNED:
        plans = [planner.by_heuristic(rule) for rule in (HEURISTICS if mode == "search" else [PLANNED[mode]])]
        return next((some for some in plans if planner.fits(some)), plans[0])
    limits = planner.calls.limits
    placements = {n: replace(p, micro_batching=limits[n]) for n, p in plan.placements.items()}
    return planner.with_zero3(replace(plan, placements=placements))


def machine_of(
    config: ExperimentConfig, device: str, models: Mapping[str, ModelConfig], roles: Mapping[str, RoleSpec]
) -> MachineModel:
    """Return the machine of the options: profiled, or by its limits if no profile applies (``source`` states why)."""
    options, limits = config.planner, limits_of(config, device)
    file = Path(options.profile or Path(config.fileroot) / "profile.json")
    if options.hardware and options.profile:
        raise UserError("planner.hardware and planner.profile are both set; set one of them")
    if options.profile and not file.is_file():
        raise UserError(f"planner.profile={file}: there is no such file; make it with realhf profile")
    if options.hardware or not file.is_file():
        return limits
    try:
        profile = from_json(file.read_text(), Profile)
    except Exception as error:  # JSON and type errors of many kinds
        raise UserError(f"planner.profile={file} is not a valid profile ({type(error).__name__}: {error}); make it "
                        "with realhf profile") from error  # fmt: skip
    speed = ProfiledSpeed(profile)
    unknown = [role for role, model in models.items() if not speed.covers(model, bool(roles[role].spec.bf16))]
    problems = [f"does not include the model of {', '.join(unknown)}"] if unknown else []
    if profile.machine.device != device:
        problems.append(f"is of a machine with device={profile.machine.device}")
    if config.n_nodes > 1:
        problems.append("does not include links between nodes")
    if problems:
        return replace(limits, source=f"{limits.source} (the profile {file} {' and '.join(problems)})")
    hardware = replace(limits.hardware, reserved=profile.resident)
    return MachineModel(hardware, speed, speed, f"the profile {file}", True)


def limits_of(config: ExperimentConfig, device: str) -> MachineModel:
    options = config.planner
    name = options.hardware or ("cpu" if device == "cpu" else "h100")
    hardware = read_hardware(name, config.n_gpus_per_node)
    if name == "cpu":
        memory = host_bytes() / config.n_gpus_per_node
        cores = max(1, (os.cpu_count() or 1) // (config.threads_per_worker or 1))
        hardware = replace(hardware, memory=memory, cores=cores)
    if options.memory_gb is not None:
        hardware = replace(hardware, memory=options.memory_gb * 1e9)
    if hardware.usable <= hardware.reserved:
        raise UserError(f"a worker has {hardware.memory / 1e9:.3g} GB and needs {hardware.reserved / 1e9:.3g} GB "
                        "without any model: reduce the number of workers, or set planner.memory_gb")  # fmt: skip
    return MachineModel(hardware, Roofline(hardware), AnalyticMemory(device), f"the limits of {name}")


def workload_of(
    config: ExperimentConfig,
    task: Task,
    rows: EncodedRows | None,
    sampling: GenerationConfig | None,
    samples: int,
    new_tokens: float | None = None,
) -> Workload:
    """Return the expected workload: dataset rows in the order of the run, and responses of the expected lengths.

    Without data (``rows`` is None) all prompts or rows have their maximum length.
    """
    dataset = config.dataset
    lengths: list[tuple[int, ...]]
    if rows is None:
        lengths = [(dataset.max_prompt_len if sampling else dataset.max_seqlen,)]
    else:
        n_rows = min(MAX_ROWS, 3 * dataset.train_bs_n_seqs)
        first = [rows[i] for i in rows_at(config.seed, len(rows), 0, n_rows, dataset.shuffle)]
        n_sequences = {Task.pairs: 2 * dataset.max_pairs_per_prompt, Task.ranked: dataset.max_responses}.get(task, 1)
        lengths = [(len(row.prompt),) if sampling else row.sequence_lengths[:n_sequences] for row in first]
    if sampling is None:
        return Workload(tuple(lengths))
    return Workload(tuple(lengths), response_lengths(new_tokens, sampling.max_new_tokens), samples)


def response_lengths(mean: float | None, longest: int, n: int = 16) -> tuple[int, ...]:
    """Return ``n`` lengths evenly spread around the mean, up to the longest; one length without a smaller mean.

    Long and short lengths alternate, so that the samples of a prompt differ.
    """
    if mean is None or mean >= longest:
        return (longest,)
    spread = min(mean - 1, longest - mean)
    ramp = [round(mean + spread * (2 * k / (n - 1) - 1)) for k in range(n)]
    return tuple(max(1, ramp[k * 7 % n]) for k in range(n))


def _role_on(device: str, role: RoleSpec) -> RoleSpec:
    """Return a role without ``optimizer.offload`` on CPUs, where it changes nothing."""
    if device != Device.cpu.value or not role.spec.optimizer.offload:
        return role
    return replace(role, spec=replace(role.spec, optimizer=replace(role.spec.optimizer, offload=False)))


def planner_of(
    experiment: Experiment,
    graph: Graph,
    models: Mapping[str, ModelConfig],
    rows: EncodedRows | None,
    machine: MachineModel,
    device: str,
) -> Planner:
    sampling = experiment.planned_sampling()
    roles = {name: _role_on(device, role) for name, role in experiment.roles().items()}
    samples, new_tokens = experiment.samples_per_prompt(), experiment.expected_new_tokens()
    workload = workload_of(experiment, experiment.task, rows, sampling, samples, new_tokens)
    # the kernel that shares a prompt's prefill is compiled for CPU only
    shares = device == "cpu" and native.ensure(native.KERNELS) is not None
    node = experiment.n_gpus_per_node
    environment = experiment.environment_load()
    cost = CostModel(graph, models, roles, machine.speed, workload, node, sampling, shares, environment)
    # a worker allocates its ring buffer when it connects to peers of its host (comm/shared_memory.py)
    reserved = machine.hardware.reserved + (RING_BYTES if device == "cpu" and node > 1 else 0)
    memory = MemoryModel(graph, models, roles, workload, machine.footprint, reserved, device, sampling, shares, node,
                         experiment.vllm.kv_cache_bytes(machine.hardware.memory if device != "cpu" else 0.0),
                         device != "cpu" and experiment.vllm.enable_sleep_mode,
                         experiment.max_episodes(), experiment.vllm.merge_lora)  # fmt: skip
    limits = {name: micro_batching(option, device) for name, option in experiment.placements().items()}
    calls = Candidates(cost, memory, machine.hardware, experiment.dataset.train_bs_n_seqs, limits)
    return Planner(graph, calls, experiment.n_nodes * node, experiment.max_staleness)
