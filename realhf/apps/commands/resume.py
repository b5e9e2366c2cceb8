"""``realhf resume``: resumes a run from its last checkpoint, optionally with other layouts or more or fewer workers."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from realhf.api.config import ResumeConfig
from realhf.apps.prepare.launching import is_queued, read_run
from realhf.apps.prepare.multi_stage import resume_multi_stage
from realhf.apps.prepare.options import updated
from realhf.apps.prepare.recovery import resume, retried
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.launch.local import preloaded_workers

USAGE = "usage: realhf resume RUN_DIR [key=value ...]"


def main(arguments: list[str]) -> None:
    if not arguments:
        raise UserError(f"missing RUN_DIR\n{USAGE}")
    paths = RunDir(Path(arguments[0]))
    if problems := paths.unusable(os.R_OK | os.W_OK):
        raise UserError(problems)
    if paths.stages.is_file():
        return resume_multi_stage(paths, arguments[1:])
    run = read_run(paths.root)
    experiment = updated(replace(run.config, resume=ResumeConfig()), arguments[1:])
    attempt = partial(resume, run.experiment, experiment, paths)
    if is_queued(experiment):
        return attempt()  # the job handles restarts
    with preloaded_workers(experiment):
        retried(attempt, paths)
