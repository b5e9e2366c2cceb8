"""The status of a run: running, done, stopped, failed or ended early, and its error."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from shlex import quote

from realhf.apps.view.report.text import clean
from realhf.base.atomic_io import is_locked
from realhf.base.paths import RunDir

LOG_TAIL = 64 << 10  # bytes
MAX_LOGS = 256
ERROR_LINE = " ERROR "


class RunState(Enum):
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    ENDED = "ended early"
    WAITING = "not started"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, why it is known, and the error: the launcher's, or that of the first failed worker."""

    state: RunState
    reason: str
    error: str = ""


def read_status(paths: RunDir, n_done: int, n_steps: int | None) -> RunStatus:
    """Return the status of a run with ``n_done`` of ``n_steps`` steps (None: unknown)."""
    if not paths.root.is_dir():
        return RunStatus(RunState.UNKNOWN, "the run directory no longer exists")
    if is_locked(paths.lock):
        request = "; it ends after the current step, as requested" if paths.stop.exists() else ""
        return RunStatus(RunState.RUNNING, f"a process holds the lock of the run directory{request}")
    if error := recorded_error(paths.error):
        return RunStatus(RunState.FAILED, "the run ended with an error", error)
    if n_steps is not None and n_done >= n_steps:
        return RunStatus(RunState.DONE, "all steps are complete")
    if paths.stop.exists():
        return RunStatus(RunState.STOPPED, f"stopped on request; resume with: realhf resume {quote(str(paths.root))}")
    if error := first_error(paths.logs):
        return RunStatus(RunState.FAILED, "a worker has logged an error", error)
    if paths.key.exists():
        return RunStatus(RunState.FAILED, "the master was killed: the run has no end, and no process holds its lock")
    if n_steps is None:
        return RunStatus(RunState.UNKNOWN, "no process holds the lock, and the number of steps is not known")
    if not n_done and not paths.events.exists():
        return RunStatus(RunState.WAITING, "the run directory is prepared, but no process has used it")
    return RunStatus(RunState.ENDED, "interrupted")


def recorded_error(path: Path) -> str:
    """Return the last part of the error with which the launcher ended the run."""
    try:
        return clean(path.read_text("utf-8", "replace")[-LOG_TAIL:].strip()) if path.is_file() else ""
    except OSError:
        return ""


def first_error(logs: Path) -> str:
    """Return the earliest error in the last lines of the logs of workers, with its traceback."""
    errors = (_last_error(path) for path in sorted(logs.glob("*.log"))[:MAX_LOGS])
    return min(filter(None, errors), default="")  # lines begin with the time


def _last_error(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL))
            tail = file.read(LOG_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""
    before, found, after = tail.rpartition(ERROR_LINE)
    if not found:
        return ""
    return clean(f"{before.rpartition(chr(10))[2]}{found}{after}".strip()) + f"\n({path.name})"
