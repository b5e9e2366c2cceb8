"""``realhf master``: runs the master for a prepared run directory; SLURM jobs call it."""

import sys
from functools import partial
from pathlib import Path

from realhf.apps.prepare.launching import launch, read_run
from realhf.apps.prepare.recovery import retried
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.system.checkpoint.manifest import newest, rewind


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or not RunDir(Path(arguments[0])).plan.is_file():
        raise UserError("usage: realhf master RUN_DIR, with the config.yaml and plan.json of a run")
    root = Path(arguments[0])
    retried(partial(run_from_last_checkpoint, root), RunDir(root))


def run_from_last_checkpoint(root: Path) -> None:
    """Resume from the last checkpoint, if any: SLURM may have requeued the job."""
    run = read_run(root)
    last = newest(run.paths.checkpoints)
    rewind(run.paths, last[1].step if last else -1)
    launch(run, last)


if __name__ == "__main__":
    from realhf.apps.main import run as run_command

    sys.exit(run_command(["master", *sys.argv[1:]]))
