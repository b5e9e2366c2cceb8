"""Runs the stages of a campaign, each as a run of its own below the campaign's directory, and goes on with one.

``campaign.json`` says which experiment it is, and which stages are done. What comes between stages is a function of
what they left, and is done again.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from realhf.api.config import RecoverMode
from realhf.api.multi_stage import MultiStageExperiment, Stage
from realhf.apps.prepare.launching import as_experiment, launch, write_run
from realhf.apps.prepare.options import load_experiment, override, save_experiment
from realhf.apps.prepare.preflight import preflight, run_problems
from realhf.apps.prepare.recovery import changes, resumable, resume, retried
from realhf.apps.prepare.run_dir_checks import directory_problems
from realhf.base.atomic_io import atomic_write, remove_folder
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.experiments import experiment_class
from realhf.system.checkpoint.manifest import flat_options


def run_multi_stage(name: str, campaign: MultiStageExperiment, paths: RunDir) -> None:
    """Run everything, or the rest as ``recover_mode`` has it; ``UserError`` for what can be known before."""
    mode = campaign.recover_mode
    if mode in (RecoverMode.resume, RecoverMode.auto) and paths.stages.is_file():
        return _resume_stages(name, campaign, paths)
    if mode is RecoverMode.resume:
        raise UserError(f"recover_mode=resume, but {paths.root} holds no campaign")
    if problems := directory_problems(campaign, paths) + run_problems(campaign) + campaign.problems():
        raise UserError(problems)
    if paths.root.exists() and any(paths.root.iterdir()):
        remove_folder(paths.root)  # overwrite=True
    paths.root.mkdir(parents=True, exist_ok=True)
    save_experiment(campaign, paths.config)
    run_stages(name, campaign, paths, ())


def resume_multi_stage(paths: RunDir, words: Sequence[str]) -> None:
    """Go on with the campaign in a directory, with some options set anew."""
    name = json.loads(paths.stages.read_text())["experiment"]
    config = override(load_experiment(experiment_class(name), paths.config), words)
    assert isinstance(config, MultiStageExperiment), f"{name} is no campaign"
    _resume_stages(name, config, paths)


def _resume_stages(name: str, campaign: MultiStageExperiment, paths: RunDir) -> None:
    """Go on after the stages that are done; ``UserError`` where options are not what they were."""
    stored = json.loads(paths.stages.read_text())
    before = flat_options(load_experiment(experiment_class(stored["experiment"]), paths.config))
    problems = [f"experiment: {stored['experiment']} before, {name} now"] if stored["experiment"] != name else []
    problems += changes(before, flat_options(campaign)) if not problems else []
    if problems := problems + run_problems(campaign) + campaign.problems():
        raise UserError([*problems, f"{paths.root} was begun with other options; start a new campaign"])
    save_experiment(campaign, paths.config)
    run_stages(name, campaign, paths, stored["done"])


def run_stages(name: str, campaign: MultiStageExperiment, paths: RunDir, done: Sequence[str]) -> None:
    """Run all stages but those that are done."""
    root, finished = paths.root.resolve(), list(done)  # runs know each other's files by one name, wherever we stand
    atomic_write(paths.stages, json.dumps({"experiment": name, "done": finished}))
    for stage in campaign.stages(root):
        if stage.name in finished:
            print(f"stage   {stage.name}: was done before")
            continue
        print(f"stage   {stage.name}: {stage.experiment}", flush=True)
        run_stage(stage, root)
        finished.append(stage.name)
        atomic_write(paths.stages, json.dumps({"experiment": name, "done": finished}))


def run_stage(stage: Stage, root: Path) -> None:
    """Run a stage to its end: from its last checkpoint where there is one, else from nothing."""
    paths = RunDir(root / stage.name)
    config = replace(stage.config, fileroot=str(root.parent), experiment_name=root.name, trial_name=stage.name,
                     overwrite=True)  # fmt: skip
    if paths.plan.is_file() and resumable(paths):
        return retried(partial(resume, stage.experiment, as_experiment(config), paths), paths)

    def begin() -> None:
        run = preflight(stage.experiment, as_experiment(config), paths)
        write_run(run)
        launch(run)

    retried(begin, paths)
