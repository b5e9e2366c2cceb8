"""``realhf quickstart``: reads options, checks and plans a run, launches it and waits for its end.

Invalid options are reported before the modules of planning and launching are imported.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from realhf.api.config.option import FILE
from realhf.api.experiment import Experiment
from realhf.apps.prepare.options import absolute, print_options, updated
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.experiments import EXPERIMENTS, experiment_class

if TYPE_CHECKING:
    from realhf.plan.run_spec import RunSpec


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: realhf quickstart EXPERIMENT [--config FILE.yaml] [--dry-run] [key=value ...]\n\nexperiments:")
        for name in EXPERIMENTS:
            print(f"  {name:<10} {(experiment_class(name).__doc__ or '').strip()}")
        return
    name, rest = absolute(arguments[0], arguments[0], FILE), arguments[1:]
    if "-h" in rest or "--help" in rest:
        print_help(name)
        return
    experiment, paths = read_words(name, [word for word in rest if word != "--dry-run"])
    from realhf.apps.prepare.starting import start_experiment

    start_experiment(name, experiment, paths, dry="--dry-run" in rest)


def prepare(name: str, words: list[str]) -> "RunSpec":
    """Return the checked run for a command line without writing anything."""
    from realhf.apps.prepare.preflight import preflight

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
    experiment.fileroot = os.path.abspath(experiment.fileroot)  # paths, which are printed, stay as given
    return experiment, paths


def print_help(name: str) -> None:
    cls = experiment_class(name)
    print(f"realhf quickstart {name}: {(cls.__doc__ or '').strip()}\n")
    print_options(cls)
