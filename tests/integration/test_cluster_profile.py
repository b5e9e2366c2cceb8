"""``realhf profile`` of two nodes as a job of SLURM, and a plan on two nodes that is predicted from it."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from realhf.api.config import Device, ExperimentConfig, Mode, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.apps.prepare.planning import machine_of
from realhf.apps.profiles.profile_file import read_profile
from realhf.arch.hf_config import read_hf_config
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work
from realhf.plan.machines.mixed_speed import MixedSpeed
from realhf.plan.machines.profile import message_counts
from tests.conftest import TIMEOUT_S, reset_signals
from tests.integration.conftest import PROGRAM, REPOSITORY
from tests.integration.test_slurm import left, worker_pid
from tests.launch.slurm_cluster import SlurmCluster, running_cluster

pytestmark = [pytest.mark.dist, pytest.mark.slow]
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64,
         "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 100}  # fmt: skip
SHAPE = "h32-a4k2x8-m48-v64-fp32"
LiveProcesses = Callable[[Path], dict[int, str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes of two cores."""
    with running_cluster(tmp_path_factory.mktemp("slurm"), 2, "NO PROFILE OF SEVERAL NODES IS TESTED") as cluster:
        yield cluster


def profile(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    common = ["mode=slurm", "n_nodes=2", "device=cpu", "seconds=1", f"model={folder}", f"out={folder}/p.json"]
    return run([*PROGRAM, "profile", *common, *words])


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY,
                          timeout=2 * TIMEOUT_S)  # fmt: skip


def test_two_nodes_are_measured_and_predict_plans_on_two_nodes(
    cluster: SlurmCluster, live_processes: LiveProcesses, tmp_path: Path
) -> None:
    done = profile(tmp_path, "n_gpus_per_node=2", "seconds=4")
    assert done.returncode == 0, done.stdout
    assert " is running on n[0-1]" in done.stdout and "collectives between nodes, 2x2" in done.stdout
    found = read_profile(tmp_path / "p.json", "out")
    assert found.cluster_sizes == ((2, 1), (2, 2)) and found.n_workers == 2 and found.shapes == {SHAPE: (1, 2)}
    assert {"send", "exchange", "cluster_send", "cluster_exchange", "host_copy", "call"} <= set(found.fits)
    assert len(found.fits["cluster_send"].points) > 1  # several sizes of messages
    assert found.error("cluster_all_reduce") >= 0 and found.resident > 5e7
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "p.json"]
    assert live_processes(tmp_path) == {}

    model = read_hf_config(tmp_path, scalar_head=False)
    config = ExperimentConfig(device=Device.cpu, mode=Mode.slurm, n_nodes=2, n_gpus_per_node=2)
    config.planner.profile = str(tmp_path / "p.json")
    machine = machine_of(config, "cpu", {"model": model}, {"model": RoleSpec(ModelSpec())})
    assert machine.source.endswith(f"{found.machine}, with links between nodes measured on 2 nodes")
    speed, across = machine.speed, (0, 1, 2, 3)
    assert isinstance(speed, MixedSpeed)
    fit = found.fits["cluster_all_reduce/2x2"]
    assert speed.collective(CollectiveKind.ALL_REDUCE, 10**6, across) == fit(message_counts(10**6)) > 0
    assert speed.exchange(Traffic(cluster=10**6, n_parts=2, copied=10**6)) > 0 < speed.send(1000, 1, 2)
    assert speed.forward(StageShard(model, 2, 2, True, True, False), Work.of([8, 8]), (0, 1)) > 0


def test_two_jobs_at_once_update_one_file(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Each has one node, so that SLURM runs both."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["mode=slurm", "device=cpu", "seconds=0.5", f"out={tmp_path}/p.json"]
    jobs = [
        subprocess.Popen([*PROGRAM, "profile", *words, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, cwd=REPOSITORY)
        for more in (["n_gpus_per_node=2"], [f"model={tmp_path}"])
    ]  # fmt: skip
    for job in jobs:
        output, _ = job.communicate(timeout=2 * TIMEOUT_S)
        assert job.returncode == 0, output
    found = read_profile(tmp_path / "p.json", "out")
    assert found.shapes == {SHAPE: (1,)} and found.n_workers == 2


def test_a_killed_worker_and_an_interrupt_end_the_job(
    cluster: SlurmCluster, live_processes: LiveProcesses, tmp_path: Path
) -> None:
    """The directory of a failed job is kept for its logs, that of an interrupted one is removed."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = [f"model={tmp_path}", f"out={tmp_path}/p.json", "mode=slurm", "n_nodes=2", "device=cpu"]
    kept: set[Path] = set()
    for is_killed in (True, False):
        with subprocess.Popen([*PROGRAM, "profile", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, cwd=REPOSITORY, preexec_fn=reset_signals) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                if "collectives between nodes" in line:
                    break
            (job,) = set(tmp_path.glob("p-*.job")) - kept
            if is_killed:
                os.kill(worker_pid(job, 1, live_processes), signal.SIGKILL)
            else:
                process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=TIMEOUT_S)
        kept = {job}
        if is_killed:
            assert process.returncode == 1 and "error: worker " in output and " ended: killed" in output, output
            assert (job / "logs" / "worker-1.log").exists() and not (job / "channel.key").exists()
        else:
            assert process.returncode == 130 and not job.exists(), output
        assert not (tmp_path / "p.json").exists()
        assert left(cluster, tmp_path, live_processes) == ({}, "")
