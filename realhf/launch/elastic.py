"""Decides how a run restarts after the loss of nodes or devices.

SLURM and Ray report lost nodes; a local device is lost when its worker fails repeatedly.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from realhf.api.config import ExperimentConfig, MFCConfig, Mode, ParallelConfig
from realhf.plan.compile.allocate import PLANNED


@dataclass(frozen=True)
class ElasticRestart:
    """A restart on ``workers`` workers: option overrides, and a description of the loss.

    ``refusal`` is the reason why the run may not restart automatically; empty if it may.
    """

    overrides: tuple[str, ...]
    workers: int
    lost: str = ""
    refusal: str = ""


def plan_restart(
    config: ExperimentConfig, placements: Mapping[str, MFCConfig], device: str, n_nodes: int, gone: Collection[int]
) -> ElasticRestart | None:
    """Return the restart on ``n_nodes`` nodes without the devices of the workers ``gone``, or None if none is left.

    ``placements`` are the options of the calls, for ``allocation_mode=manual``.
    """
    per_node = config.n_gpus_per_node - len(gone)
    if n_nodes < 1 or per_node < 1:
        return None
    if n_nodes == config.n_nodes and not gone:
        return ElasticRestart((), config.n_nodes * per_node)
    overrides = [f"n_nodes={n_nodes}"] if n_nodes != config.n_nodes else []
    overrides += [f"n_gpus_per_node={per_node}"] if gone else []
    if gone and device == "cuda":
        devices = config.devices or range(config.n_gpus_per_node)
        overrides.append(f"devices=[{','.join(str(d) for rank, d in enumerate(devices) if rank not in gone)}]")
    workers, mode = n_nodes * per_node, config.allocation_mode
    lost = [f"{config.n_nodes - n_nodes} of {config.n_nodes} nodes"] if n_nodes != config.n_nodes else []
    lost += [f"the device of worker {', '.join(map(str, sorted(gone)))}"] if gone else []
    if mode in PLANNED:
        return ElasticRestart(tuple(overrides), workers, " and ".join(lost))
    overrides.append(f"allocation_mode={config.recover_allocation or 'heuristic'}")
    overrides += placement_resets(placements) if mode == "manual" else []
    refusal = f"allocation_mode={mode} is for {config.n_nodes * config.n_gpus_per_node} workers, {workers} are left"
    return ElasticRestart(tuple(overrides), workers, " and ".join(lost), "" if config.recover_allocation else refusal)


def placement_resets(placements: Mapping[str, MFCConfig]) -> list[str]:
    """Return the overrides that reset the placements of ``allocation_mode=manual``."""
    overrides = []
    for name, option in placements.items():
        overrides += [f"{name}.device_mesh=null"] if option.device_mesh is not None else []
        default, given = vars(ParallelConfig()), vars(option.parallel)
        overrides += [f"{name}.parallel.{key}={value}" for key, value in default.items() if given[key] != value]
    return overrides


def failed_permanently(config: ExperimentConfig, deaths: Mapping[int, int]) -> list[int]:
    """Return the workers that died ``max_device_failures`` times; their devices count as lost."""
    if config.mode is not Mode.local:
        return []
    return sorted(rank for rank, times in deaths.items() if times >= config.max_device_failures)


def elastic_problems(config: ExperimentConfig) -> list[str]:
    if not config.recover_allocation or config.recover_allocation in PLANNED:
        return []
    return [f"recover_allocation={config.recover_allocation}: the number of remaining workers is unknown in advance; "
            f"use {', '.join(PLANNED)}"]  # fmt: skip
