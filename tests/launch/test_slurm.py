"""Commands and output of SLURM, without a cluster."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.config import ExperimentConfig, Mode, SlurmConfig
from realhf.base.paths import RunDir
from realhf.launch import launch_problems, missing
from realhf.launch.slurm import expand_hostlist, parse_exits, step_command

NODES = ["n0", "n1"]
OUTPUT = """\
srun: error: n1: task 3: Out Of Memory
srun: error: n0: tasks 0-1: Exited with exit code 3
srun: Job step aborted: Waiting up to 5 seconds for job step to finish.
srun: error: n1: tasks 2-3: Killed
"""


def config(**options: object) -> ExperimentConfig:
    return ExperimentConfig(mode=Mode.slurm, n_nodes=2, n_gpus_per_node=2, slurm=SlurmConfig(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hostlist, names",
    [
        ("vm", ["vm"]),
        ("n[08-10],m1", ["n08", "n09", "n10", "m1"]),
        ("n[1,3-4]-ib", ["n1-ib", "n3-ib", "n4-ib"]),
        ("r[0-1]n[2-3]", ["r0n2", "r0n3", "r1n2", "r1n3"]),
        ("[0-1,7]", ["0", "1", "7"]),
        ("", []),
    ],
)
def test_expand_hostlist(hostlist: str, names: list[str]) -> None:
    assert expand_hostlist(hostlist) == names


@given(numbers=st.lists(st.integers(0, 10**6), min_size=1, unique=True), width=st.integers(1, 9))
def test_expand_hostlist_with_padding(numbers: list[int], width: int) -> None:
    padded = [f"{number:0{width}}" for number in numbers]
    assert expand_hostlist(f"a[{','.join(padded)}],b") == [*(f"a{number}" for number in padded), "b"]


def test_the_first_exit_of_a_worker_is_reported() -> None:
    assert parse_exits("", NODES, 2) == {} == parse_exits("srun: Force Terminated job step 1.0\n", NODES, 2)
    assert parse_exits(OUTPUT, NODES, 2) == {
        3: "on node n1 ended: out of memory",
        0: "on node n0 ended: exited with exit code 3",
        1: "on node n0 ended: exited with exit code 3",
        2: "on node n1 ended: killed",
    }


def test_workers_of_a_lost_node() -> None:
    lost = parse_exits("srun: error: Node failure on n1\nsrun: error: n0: task 0: Terminated\n", NODES, 2)
    assert lost == {0: "on node n0 ended: terminated", 2: "was lost with its node n1", 3: "was lost with its node n1"}
    assert parse_exits("srun: error: Node failure on n[0-1]\n", NODES, 1).keys() == {0, 1}
    assert parse_exits("srun: error: Node failure on n7\n", NODES, 2) == {}


def test_command_of_a_step(tmp_path: Path) -> None:
    run = config(cpus_per_worker=3, container_image="img", container_mounts="/a:/a", python="/opt/python", gpu="gpu:x")
    command = step_command(RunDir(tmp_path), run, "cuda", "tcp://10.0.0.1:5")
    assert command[0] == "srun" and command[-5:-2] == ["-m", "realhf.apps.worker", str(tmp_path)]
    assert command[-2:] == ["SLURM_PROCID", "tcp://10.0.0.1:5"] and "/opt/python" in command
    arguments = {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3", "--distribution=block",
             "--gres=gpu:x:2", "--gpu-bind=none", "--container-image=img", "--container-mounts=/a:/a",
             f"--output={tmp_path}/logs/worker-%t.log"}  # fmt: skip
    assert arguments <= set(command)
    on_cpu = step_command(RunDir(tmp_path), config(), "cpu", "tcp://10.0.0.1:5")
    assert not [part for part in on_cpu if "gres" in part or "gpu" in part or "container" in part]


def test_invalid_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert launch_problems(config(extra=["--mail-type=END", "-x n3"])) == []
    invalid = config(extra=["mail"], time="1 day", array_seeds=[1, 1])
    assert [problem.split(" ")[0].split("=")[0] for problem in launch_problems(invalid)] == [
        "slurm.extra:", "slurm.time", "slurm.array_seeds"]  # fmt: skip
    (problem,) = launch_problems(ExperimentConfig(slurm=SlurmConfig(array_seeds=[1])))
    assert "mode=slurm" in problem


def test_an_allocation_must_be_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert launch_problems(config()) == ["n_nodes=2, but this allocation has 1"]
    assert len(launch_problems(config(array_seeds=[1]))) == 2


def test_missing_slurm_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = missing(config())
    assert "sbatch, scontrol, scancel not found" in problem and "--dry-run" in problem
