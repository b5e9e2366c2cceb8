"""What a process gives up, piece by piece; whole programs are in test_sandbox."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.rewards.sandbox.isolation import landlock_version, open_to_all, readable_paths, threads_of
from realhf.rewards.sandbox.seccomp import MACHINES

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="programs are shut in on Linux only"
)
ROOT = Path(__file__).parents[2]
BARE = """
import os, resource, socket, sys
sys.path.insert(0, sys.argv[1])
from realhf.rewards.sandbox.isolation import IsolationInfo, Limits, restrict_program
restrict_program(IsolationInfo(False, 0, int(sys.argv[3]) or None, 0), Limits(memory=2**29), 3.0, sys.argv[2])
print(os.getcwd() == sys.argv[2], os.getuid(), resource.getrlimit(resource.RLIMIT_AS)[1] == 2**29)
for action in (os.fork, socket.socket, lambda: os.kill(os.getppid(), 0), lambda: os.setuid(0) or os.getuid()):
    try:
        print(action())
    except OSError as error:
        print(error.errno)
"""


def test_limits_and_filter_need_neither_namespaces_nor_landlock(tmp_path: Path) -> None:
    uid = 60_000_001 if os.getuid() == 0 else 0  # root's programs become someone else
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(ROOT), str(tmp_path), str(uid)], capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"True {uid or os.getuid()} True", done
    assert lines[1:] == ["1"] * 4  # EPERM


def test_paths_are_named_once() -> None:
    paths = readable_paths()
    assert paths == sorted(paths) and all(os.path.exists(path) for path in paths)
    assert not [path for path in paths for other in paths if path.startswith(other + "/")]
    assert any(os.__file__.startswith(path + "/") for path in paths)


def test_who_may_read(tmp_path: Path) -> None:
    closed = tmp_path / "closed" / "open"
    closed.mkdir(parents=True, mode=0o755)
    closed.parent.chmod(0o700)
    assert open_to_all("/usr") and not open_to_all(str(closed))


def test_threads_are_counted() -> None:
    assert threads_of(os.getuid()) > threads_of(3_999_999_999) == 256
    assert landlock_version() >= 0
