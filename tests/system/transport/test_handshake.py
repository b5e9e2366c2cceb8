"""Passwords of TCP connections, with hostile peers: the master's memory, and the messages of its workers."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.messages import Failed, Hello
from realhf.base.errors import UserError
from realhf.base.process import raise_fd_limit
from realhf.system.transport.channel import ZmqMaster, ZmqWorker
from realhf.system.transport.handshake import MAX_FRAME, password, split
from tests.conftest import TIMEOUT_S
from tests.system.transport.hostile_peers import ATTACKS, KEY

MAX_GROWTH = 100e6


def resident_bytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_costs_no_memory_and_workers_are_served(attack: str) -> None:
    raise_fd_limit()
    master = ZmqMaster(KEY, 2, "tcp://127.0.0.1:*")
    before = peak = resident_bytes()
    module = "tests.system.transport.hostile_peers"
    with subprocess.Popen([sys.executable, "-m", module, master.address, attack], stderr=subprocess.PIPE) as peer:
        worker, sent = ZmqWorker(master.address, 1, KEY), 0
        while peer.poll() is None:
            sent += 1
            worker.send(Hello(1, pid=sent, host="here", port=0))
            assert master.receive(TIMEOUT_S) == Hello(1, pid=sent, host="here", port=0)
            peak = max(peak, resident_bytes())
            assert master.receive(0.02) is None
        errors = peer.stderr.read().decode()
    worker.send(large := Failed(1, "x", "y" * 10 * MAX_FRAME, "z"))
    assert master.receive(TIMEOUT_S) == large
    assert peer.returncode == 0, errors
    assert peak - before < MAX_GROWTH
    assert master.rejected_messages == 0  # none of them was read
    worker.close()
    master.close()


def test_an_address_in_use_is_an_error_every_time() -> None:
    """And no thread of a socket that was not bound aborts the process."""
    with closing(ZmqMaster(KEY, 1, "tcp://127.0.0.1:*")) as master:
        for _ in range(50):
            with pytest.raises(UserError, match="channel_address='tcp://"):
                ZmqMaster(KEY, 1, master.address)


@given(st.binary(max_size=64), st.integers(0, 3 * MAX_FRAME))
def test_frames_are_the_payload(start: bytes, size: int) -> None:
    payload = start.ljust(size, b".")
    frames = split(payload)
    assert b"".join(frames) == payload
    assert all(0 < len(frame) <= MAX_FRAME for frame in frames) or (payload == b"" and len(frames) == 1)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_passwords_fit_the_protocol_and_differ(key: bytes, other: bytes) -> None:
    assert len(password(key)) == 64 and password(key).isalnum()
    assert (password(key) == password(other)) == (key == other)
