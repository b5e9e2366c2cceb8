"""The predefined machines, and the problems of invalid descriptions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from realhf.api.machine import ExpectedErrors, Link
from realhf.base.errors import UserError
from realhf.plan.machines.hardware import FOLDER, read_hardware

GOOD = (FOLDER / "h100.yaml").read_text()
MACHINES = sorted(file.stem for file in FOLDER.glob("*.yaml"))


def problems(tmp_path: Path, text: str) -> list[str]:
    """Return the reported problems of a file, without its name."""
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_hardware(str(file))
    assert all(problem.startswith(f"planner.hardware={file}: ") for problem in caught.value.problems)
    return [problem.partition(": ")[2] for problem in caught.value.problems]


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_loads_with_plausible_values(name: str) -> None:
    found = read_hardware(name)
    assert found.name == name and found.reserved < found.memory
    assert found.memory_bandwidth > found.node.bandwidth > found.cluster.bandwidth
    assert found.node.latency < found.cluster.latency and 0 < found.kernel < found.call
    assert read_hardware(name, 4).node_size == 4


def test_predefined_machines() -> None:
    assert MACHINES == ["a100", "cpu", "h100", "h200"]
    a100, h100, h200 = (read_hardware(name) for name in ("a100", "h100", "h200"))
    assert a100.flops < h100.flops == h200.flops and h100.memory < h200.memory
    assert h100.memory == 80e9 and h100.node == Link(370e9, 1.5e-6) and h100.node_size == 8


def test_link_between_two_workers() -> None:
    h100 = read_hardware("h100")
    assert h100.link(3, 4) == h100.node and h100.link(7, 8) == h100.cluster
    assert h100.link(2, 2).seconds(2.3e12) == pytest.approx(2.0)  # a copy reads and writes
    assert h100.node.seconds(0) == 0.0 and h100.node.seconds(370e9) == 1.0 + 1.5e-6


def test_user_defined_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yml"
    file.write_text(GOOD.replace("name: h100", "name: mine").replace("reserved: 4e9", "cores: 0"))
    assert (read_hardware(str(file)).name, read_hardware(str(file)).reserved) == ("mine", 0.0)


@pytest.mark.parametrize("name", ["machine.json", "machine.txt", "machine"])
def test_a_file_needs_no_suffix(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(json.dumps(OmegaConf.to_container(OmegaConf.load(FOLDER / "a100.yaml"))))
    assert read_hardware(str(file)) == read_hardware("a100")


def test_an_unknown_machine() -> None:
    with pytest.raises(UserError, match="planner.hardware=h10: no such machine or file; known are a100, .* h100 ?"):
        read_hardware("h10")
    with pytest.raises(UserError, match="no such machine or file"):
        read_hardware("nowhere.yaml")


def test_all_problems_of_a_file_are_reported(tmp_path: Path) -> None:
    text = (
        "name: x\nnode_size: 2.5\nmemory: 80GB\nflops: 0\nnode: {latency: -1, bandwith: 3}\ncluster: 5\ncores: true\n"
    )
    assert sorted(problems(tmp_path, text)) == sorted([
        "node_size=2.5 must be a whole number",
        "memory=80GB must be a finite number >= 0",
        "flops must be above 0",
        "cores=True must be a finite number >= 0",
        "node.latency=-1 must be a finite number >= 0",
        "unknown 'node.bandwith'  did you mean bandwidth ?",
        "'node.bandwidth' is missing",
        "cluster=5: expected a mapping with bandwidth and latency",
        *(f"'{key}' is missing" for key in ("memory_bandwidth", "host", "kernel", "call")),
    ])  # fmt: skip


@pytest.mark.parametrize("value", [".inf", ".nan", "-3", "yes", "[1]"])
def test_invalid_numbers(value: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, GOOD.replace("flops: 537e12", f"flops: {value}"))
    assert problem.startswith("flops=") and problem.endswith("must be a finite number >= 0")


def test_reserve_fraction_of_one_is_rejected(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, GOOD.replace("reserved: 4e9", "memory_reserve_fraction: 1.0"))
    assert problem == "memory_reserve_fraction=1.0 must be below 1: it is a fraction of the memory"


def test_the_memory_margin_of_a_gpu_follows_from_the_expected_error() -> None:
    cpu = read_hardware("cpu")
    assert cpu.usable == pytest.approx(0.9 * cpu.memory) and cpu.reserve_fraction == 0.1, "measured, in its file"
    for name in ("a100", "h100", "h200"):
        gpu = read_hardware(name)
        assert gpu.usable * (1 + gpu.errors.memory) == pytest.approx(gpu.memory) and gpu.errors.memory > 0
    sure = replace(read_hardware("h100"), errors=ExpectedErrors(memory=0.0))
    assert sure.usable == sure.memory


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "a: ${b}"])
def test_invalid_yaml(text: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, text)
    assert "YAML" in problem or problem == "expected a mapping of values"
