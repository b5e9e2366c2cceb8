"""Checks of the run directory: its name, its content, its permissions."""

import os
import re

from realhf.api.config import ExperimentConfig
from realhf.base.atomic_io import TMP_SUFFIX, is_locked
from realhf.base.paths import RunDir


def running_message(paths: RunDir) -> str:
    return f"{paths.root} has a run in progress; realhf stop {paths.root} ends it after the current step"


def directory_problems(config: ExperimentConfig, paths: RunDir) -> list[str]:
    """Return reasons why a new run cannot use the directory."""
    problems = []
    for option in ("experiment_name", "trial_name"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value := getattr(config, option)):
            problems.append(f"{option}='{value}': use letters, digits, '.', '_' and '-'")
    existing = next(p for p in (paths.root, *paths.root.parents) if p.exists())
    if not existing.is_dir():
        return [*problems, f"cannot create {paths.root}: {existing} is a file; set fileroot or trial_name"]
    if is_locked(paths.lock):
        problems.append(running_message(paths))
    elif paths.root.exists() and any(not path.name.endswith(TMP_SUFFIX) for path in paths.root.iterdir()):
        if not paths.config.exists():
            problems.append(f"{paths.root} is not empty and contains no realhf run; choose another trial_name")
        elif not config.overwrite:
            problems.append(f"{paths.root} already contains a run; choose another trial_name, or set overwrite=True")
    if not os.access(existing, os.W_OK):
        problems.append(f"no write permission in {existing}; set fileroot")
    return problems
