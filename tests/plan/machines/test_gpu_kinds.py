"""GPUs by the names and sizes that drivers report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.plan.machines.gpu_kinds import GPU, KINDS, match_gpu
from realhf.plan.machines.hardware import FOLDER, read_hardware


@pytest.mark.parametrize(
    ("name", "memory", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", 85.5e9, "h100"),
        ("NVIDIA H100 SXM5", 79.1 * 2**30, "h100"),
        ("NVIDIA H200", 150.7e9, "h200"),
        ("NVIDIA A100-SXM4-80GB", 85.9e9, "a100"),
        ("A100-SXM-80GB", 79.2 * 2**30, "a100"),
    ],
)
def test_known_gpus(name: str, memory: float, machine: str) -> None:
    found = match_gpu(GPU(name, memory))
    assert (found.machine, found.note) == (machine, "")
    assert read_hardware(machine).memory == pytest.approx(memory, rel=0.1)


@pytest.mark.parametrize(
    ("name", "memory", "machine", "note"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.5e9, "a100", "NVIDIA A100-SXM4-40GB with 42.5 GB is another variant of a100; set"),
        ("NVIDIA A100-PCIE-80GB", 85e9, "a100", "another variant of a100"),
        ("NVIDIA H100 PCIe", 85e9, "h100", "another variant of h100"),
        ("NVIDIA H100 NVL", 100e9, "h100", "another variant of h100"),
        ("NVIDIA H200 NVL", 150e9, "h200", "another variant of h200"),
        (
            "NVIDIA L4",
            24.2e9,
            "h100",
            "NVIDIA L4 with 24.2 GB is not known, h100 is assumed; set planner.hardware=FILE",
        ),
        ("NVIDIA GeForce RTX 4090", 25.8e9, "h100", "is not known"),
        ("NVIDIA RTX A1000", 8.6e9, "h100", "is not known"),
    ],
)
def test_other_gpus(name: str, memory: float, machine: str, note: str) -> None:
    found = match_gpu(GPU(name, memory))
    assert found.machine == machine and note in found.note


@given(st.text(max_size=30), st.floats(1e6, 1e12))
def test_every_gpu_has_a_machine_file(name: str, memory: float) -> None:
    found = match_gpu(GPU(name, memory))
    assert (FOLDER / f"{found.machine}.yaml").is_file()
    assert not found.note or "planner.hardware=FILE.yaml" in found.note


def test_all_kinds_have_files() -> None:
    assert {kind.machine for kind in KINDS} == {file.stem for file in FOLDER.glob("*.yaml")} - {"cpu"}
