"""How a worker is started, whoever starts it: its command line, its environment, the words for its end.

A worker's standard input is a pipe that only its launcher holds: when the launcher goes, however it goes, the worker
reads its end and leaves.
"""

import os
import signal
import sys
from pathlib import Path

from realhf.base.paths import RunDir


def worker_command(paths: RunDir, rank: int | str, address: str, python: str = "") -> list[str]:
    """Return the command of a worker; ``rank`` may be the name of an environment variable that holds it."""
    return [python or sys.executable, "-m", "realhf.apps.worker", str(paths.root.resolve()), str(rank), address]


def shared_environment(threads: int) -> dict[str, str]:
    """Return what is added to the environment of workers that share the cores of a machine."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # idle OpenMP threads must not spin
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path(),
    }


def python_path() -> str:
    """Return a search path on which this package is found."""
    package_root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))


def how_it_ended(code: int) -> str:
    """Put the exit code of a process into words; that of a signal is negative."""
    return f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
