"""The system calls that the filter permits, determined by an interpreter of its instructions."""

import platform
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.base.isolation.seccomp import (
    ALLOW,
    EQUAL,
    LOAD,
    MACHINES,
    RETURN,
    libc_call,
    program_filter,
    table_column,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="the filter needs Linux"
)


def is_permitted(number: int, arguments: tuple[int, ...], pid: int, machine: int | None = None) -> bool:
    """Return True if the filter permits a call."""
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
def test_every_call_is_decided(number: int, arguments: tuple[int, int], pid: int) -> None:
    allowed = is_permitted(number, arguments, pid)
    assert not (allowed and number >= 2**30) and not is_permitted(number, arguments, pid, machine=3)


@given(st.integers(2, 2**22), st.integers(0, 2**32 - 1), st.integers(0, 64))
def test_signals_only_to_itself(pid: int, other: int, signal_number: int) -> None:
    kill = (62, 129)[table_column()]
    assert is_permitted(kill, (pid, signal_number), pid)
    assert is_permitted(kill, (other, signal_number), pid) == (other == pid)


def test_calls_by_architecture() -> None:
    at = table_column()
    read, clone, socket = ((0, 63)[at], (56, 220)[at], (41, 198)[at])
    assert is_permitted(read, (0, 0), 5) and not is_permitted(socket, (2, 1), 5)
    assert is_permitted(clone, (0x3D0F00, 0), 5) and not is_permitted(clone, (0x11, 0), 5)


def test_failed_calls_raise() -> None:
    with pytest.raises(OSError, match="umount2: "):
        libc_call("umount2", b"/no/such/place", 0)


def test_unsupported_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    with pytest.raises(OSError, match="run only on Linux on x86_64 or aarch64, this is linux pdp11"):
        table_column()
