"""Options and messages of Ray, without a cluster."""

import pytest

from realhf.api.config import ExperimentConfig, Mode, RayConfig
from realhf.launch import launch_problems
from realhf.launch.ray import death_reason, format_resources

DIED = """\
The actor died unexpectedly before finishing this task.
\tclass_name: NodeActor
\tpid: 77
The actor is dead because its node has died. Node Id: 55
"""


@pytest.mark.parametrize(
    "nodes, options, text",
    [(2, RayConfig(), "n_nodes=1"), (1, RayConfig("ray://head:10001"), "part of the cluster")],
)  # fmt: skip
def test_invalid_options(nodes: int, options: RayConfig, text: str) -> None:
    (problem,) = launch_problems(ExperimentConfig(mode=Mode.ray, n_nodes=nodes, ray=options))
    assert text in problem


def test_a_cluster_may_have_several_nodes() -> None:
    assert launch_problems(ExperimentConfig(mode=Mode.ray, n_nodes=2, ray=RayConfig("head:6379"))) == []


def test_death_reason() -> None:
    assert death_reason(DIED) == "The actor is dead because its node has died. Node Id: 55"
    assert death_reason("no such file") == "no such file"
    assert death_reason("") == "no reason"


def test_format_resources() -> None:
    assert format_resources({"CPU": 3.0, "memory": 1e9}) == "3 CPU, 0 GPU"
