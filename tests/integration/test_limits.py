"""Limits of the processes of a run: open files, which connections and logs of many workers need."""

import re
import resource
import signal
from pathlib import Path

import pytest

from tests.integration.conftest import start
from tests.integration.test_failures import LiveProcesses

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SOFT = 200


def open_files(pid: int) -> tuple[int, int]:
    """Return the soft and the hard limit of a process."""
    found = re.search(r"^Max open files +(\d+) +(\d+)", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)
    assert found
    return int(found[1]), int(found[2])


def test_a_low_limit_of_open_files_is_raised(
    sft_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    """In the launcher and in its workers, up to the hard limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, before[1]))
    try:
        started = start("sft", tmp_path, [*sft_words, "n_gpus_per_node=2", "exp_ctrl.total_train_epochs=10000"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    started.wait_for_step()
    workers = [pid for pid, text in live_processes(tmp_path).items() if "realhf.apps.worker" in text]
    limits = [open_files(pid) for pid in (started.process.pid, *workers)]
    started.process.send_signal(signal.SIGINT)
    started.finish()
    assert len(limits) == 3 and all(soft == hard > SOFT for soft, hard in limits), limits
