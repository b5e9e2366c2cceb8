"""Restarts after the loss of workers."""

import pytest

from realhf.api.config import ExperimentConfig, MFCConfig, Mode, ParallelConfig
from realhf.launch import launch_problems
from realhf.launch.elastic import ElasticRestart, failed_permanently, plan_restart
from realhf.launch.local import cuda_visible_devices


def config(**options: object) -> ExperimentConfig:
    return ExperimentConfig(**{"n_gpus_per_node": 4, **options})


def test_no_overrides_without_a_loss() -> None:
    assert plan_restart(config(n_nodes=2, allocation_mode="d8"), {}, "cuda", 2, []) == ElasticRestart((), 8)


def test_remaining_devices_keep_their_numbers() -> None:
    restart = plan_restart(config(), {}, "cuda", 1, [1])
    assert restart == ElasticRestart(("n_gpus_per_node=3", "devices=[0,2,3]"), 3, "the device of worker 1")
    restart = plan_restart(config(n_gpus_per_node=3, devices=[0, 2, 3]), {}, "cuda", 1, [0, 1])
    assert restart and restart.overrides == ("n_gpus_per_node=1", "devices=[3]")
    restart = plan_restart(config(), {}, "cpu", 1, [1])
    assert restart and restart.overrides == ("n_gpus_per_node=3",)


def test_lost_nodes() -> None:
    restart = plan_restart(config(n_nodes=3, mode=Mode.ray), {}, "cuda", 2, [])
    assert restart == ElasticRestart(("n_nodes=2",), 8, "1 of 3 nodes")
    assert (
        plan_restart(config(n_nodes=3), {}, "cuda", 0, []) is None
        and plan_restart(config(), {}, "cpu", 1, range(4)) is None
    )


def test_allocations_of_the_user_are_replaced_only_on_request() -> None:
    placements = {"gen": MFCConfig(device_mesh="0-1", parallel=ParallelConfig(2)), "train": MFCConfig()}
    restart = plan_restart(config(allocation_mode="manual"), placements, "cpu", 1, [3])
    assert restart and restart.refusal == "allocation_mode=manual is for 4 workers, 3 are left"
    assert restart.overrides == ("n_gpus_per_node=3", "allocation_mode=heuristic", "gen.device_mesh=null",
                         "gen.parallel.data_parallel_size=1")  # fmt: skip
    restart = plan_restart(config(allocation_mode="d2t2", recover_allocation="search"), placements, "cpu", 1, [3])
    assert restart and not restart.refusal and restart.overrides == ("n_gpus_per_node=3", "allocation_mode=search")


def test_workers_fail_permanently_after_several_deaths() -> None:
    assert failed_permanently(config(), {0: 1, 3: 2, 1: 3}) == [1, 3]
    assert failed_permanently(config(mode=Mode.ray), {3: 2}) == []  # Ray reports lost nodes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recover_allocation": "d2"}, "recover_allocation=d2: the number of remaining workers is unknown"),
        ({"devices": [0, 1]}, "does not name n_gpus_per_node=4 different devices"),
        ({"devices": [0, 1, 1, 2]}, "does not name n_gpus_per_node=4 different devices"),
        ({"devices": [0, 1, 2, 3], "mode": Mode.ray}, "is for mode=local"),
    ],
)
def test_invalid_options(options: dict[str, object], message: str) -> None:
    assert [line for line in launch_problems(config(**options)) if message in line]
    assert launch_problems(config()) == []


def test_devices_select_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_visible_devices([]) == {} and cuda_visible_devices([0, 2]) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert cuda_visible_devices([0, 2]) == {"CUDA_VISIBLE_DEVICES": "4,6"} and cuda_visible_devices([]) == {}
    assert launch_problems(config(devices=[0, 1, 2, 4]))
