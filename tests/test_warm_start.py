"""Warm starts of the slow tests: they are used, and launchers do without where they do not apply."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.launch.local import WORKER, worker_environment
from tests.conftest import part_of
from tests.scaling import pairs, spread, subset
from tests.warm_start import ADDRESS, Forked, WarmForkServer, address

FILES = [Path(f"test_{number}.py") for number in range(10)]


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    address.cache_clear()
    monkeypatch.setenv(ADDRESS, address())
    yield os.environ[ADDRESS]
    address.cache_clear()


def kind_of_process(environment: dict[str, str]) -> type:
    server = WarmForkServer(WORKER[-1], environment)
    process = server._process
    server.close()
    if isinstance(process, Forked):
        assert not Path(f"/proc/{process.pid}").exists()
    return type(process)


@pytest.mark.slow
def test_only_launchers_with_the_same_environment_start_warm(warm: str) -> None:
    same = worker_environment(1)
    assert kind_of_process(same) is Forked
    assert kind_of_process({**same, "RAY_ADDRESS": "x", "PYTEST_CURRENT_TEST": "y"}) is Forked
    for other in ({"HF_HOME": "/no"}, {"REALHF_NATIVE": "0"}, {"OMP_NUM_THREADS": "2"}):
        assert kind_of_process({**same, **other}) is subprocess.Popen


@pytest.mark.slow
def test_launchers_do_without_a_process_that_was_killed(warm: str) -> None:
    table = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdecimal()]
    (pid,) = (int(file.parent.name) for file in table if file.exists() and warm.encode() in file.read_bytes())
    os.kill(pid, signal.SIGKILL)
    assert kind_of_process(worker_environment(1)) is subprocess.Popen


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10, 11])
def test_parts_are_all_files_once(n: int) -> None:
    parts = [part_of(FILES, f"{number + 1}/{n}") for number in range(n)]
    assert sorted(file for part in parts for file in part) == FILES


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "/", "1/0", "-1/3", "a/b", "1/3/3", ""])
def test_other_parts_are_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="must be K/N"):
        part_of(FILES, part)


def test_a_reduced_table_has_every_row_and_column() -> None:
    for n in (1, 2, 3, 5, 8):
        table = pairs(spread("abcdefgh", range(8), n))
        assert len(table) == len(set(table)) >= 8 * n and {row for row, _ in table} == set("abcdefgh")
        assert {column for _, column in table} == set(range(8))
    assert set(subset(range(9), 4)) <= set(range(9)) and subset(range(3), 9) == [0, 1, 2]
