"""SLURM jobs: writes, submits and follows job scripts. The masters run inside the jobs."""

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
    """Return True if the run is submitted to SLURM; inside an allocation it runs directly."""
    return config.mode is Mode.slurm and not in_allocation()


def runs_per_seed(experiment: Experiment, paths: RunDir) -> list[tuple[Experiment, RunDir]]:
    """Return one run per seed of ``slurm.array_seeds``, in subdirectories; without seeds, the run itself."""
    runs = []
    for seed in experiment.slurm.array_seeds:
        name = f"seed_{seed}"
        run = replace(experiment, fileroot=str(paths.root.parent), experiment_name=paths.root.name, trial_name=name,
                      seed=seed, slurm=replace(experiment.slurm, array_seeds=[]))  # fmt: skip
        runs.append((run, RunDir(paths.root / name)))
    return runs or [(experiment, paths)]


def queue(runs: Sequence[RunSpec], config: ExperimentConfig, paths: RunDir) -> None:
    """Submit runs whose directories are prepared, and follow the job to its end."""
    logs = [log_file(paths.root, i if len(runs) > 1 else "") for i in range(len(runs))]
    logs[0].parent.mkdir(parents=True, exist_ok=True)  # SLURM does not create the folder of a log
    paths.job_script.write_text(job_script(runs, config, paths))
    job = submit(paths.job_script, len(runs))
    print(f"job     {job.number}: {paths.job_script}; Ctrl-C cancels it", flush=True)
    follow(job, logs, [run.paths.root.name for run in runs])


def job_script(runs: Sequence[RunSpec], config: ExperimentConfig, paths: RunDir) -> str:
    return script([run.paths.root for run in runs], config, runs[0].device, paths.root)


def dry_run(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Print the script that would be submitted; write no files."""
    if not is_queued(experiment):
        raise UserError(f"--dry-run prints a SLURM script and requires mode=slurm (got {experiment.mode.value}); "
                        "realhf plan shows what would run")  # fmt: skip
    runs = [preflight(name, run, run_dir) for run, run_dir in runs_per_seed(experiment, paths)]
    print(job_script(runs, experiment, paths), end="")
