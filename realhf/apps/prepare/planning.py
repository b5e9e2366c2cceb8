"""The planner of an experiment, with its cost model, its expected workload and its machine."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from realhf.api.codec import from_plain
from realhf.api.config import ExperimentConfig, GenerationConfig, RewardConfig
from realhf.api.config.choices import Backend, Device
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import Graph
from realhf.api.machine import Hardware, RewardLoad, Workload
from realhf.api.model_config import ModelConfig
from realhf.apps.prepare.lengths import lengths_of
from realhf.apps.profiles.measured import measured_speed, profile_problems
from realhf.apps.profiles.profile_file import read_profile
from realhf.base import native
from realhf.base.errors import UserError
from realhf.base.host_memory import host_bytes
from realhf.data.encode import EncodedRows
from realhf.data.order import rows_at
from realhf.environments.loading import is_async_class
from realhf.launch import launches_elsewhere
from realhf.launch.cuda import first_gpu
from realhf.plan.advice.expected_error import measured_errors
from realhf.plan.advice.goals import Goal, least_memory
from realhf.plan.compile.allocate import PLANNED, micro_batching
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.cost.cost import VERIFIER, CostModel
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.cost.speed import Footprint, Speed
from realhf.plan.cost.traffic import RING_BYTES
from realhf.plan.lengths import FixedLengths, LengthDistribution, describe_lengths, representative_lengths
from realhf.plan.machines.gpu_kinds import NEAREST, GPUMatch, match_gpu
from realhf.plan.machines.hardware import read_hardware
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner
from realhf.plan.search.search import StopReason
from realhf.rewards.registry import fns_of, is_remote

MAX_ROWS = 4096  # of the dataset in the workload of a prediction


@dataclass(frozen=True)
class MachineModel:
    """Hardware, speed and memory models of a machine; ``source`` describes their origin."""

    hardware: Hardware
    speed: Speed
    footprint: Footprint
    source: str
    is_measured: bool = False


@dataclass(frozen=True)
class SearchOutcome:
    """How a search ended, after ``n_evaluated`` evaluations, of which number ``improved_at`` found the result."""

    stop: StopReason
    n_evaluated: int
    improved_at: int
    seconds: float

    def __str__(self) -> str:
        stop = {StopReason.AGREED: "converged", StopReason.BUDGET: "evaluations exhausted",
                StopReason.CLOCK: "stopped by the clock (planner.budget_s)"}[self.stop]  # fmt: skip
        return (f"{stop} after {self.n_evaluated:,} evaluations, {self.seconds:.3g} s; "
                f"the last improvement was evaluation {self.improved_at:,}")  # fmt: skip


def plan_for_mode(
    planner: Planner, config: ExperimentConfig, given: ExecutionPlan, goal: Goal = Goal.step,
    starts: Sequence[ExecutionPlan] = (),
) -> tuple[ExecutionPlan, SearchOutcome | None]:  # fmt: skip
    """Return the plan of the allocation mode, and how its search ended.

    ``given`` has the layouts of a mode that the planner does not handle. A search considers ``starts`` too.
    """
    if config.allocation_mode not in PLANNED:
        return planner.with_savings(planner.with_zero3(given)), None
    if config.allocation_mode != "search":
        return planner.by_heuristic(PLANNED[config.allocation_mode]), None
    start = time.monotonic()
    search = least_memory if goal is Goal.memory else Planner.search
    found = search(planner, config.seed, config.planner.budget_s, starts)
    result = found.result
    improved_at = result.history[-1][0] if result.history else 0
    return found.plan, SearchOutcome(result.stop, result.n_evaluated, improved_at, time.monotonic() - start)


def replan(planner: Planner, mode: str, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan of an allocation mode for a modified planner, where ``plan`` was that of the original one.

    A search is approximated by the heuristics. Of a given plan only the layouts remain: micro-batches are those of the
    options, and memory savings are chosen again.
    """
    if mode in PLANNED:
        plans = [planner.by_heuristic(rule) for rule in (HEURISTICS if mode == "search" else [PLANNED[mode]])]
        return next((some for some in plans if planner.fits(some)), plans[0])
    limits = planner.calls.limits
    placements = {n: replace(p, micro_batching=limits[n], saving=None) for n, p in plan.placements.items()}
    return planner.with_savings(planner.with_zero3(replace(plan, placements=placements)))


def machine_of(
    config: ExperimentConfig, device: str, models: Mapping[str, ModelConfig], roles: Mapping[str, RoleSpec]
) -> MachineModel:
    """Return the machine of the options: profiled, or by its limits if no profile applies.

    ``source`` states which parts are measured, or why no profile applies.
    """
    options, limits = config.planner, limits_of(config, device)
    file = Path(options.profile or Path(config.fileroot) / "profile.json")
    if options.profile and not file.is_file():
        raise UserError(f"planner.profile={file}: there is no such file; make it with realhf profile")
    if (options.hardware and not options.profile) or not file.is_file():
        return limits
    profile = read_profile(file, "planner.profile")
    if problems := profile_problems(profile, config, device, models, roles):
        return replace(limits, source=f"{limits.source} (the profile {file} {' and '.join(problems)})")
    speed, parts = measured_speed(profile, config, models, roles, limits.hardware)
    errors = measured_errors(profile, limits.hardware.errors)
    hardware = replace(limits.hardware, reserved=profile.resident, errors=errors)
    return MachineModel(hardware, speed, speed, f"the profile {file}{parts}", True)


