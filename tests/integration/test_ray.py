"""Runs on a Ray cluster of two nodes: the same curve, and what is said when an actor or a node dies."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import PATIENCE_S, Run, Started, same_curve
from tests.integration.test_failures import nothing_is_left, worker_pid

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Start = Callable[..., Started]
Living = Callable[[Path], dict[int, str]]
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


def test_two_nodes_learn_as_this_machine_does(
    cluster: Any, of_four_workers: Run, realhf_start: Start, ppo_words: list[str], living: Living, tmp_path: Path
) -> None:
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, f"ray.address={cluster.address}"]).finish()
    assert run.code == 0, run.said
    assert same_curve(of_four_workers, run) == []
    assert nothing_is_left(tmp_path, living)


def test_the_death_of_actor_and_node_is_told(
    cluster: Any, realhf_start: Start, ppo_words: list[str], living: Living, tmp_path: Path
) -> None:
    """An actor's death starts the run again, a node's leaves no room for it."""
    words = [f"ray.address={cluster.address}", "exp_ctrl.total_train_epochs=10000", "exp_ctrl.ckpt_freq_steps=2",
             "recover_mode=auto", "startup_timeout=30"]  # fmt: skip
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *words])
    started.wait_for_checkpoint()
    first = worker_pid(started, 1, living)
    os.kill(parent(first), signal.SIGKILL)
    while worker_pids(started, living) & {first} or len(worker_pids(started, living)) < 4:
        assert started.process.poll() is None, started.finish().said
    started.wait_for_checkpoint()
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    run = started.finish()
    assert run.code == 1 and "resume  from the last checkpoint; 0 restarts are left" in run.said, run.said
    assert "failed  worker 1 was lost with its actor on node " in run.said
    error = run.said.split("error: ")[1]  # a worker may be seen to die before its actor
    assert error.startswith("worker ") and ("was lost with its actor on node " in error or "by SIGKILL" in error)
    assert nothing_is_left(tmp_path, living)


def test_the_nodes_that_are_left_go_on(
    cluster: Any, realhf_start: Start, ppo_words: list[str], living: Living, tmp_path: Path
) -> None:
    node = cluster.add_node(num_cpus=2) if len(cluster.list_all_nodes()) < 2 else cluster.list_all_nodes()[-1]
    words = [f"ray.address={cluster.address}", "exp_ctrl.total_train_epochs=100", "exp_ctrl.total_train_steps=12",
             "exp_ctrl.ckpt_freq_steps=2", "recover_mode=auto"]  # fmt: skip
    started = realhf_start("ppo-math", tmp_path, [*ppo_words, *WORDS, *words])
    started.wait_for_checkpoint()
    cluster.remove_node(node, allow_graceful=False)
    run = started.finish(3 * PATIENCE_S)
    assert run.code == 0, run.said
    assert "lost    1 of 2 nodes; continuing on 2 of 4 workers with n_nodes=1" in run.said, run.said
    assert [line["step"] for line in run.metrics] == list(range(1, 13))
    assert nothing_is_left(tmp_path, living)


def test_one_machine_needs_no_cluster(
    realhf_start: Start, ppo_words: list[str], living: Living, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    run = realhf_start("ppo-math", tmp_path, [*ppo_words, "mode=ray", "exp_ctrl.total_train_steps=1"]).finish()
    assert run.code == 0 and len(run.metrics) == 1, run.said
    assert nothing_is_left(tmp_path, living)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def worker_pids(started: Started, living: Living) -> set[int]:
    return {pid for pid, words in living(started.root).items() if "realhf.apps.worker" in words}
