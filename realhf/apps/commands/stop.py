"""``realhf stop``: ends a run after its current step with a checkpoint, so that it can be resumed."""

import time
from pathlib import Path

from realhf.apps.prepare.launching import read_run
from realhf.base.atomic_io import is_locked
from realhf.base.errors import RunFailed, UserError
from realhf.base.paths import RunDir

USAGE = "usage: realhf stop RUN_DIR"
POLL_S = 0.2


def main(arguments: list[str]) -> None:
    if not arguments:
        raise UserError(f"missing RUN_DIR\n{USAGE}")
    paths = RunDir(Path(arguments[0]))
    if len(arguments) > 1 or not paths.plan.is_file() or not is_locked(paths.lock):
        raise UserError(f"{paths.root} has no run in progress\n{USAGE}")
    run = read_run(paths.root)
    if not run.writes_checkpoints:
        raise UserError(f"{paths.root} writes no checkpoints (exp_ctrl.ckpt_freq_steps) and could not be resumed; "
                        "use Ctrl-C to end it")  # fmt: skip
    paths.stop.touch()
    print("the run ends after its current step", flush=True)
    deadline = time.monotonic() + run.config.call_timeout
    while is_locked(paths.lock):
        if time.monotonic() > deadline:
            raise RunFailed(f"the run in {paths.root} did not end within {run.config.call_timeout:.0f} s")
        time.sleep(POLL_S)
    print(f"stopped; resume with: realhf resume {paths.root} [n_nodes=... n_gpus_per_node=...]")
