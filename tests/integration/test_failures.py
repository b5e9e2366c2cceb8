"""Errors of failed runs name the worker and its activity; no process remains; a run directory is not reused."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import TIMEOUT_S, Run, Started

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Start = Callable[..., Started]
LiveProcesses = Callable[[Path], dict[int, str]]


@pytest.fixture
def endless(realhf_start: Start, ppo_words: list[str], tmp_path: Path) -> Started:
    """A run on two workers with judges, after its first step of 10,000."""
    rewards = tmp_path / "own_rewards.py"
    rewards.write_text("def graded(prompt, answer, row):\n    return len(answer) / 10\n")
    words = [f"reward.fn={rewards}:graded", "exp_ctrl.total_train_epochs=10000", "n_gpus_per_node=2"]
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *words])
    started.wait_for_step()
    return started


def worker_pid(started: Started, rank: int, live_processes: LiveProcesses) -> int:
    words = f"realhf.apps.worker {started.root} {rank} "
    return next(pid for pid, command in live_processes(started.root).items() if words in command)


def no_process_remains(folder: Path, live_processes: LiveProcesses) -> bool:
    """Wait for processes that are exiting."""
    end = time.monotonic() + TIMEOUT_S
    while (left := live_processes(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return not left


def test_an_interrupt_ends_launcher_workers_and_judges(
    endless: Started, live_processes: LiveProcesses, tmp_path: Path
) -> None:
    commands = list(live_processes(tmp_path).values())
    assert len(commands) == 5 and sum("realhf.rewards.judge.server" in c for c in commands) == 2  # one for each worker
    endless.process.send_signal(signal.SIGINT)
    run = endless.finish()
    assert run.code == 130 and "interrupted: workers are stopped" in run.output and "Traceback" not in run.output
    assert no_process_remains(tmp_path, live_processes)
    json.loads((run.root / "trace.json").read_text())  # closed in time


def test_the_error_names_the_killed_worker_and_its_activity(
    endless: Started, live_processes: LiveProcesses, tmp_path: Path
) -> None:
    os.kill(worker_pid(endless, 1, live_processes), signal.SIGKILL)
    run = endless.finish()
    assert run.code == 1
    (line,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert line.startswith("error: worker 1 was ended by SIGKILL during ")
    assert " of step " in line and str(run.root / "logs" / "worker-1.log") in line
    assert "done " not in run.output and no_process_remains(tmp_path, live_processes)


def test_workers_exit_when_the_launcher_is_killed(
    endless: Started, live_processes: LiveProcesses, tmp_path: Path
) -> None:
    endless.process.kill()
    assert endless.process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert no_process_remains(tmp_path, live_processes)


def fork_server_pid(worker: int) -> int:
    """Return the parent of a worker, which has forked it."""
    parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    assert "realhf.launch.fork_server" in Path(f"/proc/{parent}/cmdline").read_text()
    return parent


def test_the_fork_server_ends_with_its_launcher(endless: Started, live_processes: LiveProcesses) -> None:
    servers = {fork_server_pid(worker_pid(endless, rank, live_processes)) for rank in (0, 1)}
    endless.process.kill()
    assert endless.process.wait(TIMEOUT_S) == -signal.SIGKILL and len(servers) == 1
    end = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in servers):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_without_its_fork_server_ends_as_usual(
    realhf: Callable[..., Run], realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    words = [*ppo_words, "n_gpus_per_node=2"]
    alone = realhf("ppo-math", tmp_path / "alone", words)
    started = realhf_start("ppo-math", tmp_path / "killed", words)
    started.wait_for_step()
    os.kill(fork_server_pid(worker_pid(started, 0, live_processes)), signal.SIGKILL)
    run = started.finish()
    assert run.code == 0 and run.curve == alone.curve, run.output


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p.relative_to(root)): (p.stat().st_mtime_ns, p.read_bytes()) for p in root.rglob("*") if p.is_file()}


def test_after_sigterm_the_run_directory_is_reused_only_with_overwrite(
    endless: Started, realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    endless.process.terminate()
    run = endless.finish()
    assert run.code == 130 and no_process_remains(tmp_path, live_processes)
    before = snapshot(run.root)
    again = realhf_start("ppo-math", tmp_path, ppo_words).finish()
    assert again.code == 2 and "already contains a run" in again.output and "overwrite=True" in again.output
    assert snapshot(run.root) == before
    overwritten = realhf_start(
        "ppo-math", tmp_path, [*ppo_words, "overwrite=True", "exp_ctrl.total_train_steps=1"]
    ).finish()
    assert overwritten.code == 0 and len(overwritten.metrics) == 1
    assert {p.name for p in (overwritten.root / "logs").iterdir()} == {"worker-0.log"}  # the old files are removed


def failed(run: Run, *words: str) -> None:
    assert run.code == 1 and all(word in run.output for word in words), run.output
    assert "done " not in run.output


def test_an_error_of_a_worker_reaches_the_console(
    realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    """A learning rate out of range, and a verifier that fails its self-test."""
    wild = ["actor.optimizer.lr=1e30", "actor.optimizer.gradient_clipping=0", "ppo.early_stop_imp_ratio=null"]
    runs = [
        realhf_start("ppo-math", tmp_path / "wild", [*ppo_words, *wild, "n_gpus_per_node=2"]),
        realhf_start(
            "ppo-math", tmp_path / "wrong", [*ppo_words, "reward.fn=math", "reward.check_verifier_status=True"]
        ),
    ]
    failed(runs[0].finish(), "worker ", "failed during ", "of step ", "learning rate", "logs/worker-")
    failed(runs[1].finish(), "worker 0 failed during rew_inf of step 1", "responses are wrong", "check_verifier_status")
    assert no_process_remains(tmp_path, live_processes)
