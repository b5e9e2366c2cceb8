"""``realhf quickstart``: reads options, checks and plans a run, launches it and waits for its end."""

import time
from functools import partial
from pathlib import Path

from realhf.api.config import RecoverMode
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.apps.prepare.launching import dry_run, is_queued, runs_per_seed, start
from realhf.apps.prepare.multi_stage import run_multi_stage
from realhf.apps.prepare.options import print_options, updated
from realhf.apps.prepare.preflight import preflight
from realhf.apps.prepare.recovery import resume, retried
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.experiments import EXPERIMENTS, experiment_class
from realhf.launch import missing
from realhf.plan.run_spec import RunSpec
from realhf.system.checkpoint.manifest import newest


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: realhf quickstart EXPERIMENT [--config FILE.yaml] [--dry-run] [key=value ...]\n\nexperiments:")
        for name in EXPERIMENTS:
            print(f"  {name:<10} {(experiment_class(name).__doc__ or '').strip()}")
        return
    name, rest = arguments[0], arguments[1:]
    if "-h" in rest or "--help" in rest:
        print_help(name)
        return
    experiment, paths = read_words(name, [word for word in rest if word != "--dry-run"])
    if "--dry-run" in rest:
        return dry_run(name, experiment, paths)
    if isinstance(experiment, MultiStageExperiment):
        return run_multi_stage(name, experiment, paths)
    supervise(name, experiment, paths)


def supervise(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Start or resume a run, and restart it after failures, according to ``recover_mode``."""
    mode = experiment.recover_mode
    if problems := missing(experiment):
        raise UserError(problems)
    if mode in (RecoverMode.resume, RecoverMode.auto) and newest(paths.checkpoints):
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
    for warning in runs[0].config.warnings():
        print(f"warning {warning}")
    start(runs, experiment, paths)


def prepare(name: str, words: list[str]) -> RunSpec:
    """Return the checked run for a command line without writing anything."""
    return preflight(name, *read_words(name, words))


def read_words(name: str, words: list[str]) -> tuple[Experiment, RunDir]:
    """Return the experiment for a command line, and its run directory."""
    config_file = None
    if "--config" in words:
        at = words.index("--config")
        if at + 1 >= len(words):
            raise UserError("--config needs a file")
        config_file, words = words[at + 1], words[:at] + words[at + 2 :]
    experiment = updated(experiment_class(name)(), words, config_file)
    experiment.experiment_name = experiment.experiment_name or name.rpartition(":")[2]
    experiment.trial_name = experiment.trial_name or time.strftime("run%Y%m%d-%H%M%S")
    paths = RunDir(Path(experiment.fileroot) / experiment.experiment_name / experiment.trial_name)
    return experiment, paths


def print_help(name: str) -> None:
    cls = experiment_class(name)
    print(f"realhf quickstart {name}: {(cls.__doc__ or '').strip()}\n")
    print_options(cls)
