"""What a run may go on with when workers are lost."""

import pytest

from realhf.api.config import ExperimentConfig, MFCConfig, Mode, ParallelConfig
from realhf.launch import launch_problems
from realhf.launch.elastic import ElasticRestart, failed_permanently, plan_restart
from realhf.launch.local import visible


def config(**options: object) -> ExperimentConfig:
    return ExperimentConfig(**{"n_gpus_per_node": 4, **options})


def test_nothing_lost_nothing_set() -> None:
    assert plan_restart(config(n_nodes=2, allocation_mode="d8"), {}, "cuda", 2, []) == ElasticRestart((), 8)


def test_devices_that_are_left_keep_their_numbers() -> None:
    way = plan_restart(config(), {}, "cuda", 1, [1])
    assert way == ElasticRestart(("n_gpus_per_node=3", "devices=[0,2,3]"), 3, "the device of worker 1")
    way = plan_restart(config(n_gpus_per_node=3, devices=[0, 2, 3]), {}, "cuda", 1, [0, 1])
    assert way and way.overrides == ("n_gpus_per_node=1", "devices=[3]")
    way = plan_restart(config(), {}, "cpu", 1, [1])
    assert way and way.overrides == ("n_gpus_per_node=3",)


def test_nodes_are_lost_whole() -> None:
    way = plan_restart(config(n_nodes=3, mode=Mode.ray), {}, "cuda", 2, [])
    assert way == ElasticRestart(("n_nodes=2",), 8, "1 of 3 nodes")
    assert (
        plan_restart(config(n_nodes=3), {}, "cuda", 0, []) is None
        and plan_restart(config(), {}, "cpu", 1, range(4)) is None
    )


def test_plans_of_the_user_are_not_replaced_unasked() -> None:
    placements = {"gen": MFCConfig(device_mesh="0-1", parallel=ParallelConfig(2)), "train": MFCConfig()}
    way = plan_restart(config(allocation_mode="manual"), placements, "cpu", 1, [3])
    assert way and way.refusal == "allocation_mode=manual is for 4 workers, 3 are left"
    assert way.overrides == ("n_gpus_per_node=3", "allocation_mode=heuristic", "gen.device_mesh=null",
                         "gen.parallel.data_parallel_size=1")  # fmt: skip
    way = plan_restart(config(allocation_mode="d2t2", recover_allocation="search"), placements, "cpu", 1, [3])
    assert way and not way.refusal and way.overrides == ("n_gpus_per_node=3", "allocation_mode=search")


def test_who_dies_too_often_is_gone() -> None:
    assert failed_permanently(config(), {0: 1, 3: 2, 1: 3}) == [1, 3]
    assert failed_permanently(config(mode=Mode.ray), {3: 2}) == []  # Ray says which nodes are


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_device_failures": 0}, "max_device_failures must be positive"),
        ({"recover_allocation": "d2"}, "recover_allocation=d2: nobody knows"),
        ({"devices": [0, 1]}, "does not name n_gpus_per_node=4 different devices"),
        ({"devices": [0, 1, 1, 2]}, "does not name n_gpus_per_node=4 different devices"),
        ({"devices": [0, 1, 2, 3], "mode": Mode.ray}, "is for mode=local"),
    ],
)
def test_what_is_refused(options: dict[str, object], words: str) -> None:
    assert [line for line in launch_problems(config(**options)) if words in line]
    assert launch_problems(config()) == []


def test_devices_are_those_of_the_devices_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible([]) == {} and visible([0, 2]) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible([0, 2]) == {"CUDA_VISIBLE_DEVICES": "4,6"} and visible([]) == {}
    assert launch_problems(config(devices=[0, 1, 2, 4]))
