"""Whether a run can have its directory: what the name may be, and what may lie there."""

import os
import re

from realhf.api.config import ExperimentConfig
from realhf.base.atomic_io import TMP_SUFFIX, is_locked
from realhf.base.paths import RunDir


def running_message(paths: RunDir) -> str:
    """Say why nothing else may be done in the directory of a run that goes on."""
    return f"{paths.root} holds a run that goes on; realhf stop {paths.root} ends it after the step it is at"


def directory_problems(config: ExperimentConfig, paths: RunDir) -> list[str]:
    """Say why this run cannot have its directory."""
    problems = []
    for option in ("experiment_name", "trial_name"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value := getattr(config, option)):
            problems.append(f"{option}='{value}': use letters, digits, '.', '_' and '-'")
    taken = next((p for p in (paths.root, *paths.root.parents) if p.exists() and not p.is_dir()), None)
    if taken:
        problems.append(f"the run directory {paths.root} cannot be made: {taken} is a file; set fileroot or trial_name")
    elif is_locked(paths.lock):
        problems.append(running_message(paths))
    elif paths.root.exists() and any(not path.name.endswith(TMP_SUFFIX) for path in paths.root.iterdir()):
        if not paths.config.exists():
            problems.append(f"{paths.root} is not empty and holds no run of realhf; choose another trial_name")
        elif not config.overwrite:
            problems.append(f"{paths.root} already holds a run; choose another trial_name, or set overwrite=True")
    holder = next(p for p in (paths.root, *paths.root.parents) if p.exists())
    if not taken and not os.access(holder, os.W_OK):
        problems.append(f"no permission to write below {holder}; set fileroot")
    return problems
