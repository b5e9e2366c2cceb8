"""Runs that lose workers permanently continue with the remaining ones, and grow again on request."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S
from tests.integration.conftest import Run, Started, same_curve, start
from tests.integration.test_failures import no_process_remains, worker_pid
from tests.integration.test_resume import OFTEN, resume

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LiveProcesses = Callable[[Path], dict[int, str]]
TWO = ["n_gpus_per_node=2", "max_device_failures=1", "recover_mode=fault"]


@pytest.fixture(scope="module")
def straight(realhf: Callable[..., Run], ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return realhf("ppo-math", tmp_path_factory.mktemp("straight"), [*ppo_words, *OFTEN, "n_gpus_per_node=2"])


def wait_for_line(started: Started, step: int) -> None:
    metrics, end = started.root / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert started.process.poll() is None, started.process.communicate()[0]
        assert time.monotonic() < end, f"there is no line {step} in {metrics}"
        time.sleep(0.01)


def lose(started: Started, rank: int, step: int, live_processes: LiveProcesses) -> None:
    """Kill a worker after the metrics of a step are written."""
    wait_for_line(started, step)
    os.kill(worker_pid(started, rank, live_processes), signal.SIGKILL)


def test_after_a_lost_worker_the_run_continues_under_a_new_plan(
    straight: Run, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *OFTEN, *TWO, "allocation_mode=search"])
    lose(started, 1, 3, live_processes)
    run = started.finish()
    assert run.code == 0, run.output
    assert "failed  worker 1 was ended by SIGKILL during " in run.output
    assert "lost    the device of worker 1; continuing on 1 of 2 workers with n_gpus_per_node=1" in run.output
    assert "repeat  steps 3 to 3 (3 prompts), completed" in run.output or "of 5 steps are done" in run.output
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5]
    assert same_curve(straight, run) == []
    assert no_process_remains(tmp_path, live_processes)


def test_a_worker_that_hangs_counts_as_lost(
    straight: Run, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *OFTEN, *TWO, "heartbeat_timeout=10"])
    wait_for_line(started, 3)  # the step before the last has a checkpoint
    os.kill(worker_pid(started, 1, live_processes), signal.SIGSTOP)
    run = started.finish()
    assert run.code == 0 and "lost    the device of worker 1; continuing on 1 of 2 workers" in run.output, run.output
    assert same_curve(straight, run) == [] and no_process_remains(tmp_path, live_processes)


def test_a_device_is_retried_before_it_is_excluded(
    straight: Run, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    words = ["n_gpus_per_node=2", "recover_mode=auto", "recover_retries=2"]
    started = start("ppo-math", tmp_path, [*ppo_words, *OFTEN, *words])
    lose(started, 0, 3, live_processes)
    first, end = worker_pid(started, 1, live_processes), time.monotonic() + TIMEOUT_S
    while not (left := [p for p, c in live_processes(started.root).items() if f"{started.root} 0 " in c and p > first]):
        assert time.monotonic() < end, "worker 0 was not started again"
        time.sleep(0.01)
    os.kill(left[0], signal.SIGKILL)
    run = started.finish()
    assert run.code == 0 and "1 restarts are left" in run.output and "0 restarts are left" in run.output, run.output
    assert run.output.count("lost    the device of worker 0; continuing on 1 of 2 workers") == 1
    assert same_curve(straight, run) == []


def test_without_the_planner_the_error_suggests_a_layout(
    straight: Run, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *OFTEN, *TWO, "allocation_mode=t2"])
    lose(started, 1, 3, live_processes)
    run = started.finish()
    assert run.code == 1, run.output
    assert "allocation_mode=t2 is for 2 workers, 1 are left; recover_allocation=heuristic allows it" in run.output
    (command,) = (line for line in run.output.splitlines() if line.startswith("resume with: realhf "))
    words = command.removeprefix("resume with: realhf ").split()
    assert words[2:] == ["n_gpus_per_node=1", "allocation_mode=heuristic"]
    run = start("", started.root, [], command=words).finish()
    assert run.code == 0 and same_curve(straight, run) == [], run.output


def test_a_run_is_stopped_after_a_step_and_grows(
    straight: Run, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    started = start("ppo-math", tmp_path, [*ppo_words, *OFTEN, "exp_ctrl.ckpt_freq_steps=5"])
    wait_for_line(started, 1)
    (started.root / "stop").touch()
    run = started.finish()
    n_steps = len(run.metrics)
    assert run.code == 130 and f"stopped after step {n_steps} of 5, as requested" in run.output, run.output
    assert n_steps < 5 and no_process_remains(tmp_path, live_processes)
    run = resume(started.root, "n_gpus_per_node=2")
    assert (
        run.code == 0 and f"step_{n_steps}: {n_steps} of 5 steps are done" in run.output and "repeat" not in run.output
    )
    assert same_curve(straight, run) == []


def test_the_directory_of_a_run_in_progress_is_locked(ppo_words: list[str], tmp_path: Path) -> None:
    words = [*ppo_words, "exp_ctrl.total_train_epochs=10000"]
    started = start("ppo-math", tmp_path, [*words, "exp_ctrl.ckpt_freq_steps=2"])
    started.wait_for_checkpoint()
    assert resume(started.root).code == 2
    over = start("ppo-math", tmp_path, [*words, "overwrite=True"]).finish()
    assert over.code == 2 and "has a run in progress" in over.output
    stop = start("", started.root, [], command=["stop", str(started.root)]).finish()
    assert stop.code == 0 and "stopped; resume with: realhf resume" in stop.output, stop.output
    run = started.finish()
    assert run.code == 130 and f"stopped after step {len(run.metrics)} of " in run.output, run.output
    again = start("", started.root, [], command=["stop", str(started.root)]).finish()
    assert again.code == 2 and "has no run in progress" in again.output
