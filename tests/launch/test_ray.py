"""What Ray is asked, and what is made of its words, without a cluster."""

import pytest

from realhf.api.config import ExperimentConfig, Mode, RayConfig
from realhf.launch import launch_problems
from realhf.launch.ray import free, reason

DIED = """\
The actor died unexpectedly before finishing this task.
\tclass_name: NodeActor
\tpid: 77
The actor is dead because its node has died. Node Id: 55
"""


@pytest.mark.parametrize(
    "nodes, options, word",
    [(2, RayConfig(), "n_nodes=1"), (1, RayConfig("ray://head:10001"), "part of the cluster"),
     (1, RayConfig(cpus_per_worker=0), "cpus_per_worker")],
)  # fmt: skip
def test_what_cannot_be_asked_is_said(nodes: int, options: RayConfig, word: str) -> None:
    (problem,) = launch_problems(ExperimentConfig(mode=Mode.ray, n_nodes=nodes, ray=options))
    assert word in problem


def test_a_cluster_may_have_many_nodes() -> None:
    assert launch_problems(ExperimentConfig(mode=Mode.ray, n_nodes=2, ray=RayConfig("head:6379"))) == []


def test_the_reason_is_found_in_what_ray_says() -> None:
    assert reason(DIED) == "The actor is dead because its node has died. Node Id: 55"
    assert reason("no such file") == "no such file"
    assert reason("") == "no reason"


def test_resources_are_told() -> None:
    assert free({"CPU": 3.0, "memory": 1e9}) == "3 CPU, 0 GPU"
