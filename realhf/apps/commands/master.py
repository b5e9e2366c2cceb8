"""``realhf master``: runs the master for a prepared run directory; SLURM jobs call it."""

import signal
import sys
from functools import partial
from pathlib import Path

from realhf.apps.prepare.launching import launch, locked, read_run, stored_run
from realhf.apps.prepare.recovery import resume, retried
from realhf.apps.profiles.profile_job import lead
from realhf.base.errors import RunStopped, UserError
from realhf.base.paths import RunDir
from realhf.system.checkpoint.manifest import checkpoints_of, rewind


def main(arguments: list[str]) -> None:
    if arguments and RunDir(Path(arguments[0])).profile_job.is_file():
        return lead(RunDir(Path(arguments[0])))
    if not 1 <= len(arguments) <= 2 or not RunDir(Path(arguments[0])).plan.is_file():
        raise UserError("usage: realhf master RUN_DIR [LAUNCH], with the config.yaml and plan.json of a run")
    paths = RunDir(Path(arguments[0]))
    if arguments[1:] not in ([], [stored_run(paths).launch]):
        raise UserError(f"{paths.root} has been replaced by another launch since this job was submitted")
    signal.signal(signal.SIGUSR1, lambda number, frame: paths.stop.touch())  # from SLURM, before the time limit
    try:
        retried(partial(run_from_last_checkpoint, paths), paths)
    except RunStopped as stopped:  # the job has done what was asked of it
        print(stopped)


def run_from_last_checkpoint(paths: RunDir) -> None:
    """Resume from the last checkpoint, if any: SLURM may have requeued the job."""
    if checkpoints_of(paths.checkpoints):
        run = read_run(paths.root)
        return resume(run.experiment, run.config, paths)
    with locked(paths):
        rewind(paths, -1)
        launch(paths)


if __name__ == "__main__":
    from realhf.apps.main import console

    console(["master", *sys.argv[1:]])
