"""The speed of a run's machine from a profile: whether it applies, and what is taken from elsewhere."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from realhf.api.config import ExperimentConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import Hardware
from realhf.api.model_config import ModelConfig
from realhf.launch import launches_elsewhere
from realhf.plan.compile.check import strategy_problems
from realhf.plan.machines.mixed_speed import Links, MixedSpeed, ProfiledClusterLinks, TieredLinks
from realhf.plan.machines.processor import cores, processor_name, torch_version
from realhf.plan.machines.profile import Profile, ProfiledMachine, ProfiledSpeed, numbers_of_workers
from realhf.plan.machines.roofline import AnalyticMemory, Roofline

Models = Mapping[str, ModelConfig]
Roles = Mapping[str, RoleSpec]


def machine_of_run(config: ExperimentConfig, device: str) -> ProfiledMachine | None:
    """Return this machine if the workers of a run are on it; None if theirs is unknown."""
    processor = processor_name(device)
    if config.n_nodes > 1 or launches_elsewhere(config) or not processor:
        return None
    n_cores = len(cores()) if device == "cpu" else 0
    return ProfiledMachine(device, processor, n_cores, config.threads_per_worker, torch_version())


def profile_problems(
    profile: Profile, config: ExperimentConfig, device: str, models: Models, roles: Roles
) -> list[str]:
    """Return the reasons why a profile does not apply to a run, each a predicate of the profile."""
    measured, here = ProfiledSpeed(profile), machine_of_run(config, device)
    problems, unknown = [], dict[bool, list[str]]()
    for role, model in models.items():
        if not measured.covers(model, bf16 := bool(roles[role].spec.bf16)):
            unknown.setdefault(bf16, []).append(role)
    for bf16, names in unknown.items():
        other = any(measured.covers(models[name], not bf16) for name in names)
        kind = f" in {_dtype(bf16)}, only in {_dtype(not bf16)}" if other else ""
        problems.append(f"does not include the model of {', '.join(names)}{kind}")
    if profile.machine.device != device:
        problems.append(f"is of a machine with device={profile.machine.device}")
    elif here is not None and profile.machine.differs_from(here):
        problems.append(f"is of {profile.machine}, this machine is {replace(here, threads=profile.machine.threads)}")
    return problems


def _dtype(bf16: bool) -> str:
    return "bfloat16" if bf16 else "float32"


def measured_speed(
    profile: Profile, config: ExperimentConfig, models: Models, roles: Roles, hardware: Hardware
) -> tuple[ProfiledSpeed | MixedSpeed, str]:
    """Return the speed of a run's machine, and which parts of it are not measured; empty if all are.

    ``hardware`` has the limits of these parts.
    """
    measured, node_size = ProfiledSpeed(profile), config.n_gpus_per_node
    limits = Roofline(hardware)
    has_node = profile.n_workers >= node_size
    links: Links = measured if has_node else limits
    parts = []
    if not has_node:
        parts.append(f"links within a node from {hardware.name}")
    if config.n_nodes > 1:
        sizes = profile.cluster_sizes
        cluster: Links = ProfiledClusterLinks(profile, limits, node_size) if sizes else limits
        parts.append(f"links between nodes measured on {max(sizes)[0]} nodes" if sizes
                     else f"links between nodes from {hardware.name}")  # fmt: skip
        links = TieredLinks(links, cluster, node_size) if has_node or sizes else limits
    shapes = [(model, bool(roles[role].spec.bf16)) for role, model in models.items()]
    if missing := sorted({tp for model, bf16 in shapes for tp in _unmeasured(measured, model, bf16, node_size)}):
        parts.append(f"tensor-parallel {_sizes(missing)} from size 1 and the limits of {hardware.name}")
    if not parts:
        return measured, ""
    speed = MixedSpeed(measured, links, limits, AnalyticMemory(profile.machine.device), node_size)
    return speed, f" of {profile.machine}, with {', '.join(parts)}"


def _unmeasured(measured: ProfiledSpeed, model: ModelConfig, bf16: bool, node_size: int) -> Iterable[int]:
    """Return the degrees of tensor parallelism within a node that a profile measures, but this one has not."""
    valid = (tp for tp in numbers_of_workers(node_size) if not strategy_problems(model, ParallelStrategy(tp=tp)))
    return [tp for tp in valid if not measured.covers(model, bf16, tp)]


def _sizes(numbers: Iterable[int]) -> str:
    words = list(map(str, numbers))
    return f"size{'s' * (len(words) > 1)} {', '.join(words)}"