def limits_of(config: ExperimentConfig, device: str) -> MachineModel:
    """Return the limits of ``planner.hardware``, or else of this machine's GPU, with the memory of that GPU."""
    options = config.planner
    gpu = first_gpu() if device != "cpu" and not options.hardware and not launches_elsewhere(config) else None
    found = match_gpu(gpu) if gpu else GPUMatch(NEAREST)
    name = options.hardware or ("cpu" if device == "cpu" else found.machine)
    hardware = read_hardware(name, config.n_gpus_per_node)
    if gpu:
        hardware = replace(hardware, memory=gpu.memory)
    if name == "cpu":
        memory = host_bytes() / config.n_gpus_per_node
        cores = max(1, (os.cpu_count() or 1) // (config.threads_per_worker or 1))
        hardware = replace(hardware, memory=memory, cores=cores)
    if options.memory_gb is not None:
        hardware = replace(hardware, memory=options.memory_gb * 1e9)
    if hardware.usable <= hardware.reserved:
        raise UserError(f"a worker has {hardware.memory / 1e9:.3g} GB and needs {hardware.reserved / 1e9:.3g} GB "
                        "without any model: reduce the number of workers, or set planner.memory_gb")  # fmt: skip
    source = f"the limits of {name}{f' ({found.note})' if found.note else ''}"
    return MachineModel(hardware, Roofline(hardware), AnalyticMemory(device), source)


def workload_of(
    config: ExperimentConfig,
    task: Task,
    rows: EncodedRows | None,
    sampling: GenerationConfig | None,
    samples: int,
    responses: LengthDistribution | None = None,
) -> Workload:
    """Return the expected workload: dataset rows in the order of the run, and responses of the expected lengths.

    Without data (``rows`` is None) all prompts or rows have their maximum length. Every step has as many long responses
    as are expected in one. Without ``responses`` all have the maximum length.
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
    longest = sampling.max_new_tokens
    responses = responses or FixedLengths(longest)
    sampled = representative_lengths(responses, dataset.train_bs_n_seqs * samples, longest)
    return Workload(tuple(lengths), sampled, samples, describe_lengths(responses, sampled, longest))


def reward_load(graph: Graph, latency: float) -> RewardLoad | None:
    """Return how the verifier of a graph judges responses; None without one, or if its latency is not given."""
    verifiers = [mfc for mfc in graph.mfcs if mfc.interface.name == VERIFIER]
    if not verifiers or not latency:
        return None
    config = from_plain(dict(verifiers[0].interface.config["reward"]), RewardConfig)
    if not (fns := fns_of(config)):
        return None
    is_async = all(map(is_async_class, fns))  # by the name of the function in its file
    is_local = not is_async and not any(map(is_remote, fns))
    return RewardLoad(latency, config.processes, config.max_concurrency if is_async else 1, is_local)


def _role_on(device: str, role: RoleSpec) -> RoleSpec:
    """Return a role with the defaults of the device, on CPUs without ``optimizer.offload``, which changes nothing."""
    spec, is_gpu = role.spec, device != Device.cpu.value
    spec = replace(
        spec,
        overlap_grad_reduce=is_gpu if spec.overlap_grad_reduce is None else spec.overlap_grad_reduce,
        tp_overlap=is_gpu if spec.tp_overlap is None else spec.tp_overlap,
        optimizer=replace(spec.optimizer, offload=spec.optimizer.offload if is_gpu else False),
    )
    return replace(role, spec=spec)


def planner_of(
    experiment: Experiment,
    graph: Graph,
    models: Mapping[str, ModelConfig],
    rows: EncodedRows | None,
    machine: MachineModel,
    device: str,
    responses: LengthDistribution | None = None,
) -> Planner:
    """Return the planner; ``responses`` are the expected lengths of the options, if they were read before."""
    sampling = experiment.planned_sampling()
    roles = {name: _role_on(device, role) for name, role in experiment.roles().items()}
    samples = experiment.samples_per_prompt()
    responses = lengths_of(experiment) if responses is None else responses
    workload = workload_of(experiment, experiment.task, rows, sampling, samples, responses)
    # the kernel that shares a prompt's prefill is compiled for CPU only
    shares = device == "cpu" and native.ensure(native.KERNELS) is not None
    node = experiment.n_gpus_per_node
    environment, rewards = experiment.environment_load(), reward_load(graph, experiment.planner.reward_latency)
    pads_cache = device == "cpu"
    cost = CostModel(graph, models, roles, machine.speed, workload, node, sampling, shares, environment, pads_cache,
                     rewards)  # fmt: skip
    # a worker allocates its ring buffer when it connects to peers of its host (comm/shared_memory.py)
    reserved = machine.hardware.reserved + (RING_BYTES if device == "cpu" and node > 1 else 0)
    memory = MemoryModel(graph, models, roles, workload, machine.footprint, reserved, device, sampling, shares, node,
                         experiment.vllm.kv_cache_bytes(machine.hardware.memory if device != "cpu" else 0.0),
                         device != "cpu" and experiment.vllm.enable_sleep_mode,
                         experiment.max_episodes(), experiment.vllm.merge_lora)  # fmt: skip
    options = experiment.placements()
    limits = {name: micro_batching(option, device) for name, option in options.items()}
    served = frozenset(name for name, option in options.items() if option.backend is Backend.vllm)
    calls = Candidates(cost, memory, machine.hardware, experiment.dataset.train_bs_n_seqs, limits, served)
    return Planner(graph, calls, experiment.n_nodes * node, experiment.max_staleness)
