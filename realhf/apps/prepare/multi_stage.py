"""Runs the stages of a multi-stage experiment, each as a separate run in a subdirectory, and resumes it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from realhf.api.config import RecoverMode
from realhf.api.experiment import MultiStageExperiment, Stage
from realhf.apps.prepare.hub import with_snapshots
from realhf.apps.prepare.launching import DAMAGED, dry_run, locked, start
from realhf.apps.prepare.options import load_experiment, save_experiment, updated
from realhf.apps.prepare.preflight import directory_problems, preflight, run_problems
from realhf.apps.prepare.recovery import changes, resume, retried
from realhf.base.atomic_io import atomic_write, remove_folder
from realhf.base.errors import UserError, damage_reported
from realhf.base.paths import RunDir
from realhf.experiments import experiment_class
from realhf.system.checkpoint.manifest import flat_options, is_resumable


@dataclass(frozen=True)
class Progress:
    """Content of stages.json: the experiment, its completed stages, and local paths of names on the hub."""

    experiment: str
    done: list[str]
    snapshots: dict[str, str] = field(default_factory=dict)


def run_multi_stage(name: str, config: MultiStageExperiment, paths: RunDir) -> None:
    """Run all stages, or the remaining ones according to ``recover_mode``; ``UserError`` for invalid options."""
    mode = config.recover_mode
    if mode in (RecoverMode.resume, RecoverMode.auto) and paths.stages.is_file():
        return _resume_stages(name, config, paths)
    if mode is RecoverMode.resume:
        raise UserError(f"recover_mode=resume, but {paths.root} contains no multi-stage experiment")
    config = with_snapshots(config)
    check(config, paths)
    with locked(paths):
        if problems := directory_problems(config, paths, is_owner=True):  # used by another launch since
            raise UserError(problems)
        if paths.root.exists() and any(paths.root.iterdir()):
            remove_folder(paths.root)  # overwrite=True
        paths.root.mkdir(parents=True, exist_ok=True)
        paths.root.chmod(0o700)  # prompts, responses and the channel's key
        _run_stages(name, config, paths, ())


def check(config: MultiStageExperiment, paths: RunDir) -> None:
    if problems := directory_problems(config, paths) + run_problems(config) + config.problems():
        raise UserError(problems)


def dry_run_stages(config: MultiStageExperiment, paths: RunDir) -> None:
    """Check the first stage as ``dry_run`` does; later ones depend on its results."""
    config = with_snapshots(config)
    check(config, paths)
    with TemporaryDirectory() as folder:
        stage = next(iter(config.stages(Path(folder))))
        print(f"stage   {stage.name}: {stage.experiment}; later stages depend on its results")
        dry_run(stage.experiment, stage.config, RunDir(paths.root / stage.name))


def resume_multi_stage(paths: RunDir, overrides: Sequence[str]) -> None:
    """Resume the multi-stage experiment in a directory, with some options replaced."""
    name = _progress(paths).experiment
    config = updated(load_experiment(experiment_class(name), paths.config), overrides)
    if not isinstance(config, MultiStageExperiment):
        raise UserError(f"{paths.stages} is damaged: {name} is not a multi-stage experiment; {DAMAGED}")
    _resume_stages(name, config, paths)


def _resume_stages(name: str, config: MultiStageExperiment, paths: RunDir) -> None:
    with locked(paths):
        _run_remaining_stages(name, config, paths)


def _run_remaining_stages(name: str, config: MultiStageExperiment, paths: RunDir) -> None:
    stored = _progress(paths)
    if stored.experiment != name:
        problems = [f"experiment: {stored.experiment} before, {name} now"]
    else:
        problems = changes(flat_options(load_experiment(experiment_class(name), paths.config)), flat_options(config))
    config = with_snapshots(config, stored.snapshots)
    if problems := problems + run_problems(config) + config.problems():
        raise UserError([*problems, f"{paths.root} was started with other options; choose another trial_name"])
    _run_stages(name, config, paths, stored.done)


def _progress(paths: RunDir) -> Progress:
    with damage_reported(paths.stages, DAMAGED):
        return msgspec.convert(json.loads(paths.stages.read_text()), Progress)


def _run_stages(name: str, config: MultiStageExperiment, paths: RunDir, completed: Sequence[str]) -> None:
    save_experiment(config, paths.config)
    root, done = paths.root.resolve(), list(completed)  # absolute: stages refer to each other's files by path
    stored = {"experiment": name, "done": done, "snapshots": config.snapshots}
    atomic_write(paths.stages, json.dumps(stored))
    for stage in config.stages(root):  # executes the code between stages again when the experiment is resumed
        if stage.name in done:
            print(f"stage   {stage.name}: already completed")
            continue
        print(f"stage   {stage.name}: {stage.experiment}", flush=True)
        _run_stage(stage, root)
        done.append(stage.name)
        atomic_write(paths.stages, json.dumps(stored))


def _run_stage(stage: Stage, root: Path) -> None:
    paths = RunDir(root / stage.name)
    config = replace(stage.config, fileroot=str(root.parent), experiment_name=root.name, trial_name=stage.name,
                     overwrite=True)  # fmt: skip

    def begin() -> None:
        run = preflight(stage.experiment, config, paths)
        start([run], config, paths)

    is_started = paths.plan.is_file() and is_resumable(paths.checkpoints)
    retried(partial(resume, stage.experiment, config, paths) if is_started else begin, paths)
