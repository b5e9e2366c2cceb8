"""Ends of a run that its options do not ask for: signals, a closed pipe, a stopped master, a full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S, reset_signals
from tests.integration.conftest import PROGRAM, start
from tests.integration.test_failures import LiveProcesses, no_process_remains, worker_pid

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ENDLESS = ["exp_ctrl.total_train_epochs=10000", "n_gpus_per_node=2"]
SIGNALS = {
    "hangup": [signal.SIGHUP],
    "quit": [signal.SIGQUIT],
    "twice": [signal.SIGINT, signal.SIGINT, signal.SIGINT],
    "mixed": [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT],
}


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the runs' sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_leave_no_key_socket_or_process(
    name: str, sft_words: list[str], live_processes: LiveProcesses, temporary: Path, tmp_path: Path
) -> None:
    """Also when more of them arrive while the workers are stopped."""
    started = start("sft", tmp_path, [*sft_words, *ENDLESS])
    started.wait_for_step()
    assert (started.root / "channel.key").exists() and list(temporary.glob("realhf-*"))
    for number in SIGNALS[name]:
        started.process.send_signal(number)
        time.sleep(0.05)
    run = started.finish()
    assert run.code == 130 and "interrupted" in run.output and "Traceback" not in run.output, run.output
    assert not (run.root / "channel.key").exists() and not list(temporary.glob("realhf-*"))
    assert no_process_remains(tmp_path, live_processes)
    assert not list(tmp_path.rglob("*.lock"))
    json.loads((run.root / "trace.json").read_text())


def test_a_signal_during_start_up(
    sft_words: list[str], live_processes: LiveProcesses, temporary: Path, tmp_path: Path
) -> None:
    """At any time between the creation of the run directory and the first step."""
    for delay_s in (0.0, 0.02, 0.3, 1.0):
        started = start("sft", tmp_path / str(delay_s), [*sft_words, *ENDLESS])
        while not started.root.exists():
            assert started.process.poll() is None, started.finish().output
        time.sleep(delay_s)
        started.process.send_signal(signal.SIGINT)
        run = started.finish()
        assert run.code == 130 and "Traceback" not in run.output, run.output
        assert not (run.root / "channel.key").exists() and not list(temporary.glob("realhf-*"))
    assert no_process_remains(tmp_path, live_processes)


def test_a_closed_pipe_ends_the_run(sft_words: list[str], live_processes: LiveProcesses, tmp_path: Path) -> None:
    common = [f"fileroot={tmp_path}", "experiment_name=t", "trial_name=trial", "device=cpu", "threads_per_worker=1"]
    command = [*PROGRAM, "quickstart", "sft", *common, *sft_words, *ENDLESS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=reset_signals)
    assert process.stdout and process.stderr and process.stdout.readline()
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 141, process.stderr.read()
    assert no_process_remains(tmp_path, live_processes)


def test_a_stopped_master_blames_no_worker(sft_words: list[str], live_processes: LiveProcesses, tmp_path: Path) -> None:
    """Deadlines count only while the master receives."""
    limits = ["heartbeat_timeout=3", "call_timeout=4", "exp_ctrl.total_train_epochs=1000",
              "exp_ctrl.total_train_steps=800"]  # fmt: skip
    started = start("sft", tmp_path, [*sft_words, "n_gpus_per_node=2", *limits])
    started.wait_for_step()
    for _ in range(2):
        started.process.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        started.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
    pid = worker_pid(started, 1, live_processes)
    run = started.finish()
    assert run.code == 0, run.output
    assert len(run.metrics) == 800 and pid not in live_processes(tmp_path)


@pytest.fixture
def full_disk(tmp_path: Path) -> Callable[[], None]:
    """``tmp_path/disk`` is a small file system; the function fills it up."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting a file system needs root")

    def fill() -> None:
        size = shutil.disk_usage(disk).free
        with (disk / "ballast").open("wb") as file:
            while size:  # the run writes and deletes too: a size that no longer fits is tried again, halved
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
                except OSError:
                    size //= 2

    yield fill  # type: ignore[misc]
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_one_line_with_a_hint(
    full_disk: Callable[[], None], sft_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    words = [*sft_words, *ENDLESS, "exp_ctrl.ckpt_freq_steps=5", "tensorboard.enabled=False"]
    started = start("sft", tmp_path / "disk", words)
    started.wait_for_checkpoint()
    full_disk()
    run = started.finish()
    errors = [line for line in run.output.splitlines() if "error" in line.lower()]
    assert run.code == 1 and "No space left on device" in run.output and "Traceback" not in run.output, run.output
    assert len(errors) == 1 and "realhf resume" in run.output, errors
    (tmp_path / "disk" / "ballast").unlink()
    words = ["exp_ctrl.total_train_steps=40", "resume.accept=[lr_schedule]"]
    resumed = start("", run.root, words, ["resume", str(run.root)]).finish()
    assert resumed.code == 0 and [line["step"] for line in resumed.metrics] == list(range(1, 41)), resumed.output


def test_the_trace_is_valid_after_a_kill_and_a_resume(sft_words: list[str], tmp_path: Path) -> None:
    words = [
        *sft_words,
        "exp_ctrl.total_train_epochs=10",
        "exp_ctrl.total_train_steps=24",
        "exp_ctrl.ckpt_freq_steps=2",
    ]
    started = start("sft", tmp_path, words)
    started.wait_for_checkpoint()
    started.process.kill()
    started.process.wait(TIMEOUT_S)
    with (started.root / "trace.json").open("a") as file:
        file.write('{"name": "incomp')
    for _ in range(2):
        run = start("", started.root, [], ["resume", str(started.root)]).finish()
        assert run.code == 0, run.output
        spans = json.loads((run.root / "trace.json").read_text())
        assert {s["args"]["step"] for s in spans if s["ph"] == "X"} == set(range(1, 25))


def test_a_refused_launch_leaves_nothing(sft_words: list[str], tmp_path: Path) -> None:
    """The corrected command works without overwrite=True."""
    refused = start("sft", tmp_path, [*sft_words, "n_gpus_per_node=2", "channel_address=tcp://203.0.113.7:9"]).finish()
    assert refused.code == 2 and "channel_address" in refused.output, refused.output
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()] and not refused.root.exists()
    assert start("sft", tmp_path, [*sft_words, "exp_ctrl.total_train_steps=1"]).finish().code == 0


def test_a_changed_configuration_is_refused_by_the_master(sft_words: list[str], tmp_path: Path) -> None:
    """A worker on another host may see other files, for example through a stale cache of the file system."""
    code = (
        "import sys\n"
        "from realhf.apps.main import run\n"
        "from realhf.launch.local import LocalLauncher\n"
        "original = LocalLauncher.start\n"
        "def start(self, address):\n"
        "    text = self.paths.config.read_text()\n"
        "    self.paths.config.write_text(text.replace('lr: 0.003', 'lr: 0.004'))\n"
        "    original(self, address)\n"
        "LocalLauncher.start = start\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    common = [f"fileroot={tmp_path}", "experiment_name=t", "trial_name=trial", "device=cpu", "n_gpus_per_node=2"]
    command = [sys.executable, "-c", code, "quickstart", "sft", *common, *sft_words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1 and "has read another config.yaml or plan.json" in done.stderr, done.stderr
