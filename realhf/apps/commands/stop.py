"""``realhf stop``: has a run end after the step that it is at, so that it can go on with more workers, or later."""

import time
from pathlib import Path

from realhf.apps.prepare.launching import read_run
from realhf.base.atomic_io import is_locked
from realhf.base.errors import RunFailed, UserError
from realhf.base.paths import RunDir

USAGE = "usage: realhf stop RUN_DIR"
POLL_S = 0.2


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    paths = RunDir(Path(arguments[0]))
    if len(arguments) > 1 or not paths.plan.is_file() or not is_locked(paths.lock):
        raise UserError(f"{paths.root} holds no run that goes on\n{USAGE}")
    run = read_run(paths.root)
    if not run.writes_checkpoints:
        raise UserError(f"{paths.root} writes no checkpoints (exp_ctrl.ckpt_freq_steps), so that nothing could go on; "
                        "Ctrl-C ends it")  # fmt: skip
    paths.stop.touch()
    print("the run ends after the step it is at", flush=True)
    patience = run.config.call_timeout
    end = time.monotonic() + patience
    while is_locked(paths.lock):
        if time.monotonic() > end:
            raise RunFailed(f"waited {patience:.0f} s for the run in {paths.root} to end")
        time.sleep(POLL_S)
    print(f"stopped; go on with: realhf resume {paths.root} [n_nodes=... n_gpus_per_node=...]")
