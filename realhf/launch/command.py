"""Command line, environment and exit status of a worker, for all launchers.

A worker's standard input is a pipe from its launcher: the worker exits at its end, however the launcher ends.
"""

import os
import signal
import sys
from pathlib import Path

from realhf.base.paths import RunDir


def worker_command(paths: RunDir, rank: int | str, address: str, python: str = "") -> list[str]:
    """Return the command of a worker; ``rank`` may be the name of an environment variable."""
    return [python or sys.executable, "-m", "realhf.apps.worker", str(paths.root.resolve()), str(rank), address]


def shared_environment(threads: int) -> dict[str, str]:
    """Return environment variables of workers that share a machine."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # idle OpenMP threads must not spin
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": python_path(),
    }


def python_path() -> str:
    package_root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH", "")]))


def describe_exit(code: int) -> str:
    """Return the exit status of a process as text; negative codes are signals."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"
