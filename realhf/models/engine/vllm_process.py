"""The client's side of a vLLM process: start, requests with deadlines, and end."""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.config import VllmConfig
from realhf.base.activity import ActivityStack
from realhf.base.errors import RunFailed

PROGRAM = Path(__file__).with_name("in_vllm") / "realhf_server.py"
LENGTH = struct.Struct("<I")
LOG_TAIL_CHARS = 800


class VllmServer:
    """A vLLM process, with a deadline for every ``call``. Not thread-safe.

    ``version`` is that of its weights; -1 without any, or if it discards them after every call (``sleeps``).
    ``has_base`` is True if it has the frozen weights below its adapters. ``torch`` is the version of its torch, known
    after the start.
    """

    def __init__(
        self, name: str, options: VllmConfig, log: Path, environment: Mapping[str, str], activity: ActivityStack
    ) -> None:
        self.name, self.log, self.timeout_s, self.activity = name, log, options.timeout, activity
        self.version, self.has_base, self.sleeps, self.torch = -1, False, False, ""
        self._socket, theirs = socket.socketpair()
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [options.python or sys.executable, str(PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()],
                start_new_session=True, env=dict(environment),
            )  # fmt: skip

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Return the reply to a request; raises RunFailed on an error, on a timeout, or if the process has ended."""
        deadline = time.monotonic() + self.timeout_s
        with self.activity.enter(f"{self.name}, for {method}"):
            try:
                body = msgspec.msgpack.encode({"method": method, **arguments})
                self._socket.settimeout(self.timeout_s)
                self._socket.sendall(LENGTH.pack(len(body)) + body)
                size = LENGTH.unpack(self._receive(LENGTH.size, method, deadline))[0]
                reply = msgspec.msgpack.decode(self._receive(size, method, deadline))
            except OSError as error:
                raise self._exit_error(method) from error
        if "error" in reply:
            raise RunFailed(f"{self.name} failed to {method}: {reply['error']} (more in {self.log})")
        return reply

    def end_call(self) -> None:
        """Record that a generating call has ended: a process that sleeps has discarded its weights."""
        if self.sleeps:
            self.version, self.has_base = -1, False

    def _receive(self, size: int, method: str, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            if not select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise RunFailed(
                    f"{self.name} did not {method} within {self.timeout_s:g} s (vllm.timeout); see {self.log}"
                )
            chunk = self._socket.recv(min(size - len(received), 1 << 20))
            if not chunk:
                raise self._exit_error(method)
            received += chunk
        return bytes(received)

    def _exit_error(self, method: str) -> RunFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        code = self._process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        tail = self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return RunFailed(f"{self.name} ended {how} during {method} ({self.log}):\n{tail}")

    def close(self) -> None:
        """Wait a few seconds for the process to exit, then kill what is left of its process group."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
