"""Errors of runs whose workers stop, hang or cannot start; unauthenticated peers do not affect a run."""

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import zmq

from realhf.apps.commands.quickstart import prepare
from realhf.apps.prepare.launching import launch, write_run
from realhf.base.errors import RunFailed
from realhf.launch.local import LocalLauncher
from realhf.system.transport.handshake import send_password
from tests.integration.conftest import Run, Started
from tests.integration.test_failures import LiveProcesses, Start, no_process_remains, worker_pid
from tests.system.transport.hostile_peers import KEY, http, oversized

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def begun(start: Start, folder: Path, words: list[str], *more: str) -> Started:
    """A run on two workers, after its first step of 10,000."""
    words = [*words, "exp_ctrl.total_train_epochs=10000", "n_gpus_per_node=2", *more]
    started = start("ppo-math", folder, words)
    started.wait_for_step()
    return started


def test_a_stopped_worker_is_named_within_its_deadline(
    realhf_start: Start, ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path
) -> None:
    started = begun(realhf_start, tmp_path, ppo_words, "heartbeat_timeout=4")
    pid = worker_pid(started, 1, live_processes)
    os.kill(pid, signal.SIGSTOP)
    run = started.finish()
    assert run.code == 1, run.output
    (line,) = (line for line in run.output.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: worker 1 (host {socket.gethostname()}, process {pid}): no heartbeat for ")
    assert "worker 1's process is in state T (stopped)" in run.output
    for rank in range(2):
        assert "most recent call first" in (run.root / "logs" / f"worker-{rank}.log").read_text()
    assert no_process_remains(tmp_path, live_processes)


STUCK = """
import time

def graded(prompt, answer, row):
    return 1.0

def stuck(prompt, answer, row):
    time.sleep(1000)
"""


def test_the_error_names_the_hung_worker_and_its_activity(
    realhf_start: Start, ppo_words: list[str], tmp_path: Path
) -> None:
    """The worker sends heartbeats; the call's deadline ends the run."""
    (tmp_path / "rewards.py").write_text(STUCK)
    words = [*ppo_words, f"reward.fn={tmp_path}/rewards.py:stuck", "reward.timeout=30", "n_gpus_per_node=2"]
    run = realhf_start("ppo-math", tmp_path, [*words, "call_timeout=15", "heartbeat_timeout=8"]).finish()
    assert run.code == 1 and "waited 15 s for " in run.output, run.output
    found = re.search(r"worker (\d) \(host .*, process \d+\): rew_inf of step 1, rew_inf/Compute", run.output)
    assert found is not None, run.output
    assert "most recent call first" in (run.root / "logs" / f"worker-{found.group(1)}.log").read_text()


def test_a_worker_that_cannot_start_is_reported_with_its_log(
    ppo_words: list[str], live_processes: LiveProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare("ppo-math", [*ppo_words, f"fileroot={tmp_path}", "trial_name=t", "device=cpu", "n_gpus_per_node=2"])
    write_run(run, "launch")
    start_workers = LocalLauncher.start

    def start_without_plan(launcher: LocalLauncher, address: str) -> None:
        run.paths.plan.unlink()
        start_workers(launcher, address)

    monkeypatch.setattr(LocalLauncher, "start", start_without_plan)
    with pytest.raises(RunFailed, match=r"worker [01] exited with code 1 during start-up; see ") as caught:
        launch(run.paths)
    assert "its last lines:\n" in str(caught.value) and "config.yaml or plan.json is missing" in str(caught.value)
    assert no_process_remains(tmp_path, live_processes)


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def throw_garbage(address: str, key: bytes, started: Started) -> None:
    """Send messages until the run ends, with the identities of workers and with others, with and without a password."""
    module = "tests.system.transport.hostile_peers"
    attacks = [subprocess.Popen([sys.executable, "-m", module, address, name], stderr=subprocess.DEVNULL)
               for name in ("many, wrong password", "endless, no greeting")]  # fmt: skip
    wires = []
    for name in (b"7", b"0", b"1"):
        wire = zmq.Context.instance().socket(zmq.DEALER)
        if name != b"7":
            send_password(wire, key)
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.IDENTITY, name)
        wire.connect(address)
        wires.append(wire)
    frames = (
        [b""],
        [b"\xff" * 100],
        [KEY, KEY],
        [b"\0" * 45, b"\x81\xa4type\xa4Stop"],
        [b"x" * (1 << 20)],
        [b"a"] * 30,
    )
    kinds = cycle(frames)
    while started.process.poll() is None:
        with contextlib.suppress(OSError):  # the run may just have ended
            oversized(address, 1 << 40)
            http(address)
        for wire in wires:
            for _ in range(20):
                if wire.poll(20, zmq.POLLOUT):
                    with contextlib.suppress(zmq.Again):  # the peer may end between the frames of a message
                        wire.send_multipart(next(kinds), zmq.DONTWAIT)
    for wire in wires:
        wire.close()
    for attack in attacks:
        attack.kill()
        attack.wait()


def test_unauthenticated_peers_change_nothing_and_the_key_stays_secret(
    realhf: Callable[..., Run], realhf_start: Start, ppo_words: list[str], tmp_path: Path
) -> None:
    words = [*ppo_words, "n_gpus_per_node=2", "exp_ctrl.total_train_epochs=20"]
    alone = realhf("ppo-math", tmp_path / "alone", words)
    address = f"tcp://127.0.0.1:{free_port()}"
    started = realhf_start("ppo-math", tmp_path / "beside", [*words, f"channel_address={address}"])
    started.wait_for_step()
    path = started.root / "channel.key"
    key = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    throw_garbage(address, key, started)
    run = started.finish()
    assert run.code == 0, run.output
    assert run.curve == alone.curve
    dropped = re.search(r"dropped (\d+) unauthenticated messages", run.output)
    assert dropped is not None and int(dropped.group(1)) >= 100, run.output
    written = [file.read_bytes() for file in run.root.rglob("*") if file.is_file()] + [run.output.encode()]
    assert not path.exists()
    for secret in (key, key.hex().encode(), repr(key).encode()):
        assert not any(secret in text for text in written)
