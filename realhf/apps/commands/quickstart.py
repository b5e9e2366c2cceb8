"""``realhf quickstart``: reads options, checks and plans a run, launches it and waits for its end.

Invalid options are reported before the modules of planning and launching are imported.
"""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from realhf.api.config.option import FILE
from realhf.api.experiment import Experiment
from realhf.apps.prepare.option_help import options_help
from realhf.apps.prepare.options import absolute, updated
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.experiments import EXPERIMENTS, experiment_class

if TYPE_CHECKING:
    from realhf.plan.run_spec import RunSpec

HELP = ("-h", "--help")

USAGE = "usage: realhf quickstart EXPERIMENT [key=value ...] [--config FILE.yaml] [--dry-run]"


def main(arguments: list[str]) -> None:
    if arguments in (["-h"], ["--help"]):
        return print("\n".join([USAGE, "", "experiments:", *experiment_lines()]))
    if not arguments:
        raise UserError(f"missing EXPERIMENT: {', '.join(EXPERIMENTS)}, or my_file.py:MyExperiment\n{USAGE}")
    pattern = help_pattern(arguments)
    if pattern is not None:
        return print_help(next(word for word in arguments if word not in HELP), pattern)
    name, rest = absolute(arguments[0], arguments[0], FILE), arguments[1:]
    experiment, paths = read_words(name, [word for word in rest if word != "--dry-run"])
    is_dry = "--dry-run" in rest
    from realhf.launch.local import preloaded_workers

    with nullcontext() if is_dry else preloaded_workers(experiment):
        from realhf.apps.prepare.starting import start_experiment

        start_experiment(name, experiment, paths, dry=is_dry)


def experiment_lines() -> list[str]:
    return [f"  {name:<12} {(experiment_class(name).__doc__ or '').strip()}" for name in EXPERIMENTS]


def help_pattern(words: list[str]) -> str | None:
    """Return the word after ``EXPERIMENT ... --help``, empty if there is none; None without ``--help``."""
    at = next((i for i, word in enumerate(words) if word in HELP), None)
    return None if at is None else "".join(words[at + 1 : at + 2]) if at else ""


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


def print_help(name: str, pattern: str) -> None:
    cls = experiment_class(name)
    print(f"realhf quickstart {name}: {(cls.__doc__ or '').strip()}\n\n{options_help(cls, pattern)}")
    if not pattern:
        print(f"\nrealhf quickstart {name} --help all lists all options, --help WORD those with WORD in name or text.")
