"""Runs on a SLURM cluster of virtual nodes: the same curve, and all ways in which a job ends."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import PROGRAM, REPOSITORY, TIMEOUT_S, Run, Started, same_curve
from tests.integration.test_agents import AGENTS, chat_words
from tests.launch.slurm_cluster import SlurmCluster, running_cluster

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Start = Callable[..., Started]
LiveProcesses = Callable[[Path], dict[int, str]]
WORDS = ["mode=slurm", "n_nodes=2", "n_gpus_per_node=2"]
ENDLESS = ["exp_ctrl.total_train_epochs=10000"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Three nodes of two cores."""
    with running_cluster(tmp_path_factory.mktemp("slurm"), 3, "NOTHING ABOUT SLURM IS TESTED") as cluster:
        yield cluster


def job_of(cluster: SlurmCluster) -> str:
    (number,) = cluster.run("squeue", "-h", "-o", "%i").split()
    return number


def left(cluster: SlurmCluster, folder: Path, live_processes: LiveProcesses) -> tuple[dict[int, str], str]:
    """Return the processes and jobs that do not end. A lost node's workers exit after they lose the master."""
    end = time.monotonic() + TIMEOUT_S
    while any(found := (live_processes(folder), cluster.run("squeue", "-h"))) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def worker_pid(run: Path, rank: int, live_processes: LiveProcesses) -> int:
    """The worker of a rank; SLURM's step process has the same command line."""
    words = f"-m realhf.apps.worker {run} SLURM_PROCID"
    for pid, command in live_processes(run).items():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if words in command and f"SLURM_PROCID={rank}".encode() in environment:
            return pid
    raise AssertionError(f"no worker {rank}: {live_processes(run)}")


def test_two_nodes_give_the_curve_of_one_machine(
    cluster: SlurmCluster,
    four_worker_run: Run,
    realhf_start: Start,
    ppo_words: list[str],
    live_processes: LiveProcesses,
    tmp_path: Path,
) -> None:
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS]).finish()
    assert run.code == 0, run.output
    assert " is running on n[" in run.output and "done    3 steps" in run.output and " is completed" in run.output
    assert same_curve(four_worker_run, run) == []
    assert left(cluster, tmp_path, live_processes) == ({}, "")


def test_environments_and_agents_run_on_the_nodes(cluster: SlurmCluster, realhf_start: Start, tmp_path: Path) -> None:
    words = [*chat_words("qwen2_5", tmp_path), f"env.cls={AGENTS}:chat", "env.workers=1"]
    (here, there) = (
        realhf_start("grpo", tmp_path / name, [*words, *where]).finish()
        for name, where in {
            "here": ["n_gpus_per_node=2"],
            "there": ["mode=slurm", "n_nodes=2", "n_gpus_per_node=1"],
        }.items()
    )
    assert here.code == there.code == 0, there.output
    assert same_curve(here, there) == [] and there.curve[0]["env/turns"] == 3
    assert there.generations(1) == here.generations(1)


def test_a_cancelled_job_ends_the_run(
    cluster: SlurmCluster, realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    """By another user, then by an interrupt while the job is pending."""
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *ENDLESS])
    started.wait_for_step()
    waiting = realhf_start("ppo-math", tmp_path / "waiting", [*ppo_words, *WORDS, "n_nodes=3"])
    end = time.monotonic() + TIMEOUT_S
    while "(Resources)" not in cluster.run("squeue", "-h", "-o", "%r (%r)"):
        assert time.monotonic() < end, cluster.run("squeue")
        time.sleep(0.2)
    waiting.process.send_signal(signal.SIGINT)
    run = waiting.finish()
    assert run.code == 130 and "is pending (" in run.output and "interrupted" in run.output, run.output
    number = job_of(cluster)  # of the other job
    cluster.run("scancel", number)
    run = started.finish()
    assert run.code == 1 and f"error: job {number} (trial) is cancelled" in run.output, run.output
    assert left(cluster, tmp_path, live_processes) == ({}, "")


