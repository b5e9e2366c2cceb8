"""Runs that go to a queue: scripts are written, submitted and followed; the masters run elsewhere."""

from collections.abc import Sequence
from dataclasses import replace

from realhf.api.config import ExperimentConfig, Mode
from realhf.api.experiment import Experiment
from realhf.apps.prepare.preflight import preflight
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.launch.slurm import in_allocation
from realhf.launch.slurm_job import follow, log_file, script, submit
from realhf.plan.run_spec import RunSpec


def is_queued(config: ExperimentConfig) -> bool:
    """Tell whether a run goes to a queue: inside an allocation it does not."""
    return config.mode is Mode.slurm and not in_allocation()


def runs_per_seed(experiment: Experiment, paths: RunDir) -> list[tuple[Experiment, RunDir]]:
    """Return the runs of an array of seeds, each in a directory of its own; without one, the only run."""
    config = experiment.config
    return [
        (_one(config, f"seed_{seed}", seed, paths), RunDir(paths.root / f"seed_{seed}"))
        for seed in config.slurm.array_seeds
    ] or [(experiment, paths)]


def _one(config: ExperimentConfig, trial: str, seed: int, paths: RunDir) -> Experiment:
    slurm = replace(config.slurm, array_seeds=[])
    one = replace(config, fileroot=str(paths.root.parent), experiment_name=paths.root.name, trial_name=trial,
                  seed=seed, slurm=slurm)  # fmt: skip
    return one  # type: ignore[return-value]


def queue(runs: Sequence[RunSpec], config: ExperimentConfig, paths: RunDir) -> None:
    """Submit runs whose directories are written, and follow them to their end."""
    names = [run.paths.root.name for run in runs]
    several = len(runs) > 1
    logs = [log_file(paths.root, i if several else "") for i in range(len(runs))]
    logs[0].parent.mkdir(parents=True, exist_ok=True)  # SLURM writes to no folder that is not there
    paths.job_script.write_text(job_script(runs, config, paths))
    job = submit(paths.job_script, len(runs))
    print(f"job     {job.number}: {paths.job_script}; Ctrl-C cancels it", flush=True)
    follow(job, logs, names)


def job_script(runs: Sequence[RunSpec], config: ExperimentConfig, paths: RunDir) -> str:
    return script([run.paths.root for run in runs], config, runs[0].device, paths.root)


def dry_run(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Print the script that would be submitted, and write nothing."""
    config = experiment.config
    if not is_queued(config):
        raise UserError(f"--dry-run prints a script for SLURM; set mode=slurm (got {config.mode.value}), or see what "
                        "would run with realhf plan")  # fmt: skip
    runs = [preflight(name, one, place) for one, place in runs_per_seed(experiment, paths)]
    print(job_script(runs, config, paths), end="")
