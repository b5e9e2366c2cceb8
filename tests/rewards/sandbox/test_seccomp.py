"""Which calls of the kernel the filter lets through, by an interpreter of its instructions."""

import platform
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.rewards.sandbox.seccomp import (
    ALLOW,
    EQUAL,
    LOAD,
    MACHINES,
    RETURN,
    call,
    column,
    program_filter,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="there is a filter on Linux only"
)


def decided(number: int, arguments: tuple[int, ...], pid: int, machine: int | None = None) -> bool:
    """Whether the filter lets a call through: an interpreter of its instructions."""
    name = MACHINES[platform.machine()][1] if machine is None else machine
    data = {0: number, 4: name, **{16 + 8 * i: a for i, a in enumerate(arguments)}}
    lines, at, loaded = program_filter(pid), 0, 0
    while True:
        operation, true, false, operand = lines[at]
        if operation == RETURN:
            return operand == ALLOW
        if operation == LOAD:
            loaded, skip = data[operand], 0
        else:
            holds = (
                loaded == operand
                if operation == EQUAL
                else loaded >= operand
                if operation == 0x35
                else loaded & operand
            )
            skip = true if holds else false
        at += 1 + skip


@given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(0, 2**32 - 1)] * 2), st.integers(2, 2**22))
def test_the_filter_always_decides(number: int, arguments: tuple[int, int], pid: int) -> None:
    allowed = decided(number, arguments, pid)
    assert not (allowed and number >= 2**30) and not decided(number, arguments, pid, machine=3)


@given(st.integers(2, 2**22), st.integers(0, 2**32 - 1), st.integers(0, 64))
def test_signals_reach_the_program_alone(pid: int, other: int, signal_number: int) -> None:
    kill = (62, 129)[column()]
    assert decided(kill, (pid, signal_number), pid)
    assert decided(kill, (other, signal_number), pid) == (other == pid)


def test_the_filter_knows_its_calls() -> None:
    at = column()
    read, clone, socket = ((0, 63)[at], (56, 220)[at], (41, 198)[at])
    assert decided(read, (0, 0), 5) and not decided(socket, (2, 1), 5)
    assert decided(clone, (0x3D0F00, 0), 5) and not decided(clone, (0x11, 0), 5)


def test_calls_of_the_kernel_raise() -> None:
    with pytest.raises(OSError, match="umount2: "):
        call("umount2", b"/no/such/place", 0)


def test_an_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="run only on Linux on x86_64 or aarch64, this is linux pdp11"):
        column()
