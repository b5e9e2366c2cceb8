"""Parts of the isolation of a process; `test_sandbox` runs whole programs."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.base.isolation.restrict import is_world_accessible, landlock_version, readable_paths, threads_of
from realhf.base.isolation.seccomp import MACHINES
from tests.conftest import TIMEOUT_S

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="the sandbox needs Linux"
)
ROOT = Path(__file__).parents[3]
BARE = """
import os, resource, socket, sys
sys.path.insert(0, sys.argv[1])
from realhf.base.isolation.restrict import IsolationInfo, Limits, restrict_program
restrict_program(IsolationInfo(False, 0, int(sys.argv[3]) or None, 0), Limits(memory=2**29), 3.0, sys.argv[2])
print(os.getcwd() == sys.argv[2], os.getuid(), resource.getrlimit(resource.RLIMIT_AS)[1] == 2**29)
for action in (os.fork, socket.socket, lambda: os.kill(os.getppid(), 0), lambda: os.setuid(0) or os.getuid()):
    try:
        print(action())
    except OSError as error:
        print(error.errno)
"""


def test_limits_and_filter_without_namespaces_and_landlock(tmp_path: Path) -> None:
    uid = 60_000_001 if os.getuid() == 0 else 0  # programs of root switch to another user
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(ROOT), str(tmp_path), str(uid)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"True {uid or os.getuid()} True", done
    assert lines[1:] == ["1"] * 4  # EPERM


def test_readable_paths_do_not_overlap() -> None:
    paths = readable_paths()
    assert paths == sorted(paths) and all(os.path.exists(path) for path in paths)
    assert not [path for path in paths for other in paths if path.startswith(other + "/")]
    assert any(os.__file__.startswith(path + "/") for path in paths)


def test_world_accessible(tmp_path: Path) -> None:
    closed = tmp_path / "closed" / "open"
    closed.mkdir(parents=True, mode=0o755)
    closed.parent.chmod(0o700)
    assert is_world_accessible("/usr") and not is_world_accessible(str(closed))


def test_threads_of_a_user() -> None:
    assert threads_of(os.getuid()) > threads_of(3_999_999_999) == 256
    assert landlock_version() >= 0
