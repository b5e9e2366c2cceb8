"""Worker processes and how they end."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.api.messages import Hello
from realhf.apps.commands.quickstart import prepare
from realhf.apps.prepare.launching import write_run
from realhf.base.paths import RunDir
from realhf.launch.local import LocalLauncher
from realhf.system.transport.auth import new_key
from realhf.system.transport.channel import ZmqMaster
from tests.conftest import TIMEOUT_S, Task


def wait_for(launcher: LocalLauncher, rank: int) -> str:
    launcher.processes[rank].wait(TIMEOUT_S)
    return launcher.dead()[rank]


def test_a_worker_that_cannot_start_logs_the_reason(tmp_path: Path) -> None:
    launcher = LocalLauncher(RunDir(tmp_path), 1, threads=1)
    assert launcher.prepare() == ""  # a private socket
    launcher.start("ipc:///nowhere")
    assert wait_for(launcher, 0) == "exited with code 1"
    assert launcher.wait(1.0) == {0: "exited with code 1"}
    launcher.stop()
    log = RunDir(tmp_path).log("worker-0").read_text()
    assert "Traceback" in log and "plan.json" in log


@pytest.mark.dist
def test_workers_end_when_killed_terminated_or_orphaned(
    task: Task, actor_folder: Path, tmp_path: Path, live_processes: Callable[[Path], dict[int, str]]
) -> None:
    overrides = [f"fileroot={tmp_path}", "trial_name=t", f"actor.path={actor_folder}", f"dataset.path={task.train}",
             "dataset.train_bs_n_seqs=7", "ppo.gen.max_new_tokens=9", "n_gpus_per_node=3", "device=cpu"]  # fmt: skip
    run = prepare("ppo-math", overrides)
    write_run(run, "launch")
    channel = ZmqMaster(new_key(run.paths.key), 3)
    launcher = LocalLauncher(run.paths, 3, threads=1)
    try:
        launcher.start(channel.address)
        messages = [channel.receive(TIMEOUT_S) for _ in range(6)]  # a hello and a heartbeat of each
        hello = [message for message in messages if isinstance(message, Hello)]
        pids = {message.rank: message.pid for message in hello}
        assert pids == {rank: process.pid for rank, process in enumerate(launcher.processes)}
        assert launcher.dead() == {} and len(live_processes(run.paths.root)) == 3
        assert launcher.wait(0.0) == dict.fromkeys(range(3), "is still running")
        assert all(os.getpgid(pid) == pid for pid in pids.values())  # no signals of this terminal
        environment = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
        assert b"OMP_NUM_THREADS=1" in environment and b"OMP_WAIT_POLICY=PASSIVE" in environment
        os.kill(pids[1], signal.SIGKILL)
        assert wait_for(launcher, 1) == "was ended by SIGKILL"
        assert list(launcher.dead()) == [1]
        stdin = launcher.processes[2].stdin
        assert stdin is not None
        stdin.close()  # as at the end of the launcher
        assert wait_for(launcher, 2) == "exited with code 3"
    finally:
        launcher.stop()
        channel.close()
    assert launcher.dead()[0] == "was ended by SIGTERM" and live_processes(run.paths.root) == {}
    launcher.stop()


def test_threads_per_worker(tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    assert LocalLauncher(RunDir(tmp_path), 1, 0).threads == cores
    assert LocalLauncher(RunDir(tmp_path), 10 * cores, 0).threads == 1
    assert LocalLauncher(RunDir(tmp_path), 1, 5).threads == 5
