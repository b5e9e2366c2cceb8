"""Runs on a Ray cluster of two nodes: the same curve, and messages about lost actors and nodes."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Run, Started, same_curve
from tests.integration.test_failures import no_process_remains, worker_pid

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Start = Callable[..., Started]
LiveProcesses = Callable[[Path], dict[int, str]]
WORDS = ["mode=ray", "n_nodes=2", "n_gpus_per_node=2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two cores."""
    pytest.importorskip("ray", reason="NOTHING ABOUT RAY IS TESTED: the extra ray is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        yield cluster
    finally:
        cluster.shutdown()


def test_two_nodes_give_the_curve_of_one_machine(
    cluster: Any,
    four_worker_run: Run,
    realhf_start: Start,
    ppo_words: list[str],
    live_processes: LiveProcesses,
    tmp_path: Path,
) -> None:
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, f"ray.address={cluster.address}"]).finish()
    assert run.code == 0, run.output
    assert same_curve(four_worker_run, run) == []
    assert no_process_remains(tmp_path, live_processes)


def test_lost_actors_and_nodes_are_reported(
    cluster: Any, realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    """After a lost actor the run restarts; after a lost node there is no capacity for it."""
    words = [f"ray.address={cluster.address}", "exp_ctrl.total_train_epochs=10000", "exp_ctrl.ckpt_freq_steps=2",
             "recover_mode=auto", "startup_timeout=90"]  # fmt: skip
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *words])
    started.wait_for_checkpoint()
    first = worker_pid(started, 1, live_processes)
    os.kill(parent(first), signal.SIGKILL)
    while worker_pids(started, live_processes) & {first} or len(worker_pids(started, live_processes)) < 4:
        assert started.process.poll() is None, started.finish().output
    started.wait_for_checkpoint()
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    run = started.finish()
    assert run.code == 1 and "resume  from the last checkpoint; 0 restarts are left" in run.output, run.output
    assert "failed  worker 1 was lost with its actor on node " in run.output
    error = re.findall("^error: (.*)", run.output, re.MULTILINE)[-1]
    # The worker's death may be detected before its actor's. Ray's own reasons contain "RPC error: ".
    assert error.startswith("worker ") and ("was lost with its actor on node " in error or "by SIGKILL" in error)
    assert no_process_remains(tmp_path, live_processes)


def test_the_run_continues_on_the_remaining_nodes(
    cluster: Any, realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    node = cluster.add_node(num_cpus=2) if len(cluster.list_all_nodes()) < 2 else cluster.list_all_nodes()[-1]
    words = [f"ray.address={cluster.address}", "exp_ctrl.total_train_epochs=100", "exp_ctrl.total_train_steps=12",
             "exp_ctrl.ckpt_freq_steps=2", "recover_mode=auto"]  # fmt: skip
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *words])
    started.wait_for_checkpoint()
    cluster.remove_node(node, allow_graceful=False)
    run = started.finish()
    assert run.code == 0, run.output
    assert "lost    1 of 2 nodes; continuing on 2 of 4 workers with n_nodes=1" in run.output, run.output
    assert [line["step"] for line in run.metrics] == list(range(1, 13))
    assert no_process_remains(tmp_path, live_processes)


def test_one_machine_needs_no_cluster(
    realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, "mode=ray", "exp_ctrl.total_train_steps=1"]).finish()
    assert run.code == 0 and len(run.metrics) == 1, run.output
    assert no_process_remains(tmp_path, live_processes)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def worker_pids(started: Started, live_processes: LiveProcesses) -> set[int]:
    return {pid for pid, words in live_processes(started.root).items() if "realhf.apps.worker" in words}
