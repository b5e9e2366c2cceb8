"""The devices of a run are counted before the launch."""

from pathlib import Path

import pytest

from realhf.api.config import Device
from realhf.apps.prepare.preflight import preflight
from realhf.base.paths import RunDir
from realhf.experiments.sft import SFTExperiment
from realhf.launch import cuda
from realhf.launch.cuda import has_gpu
from tests.apps.prepare.test_preflight import one, paths, problems, sft  # noqa: F401


def test_device_cuda_without_a_gpu(sft: SFTExperiment, paths: RunDir) -> None:  # noqa: F811
    if has_gpu():
        pytest.skip("this machine has a GPU")
    sft.device = Device.cuda
    assert one(sft, paths).startswith("device=cuda, but CUDA shows no device: there is no NVIDIA driver, or ")
    sft.device = Device.auto
    assert preflight("sft", sft, paths).device == "cpu"


def test_device_cuda_with_too_few_gpus(
    sft: SFTExperiment, paths: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    for name in ("nvidiactl", "nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    monkeypatch.setattr(cuda, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sft.device, sft.n_gpus_per_node = Device.cuda, 4
    lines = problems(sft, paths)
    assert "n_gpus_per_node=4: this machine has 2 GPUs; set n_gpus_per_node=2" in lines
    sft.device, sft.n_gpus_per_node = Device.auto, 2
    assert preflight("sft", sft, paths).device == "cuda"
