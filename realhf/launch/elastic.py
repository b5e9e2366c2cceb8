"""What a run may go on with when workers are lost for good. Only decides: nothing is asked, nothing is started.

A node is lost when whoever keeps it says so (SLURM, Ray); a device of this machine when its worker keeps dying.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from realhf.api.config import ExperimentConfig, MFCConfig, Mode, ParallelConfig
from realhf.plan.compile.allocate import PLANNED


@dataclass(frozen=True)
class ElasticRestart:
    """How a run can go on, with ``workers``: options to set, as they are typed, and what was lost, in words.

    ``refusal`` says why a run may not set them by itself; it may where that is empty.
    """

    overrides: tuple[str, ...]
    workers: int
    lost: str = ""
    refusal: str = ""


def plan_restart(
    config: ExperimentConfig, placements: Mapping[str, MFCConfig], device: str, n_nodes: int, gone: Collection[int]
) -> ElasticRestart | None:
    """Return how to go on with ``n_nodes`` nodes and without the devices of the workers ``gone``.

    None where nothing is left. ``placements`` are the options of the calls, for ``allocation_mode=manual``.
    """
    per_node = config.n_gpus_per_node - len(gone)
    if n_nodes < 1 or per_node < 1:
        return None
    if n_nodes == config.n_nodes and not gone:
        return ElasticRestart((), config.n_nodes * per_node)
    words = [f"n_nodes={n_nodes}"] if n_nodes != config.n_nodes else []
    words += [f"n_gpus_per_node={per_node}"] if gone else []
    if gone and device == "cuda":
        devices = config.devices or range(config.n_gpus_per_node)
        words.append(f"devices=[{','.join(str(d) for rank, d in enumerate(devices) if rank not in gone)}]")
    workers, mode = n_nodes * per_node, config.allocation_mode
    lost = [f"{config.n_nodes - n_nodes} of {config.n_nodes} nodes"] if n_nodes != config.n_nodes else []
    lost += [f"the device of worker {', '.join(map(str, sorted(gone)))}"] if gone else []
    if mode in PLANNED:
        return ElasticRestart(tuple(words), workers, " and ".join(lost))
    words.append(f"allocation_mode={config.recover_allocation or 'heuristic'}")
    words += unplaced(placements) if mode == "manual" else []
    refusal = f"allocation_mode={mode} is for {config.n_nodes * config.n_gpus_per_node} workers, {workers} are left"
    return ElasticRestart(tuple(words), workers, " and ".join(lost), "" if config.recover_allocation else refusal)


def unplaced(placements: Mapping[str, MFCConfig]) -> list[str]:
    """Return the words that take back what ``allocation_mode=manual`` had calls run on."""
    words = []
    for name, option in placements.items():
        words += [f"{name}.device_mesh=null"] if option.device_mesh is not None else []
        usual, given = vars(ParallelConfig()), vars(option.parallel)
        words += [f"{name}.parallel.{field}={usual[field]}" for field in usual if given[field] != usual[field]]
    return words


def failed_permanently(config: ExperimentConfig, deaths: Mapping[int, int]) -> list[int]:
    """Return the workers that died so often that their devices count as lost."""
    if config.mode is not Mode.local:
        return []
    return sorted(rank for rank, times in deaths.items() if times >= config.max_device_failures)


def elastic_problems(config: ExperimentConfig) -> list[str]:
    found = []
    if config.max_device_failures < 1:
        found.append(f"max_device_failures must be positive, got {config.max_device_failures}")
    if config.recover_allocation and config.recover_allocation not in PLANNED:
        found.append(f"recover_allocation={config.recover_allocation}: nobody knows beforehand how many workers will "
                     f"be left; use {', '.join(PLANNED)}")  # fmt: skip
    return found