def test_a_lost_node_requeues_the_job_from_its_checkpoint(
    cluster: SlurmCluster, realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    words = ["exp_ctrl.ckpt_freq_steps=2", "recover_mode=auto", "exp_ctrl.total_train_epochs=100",
             "exp_ctrl.total_train_steps=50"]  # fmt: skip
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *words])
    started.wait_for_checkpoint()
    with cluster.without_node(1):
        run = started.finish()
    assert run.code == 0, run.output
    assert "is running on n[0,2], started 2 times" in run.output and "done    50 steps" in run.output
    assert [line["step"] for line in run.metrics] == list(range(1, 51))
    assert left(cluster, tmp_path, live_processes) == ({}, "")


def test_an_elastic_job_continues_without_a_lost_node(
    cluster: SlurmCluster, realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    words = ["slurm.extra=['--no-kill']", "exp_ctrl.ckpt_freq_steps=2", "recover_mode=auto",
             "exp_ctrl.total_train_epochs=100", "exp_ctrl.total_train_steps=12"]  # fmt: skip
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *words])
    started.wait_for_checkpoint()
    with cluster.without_node(1):
        run = started.finish()
    assert run.code == 0 and "started 2 times" not in run.output, run.output
    assert re.search(r"^failed  worker \d was lost with its node n1 during ", run.output, re.MULTILINE), run.output
    assert "lost    1 of 2 nodes; continuing on 2 of 4 workers with n_nodes=1" in run.output
    assert [line["step"] for line in run.metrics] == list(range(1, 13))
    assert left(cluster, tmp_path, live_processes) == ({}, "")


@pytest.mark.parametrize("is_requested", [True, False])
def test_a_stop_is_not_a_failure(
    is_requested: bool,
    cluster: SlurmCluster,
    realhf_start: Start,
    ppo_words: list[str],
    live_processes: LiveProcesses,
    tmp_path: Path,
) -> None:
    """On request, and at the signal that SLURM sends before the time limit."""
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *ENDLESS, "exp_ctrl.ckpt_freq_steps=1000"])
    started.wait_for_step()
    if is_requested:
        assert realhf_start("", started.root, [], ["stop", str(started.root)]).finish().code == 0
    else:
        cluster.run("scancel", "--batch", "--signal=USR1", job_of(cluster))
    run = started.finish()
    assert run.code == 130 and " is completed" in run.output, run.output
    assert f"stopped; resume with: realhf resume {run.root}" in run.output
    assert (run.root / "checkpoints" / "latest").read_text() == f"step_{len(run.metrics)}"
    assert left(cluster, tmp_path, live_processes) == ({}, "")


def test_a_pending_job_of_a_replaced_run_is_refused(
    cluster: SlurmCluster, realhf_start: Start, ppo_words: list[str], tmp_path: Path
) -> None:
    words = [*ppo_words, *WORDS, "overwrite=True", "exp_ctrl.total_train_steps=1"]
    first = realhf_start("ppo-math", tmp_path, [*words, "slurm.extra=['--hold']"])
    end = time.monotonic() + TIMEOUT_S
    while "(JobHeldUser)" not in cluster.run("squeue", "-h", "-o", "(%r)"):
        assert time.monotonic() < end, cluster.run("squeue")
        time.sleep(0.2)
    number = job_of(cluster)
    second = realhf_start("ppo-math", tmp_path, words).finish()
    assert second.code == 0, second.output
    cluster.run("scontrol", "release", number)
    refused = first.finish()
    assert refused.code == 1 and "has been replaced by another launch" in refused.output, refused.output
    assert len(second.metrics) == 1


def test_inside_an_allocation_a_killed_worker_is_named_with_its_node(
    cluster: SlurmCluster, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    places = [f"fileroot={tmp_path}", "experiment_name=t", "trial_name=trial", "device=cpu"]
    command = ["salloc", "--nodes=2", "--ntasks-per-node=2", *PROGRAM, "quickstart", "ppo-math", *places]
    process = subprocess.Popen([*command, *ppo_words, *WORDS, *ENDLESS], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)  # fmt: skip
    started = Started(process, tmp_path / "t" / "trial")
    started.wait_for_step()
    os.kill(worker_pid(started.root, 3, live_processes), signal.SIGKILL)
    run = started.finish()
    assert run.code == 1 and "is pending" not in run.output, run.output
    (line,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert line.startswith("error: worker 3 on node n") and " ended: killed during " in line
    assert left(cluster, tmp_path, live_processes) == ({}, "")
