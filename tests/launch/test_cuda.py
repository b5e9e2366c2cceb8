"""The devices of a host and of its workers, with the device files of a host that has GPUs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.api.config import Device, ExperimentConfig, Mode
from realhf.api.config.launch import RayConfig
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.launch import cuda
from realhf.launch.cuda import (
    cuda_environment,
    device_problems,
    first_gpu,
    has_gpu,
    parse_gpu,
    visible_devices,
    worker_device,
)
from realhf.plan.machines.gpu_kinds import GPU

Host = Callable[[int], None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """``host(n)`` gives this machine the device files of ``n`` GPUs."""
    monkeypatch.setattr(cuda, "DEVICE_FILES", tmp_path / "dev")
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def create(n: int) -> None:
        (tmp_path / "dev").mkdir(exist_ok=True)
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", *(f"nvidia{i}" for i in range(n))):
            (tmp_path / "dev" / name).touch()

    return create


def config(n: int, mode: Mode = Mode.local) -> ExperimentConfig:
    return ExperimentConfig(n_gpus_per_node=n, mode=mode, device=Device.cuda)


def test_devices_are_those_that_cuda_shows(host: Host) -> None:
    host(12)
    assert visible_devices({}) == tuple(map(str, range(12)))
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ("3", "1")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3,12,1"}) == ("3",)  # an invalid entry hides what follows
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == ("1",)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-6d1a"}) == ("GPU-8932f937", "MIG-6d1a")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_a_host_without_a_driver_has_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == ()
    monkeypatch.setattr(cuda, "DEVICE_FILES", tmp_path)
    assert not has_gpu()


def test_too_few_devices_of_this_machine_are_a_problem(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(4)
    assert has_gpu() and device_problems(config(4)) == []
    assert device_problems(config(8)) == ["n_gpus_per_node=8: this machine has 4 GPUs; set n_gpus_per_node=4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    (problem,) = device_problems(config(3, Mode.ray))
    assert problem == ("n_gpus_per_node=3: this machine has 2 GPUs in CUDA_VISIBLE_DEVICES=2,3; set n_gpus_per_node=2")


def test_too_few_devices_of_an_allocation_are_a_problem(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = config(8, Mode.slurm)
    assert device_problems(slurm) == []  # outside of an allocation
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    (problem,) = device_problems(slurm)
    assert problem == "n_gpus_per_node=8: a node of this allocation has 4 GPUs; set n_gpus_per_node=4"
    assert device_problems(replace(slurm, n_gpus_per_node=4)) == []
    assert device_problems(replace(config(8, Mode.ray), ray=RayConfig(address="auto"))) == []  # Ray knows its nodes


@pytest.mark.parametrize("mode", [Mode.local, Mode.slurm])
def test_every_worker_of_a_node_has_its_own_device(mode: Mode) -> None:
    visible, options = ("4", "5", "6"), config(3, mode)
    assert [worker_device(options, rank, visible) for rank in range(6)] == ["4", "5", "6"] * 2
    with pytest.raises(UserError, match="worker 5 is number 2 of n_gpus_per_node=3 workers, but .* shows 2 GPUs .4, 5"):
        worker_device(options, 5, visible[:2])


def test_ray_assigns_the_devices_of_its_actors() -> None:
    assert worker_device(config(3, Mode.ray), 2, ("7",)) == "7"
    assert worker_device(config(3, Mode.ray), 2, ("4", "5", "6")) == "6"  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES


def test_the_environment_of_a_worker(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    environment = cuda_environment(config(2), RunDir(tmp_path / "run"), 3)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + "3" == str(RunDir(tmp_path / "run").flight_record(3))
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert int(environment["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an ``nvidia-smi`` with this script on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\n", GPU("NVIDIA H100 80GB HBM3", 81559 * 2.0**20)),
        ("Odd, name, 16384", GPU("Odd, name", 2.0**34)),
        ("NVIDIA GB10, [N/A]", None),
        ("NVIDIA H100, 0", None),
        ("81559", None),
        ("", None),
    ],
)
def test_lines_of_the_driver(line: str, expected: GPU | None) -> None:
    assert parse_gpu(line) == expected


def test_the_first_visible_gpu_is_asked_for(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, 'echo "$@" > asked; echo "NVIDIA H200, 143771"; echo "NVIDIA L4, 23034"')
    monkeypatch.chdir(tmp_path)
    assert first_gpu() is None  # there are no device files
    host(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert first_gpu() == GPU("NVIDIA H200", 143771 * 2.0**20)
    assert (tmp_path / "asked").read_text().endswith("--id=2\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-6d1a")
    assert first_gpu() is None


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense", "true"])
def test_a_driver_without_an_answer(script: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host(1)
    driver(tmp_path, monkeypatch, script)
    assert first_gpu() is None
    monkeypatch.setenv("PATH", "")
    assert first_gpu() is None
