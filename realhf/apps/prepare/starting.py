"""Starts runs: a new one or the last checkpoint, one run or several, here or in a queue."""

from functools import partial

from realhf.api.config import RecoverMode
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.apps.prepare.backends import run_warnings
from realhf.apps.prepare.launching import dry_run, is_queued, runs_per_seed, start
from realhf.apps.prepare.multi_stage import dry_run_stages, run_multi_stage
from realhf.apps.prepare.preflight import preflight
from realhf.apps.prepare.recovery import resume, retried
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.launch import missing
from realhf.system.checkpoint.manifest import is_resumable


def start_experiment(name: str, experiment: Experiment, paths: RunDir, dry: bool) -> None:
    """Start or resume a run or a multi-stage experiment; ``dry`` only checks it."""
    if isinstance(experiment, MultiStageExperiment):
        dry_run_stages(experiment, paths) if dry else run_multi_stage(name, experiment, paths)
    elif dry:
        dry_run(name, experiment, paths)
    else:
        supervise(name, experiment, paths)


def supervise(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Start or resume a run, and restart it after failures, according to ``recover_mode``."""
    mode = experiment.recover_mode
    if problems := missing(experiment):
        raise UserError(problems)
    if mode in (RecoverMode.resume, RecoverMode.auto) and is_resumable(paths.checkpoints):
        run = partial(resume, name, experiment, paths)
    elif mode is RecoverMode.resume:
        raise UserError(f"recover_mode=resume, but {paths.checkpoints} has no checkpoint")
    else:
        run = partial(begin, name, experiment, paths)
    if is_queued(experiment):
        return run()  # the job handles restarts
    retried(run, paths)


def begin(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Start a new run, or one per seed of a job array."""
    runs = [preflight(name, config, run_paths) for config, run_paths in runs_per_seed(experiment, paths)]
    for warning in run_warnings(runs[0]):
        print(f"warning {warning}")
    start(runs, experiment, paths)
