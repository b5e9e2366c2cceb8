"""The server of a sandbox: a warm interpreter that forks for every program, and never sees one.

It is started by `sandbox.Sandbox` with an empty environment and shuts itself off (`confine`). A message on its socket
carries limits, and the descriptors of a control socket, the source, and the program's three streams. The source is
read only in the program's own process: the server's memory, which programs inherit, holds nothing. The server answers
on the control socket when the program has ended, with how; anything sent there, or hanging up, kills the program.
"""

import atexit
import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import types
from dataclasses import dataclass
from typing import Any

from realhf.rewards.sandbox.isolation import IsolationInfo, Limits, restrict_program, restrict_server

PRELUDE = """
import array, bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools, json, math
import operator, os, random, re, statistics, string, sys, threading, time, typing
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, permutations, product, repeat, zip_longest
from math import ceil, comb, factorial, floor, gcd, inf, log, log2, sqrt
from typing import Any, Callable, Dict, Generator, Iterable, Iterator, List, Optional, Set, Tuple, Union
"""
NOT_SEALED = 125  # exit code


@dataclass(frozen=True)
class ProgramRequest:
    """One program to run: its descriptors, limits, and the folder that is its own."""

    source: int
    streams: tuple[int, int, int]
    limits: Limits
    seconds: float
    folder: str


@dataclass(frozen=True)
class RunningProgram:
    """A program's process as the server knows it."""

    pid: int
    ended: int  # process descriptor, readable when it has
    control: socket.socket
    folder: str | None  # to be removed


def main(requests: int, namespaces: bool) -> None:
    """Serve until the other end of the socket ``requests`` is closed; in a forked process, run the program."""
    server = socket.socket(fileno=requests)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    os.umask(0o022)
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    try:
        guard = restrict_server(namespaces)
    except OSError as error:
        server.send(json.dumps({"fatal": str(error)}).encode())
        return
    server.send(json.dumps({"ready": guard.describe()}).encode())
    gc.collect()
    gc.freeze()  # forks then share these pages for good
    if (order := serve(server, guard)) is not None:
        exec_program(order, guard, names)


def serve(server: socket.socket, guard: IsolationInfo) -> ProgramRequest | None:
    """Start and end programs; return None when the other end hung up, or the order in the process that is to run it."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    running: dict[int, RunningProgram] = {}  # by either descriptor
    while True:
        fd, _ = poll.poll()[0]  # one at a time: what it leads to may close another, and its number be given again
        if fd == server.fileno():
            message, fds, _, _ = socket.recv_fds(server, 4096, 5)
            if not message:
                for program in set(running.values()):
                    os.kill(program.pid, signal.SIGKILL)
                    bury(program)
                return None
            control, order = accept(message, fds, guard)
            pid = os.fork()
            if pid == 0:
                return order
            for given in (order.source, *order.streams):
                os.close(given)
            started = RunningProgram(pid, os.pidfd_open(pid), control, None if guard.namespaces else order.folder)
            for waited in (started.ended, control.fileno()):
                poll.register(waited, select.POLLIN)
                running[waited] = started
            continue
        program = running[fd]
        if fd == program.ended:
            for waited in {fd, program.control.fileno()} & set(running):
                poll.unregister(waited)
                del running[waited]
            bury(program)
        else:
            os.kill(program.pid, signal.SIGKILL)
            poll.unregister(fd)
            del running[fd]


def accept(message: bytes, fds: list[int], guard: IsolationInfo) -> tuple[socket.socket, ProgramRequest]:
    control, source, *streams = fds
    content = json.loads(message)
    folder = "/tmp" if guard.namespaces else tempfile.mkdtemp(prefix="realhf-program-")
    order = ProgramRequest(
        source, (streams[0], streams[1], streams[2]), Limits(**content["limits"]), content["seconds"], folder
    )
    return socket.socket(fileno=control), order


def bury(program: RunningProgram) -> None:
    """Take leave of a process that has ended, and tell how it did."""
    _, status = os.waitpid(program.pid, 0)
    if program.folder is not None:
        shutil.rmtree(program.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        program.control.send(struct.pack("i", status))
    program.control.close()
    os.close(program.ended)


def exec_program(order: ProgramRequest, guard: IsolationInfo, names: dict[str, Any]) -> None:
    """Turn this process into the program: nothing is left but its three streams, its folder and its source."""
    with open(order.source, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    for number, stream in enumerate(order.streams):
        os.dup2(stream, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        os.environ.update(HOME=order.folder, TMPDIR=order.folder)
        restrict_program(guard, order.limits, order.seconds, order.folder)
    except BaseException as error:
        os.write(2, f"the sandbox could not be closed: {error}".encode())
        os._exit(NOT_SEALED)
    sys.argv, tempfile.tempdir = ["program.py"], None
    module = types.ModuleType("__main__")
    vars(module).update(names, __name__="__main__")
    sys.modules["__main__"] = module
    run(source, vars(module))


def run(source: str, names: dict[str, Any]) -> None:
    """Run the source as a script; this process ends with its code once all its threads have ended."""
    code = 0
    streams = (sys.stdout, sys.stderr)
    end = os._exit

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr, *streams):
            with contextlib.suppress(Exception):
                stream.flush()
        end(code)

    atexit.register(leave)  # first in, last out, and after the threads
    try:
        exec(compile(source, "program.py", "exec"), names)
    except SystemExit as leaving:
        code = exit_code(leaving)
    except BaseException as error:
        code = 1
        with contextlib.suppress(Exception):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            os.write(2, b"\n" + text[:500].encode(errors="replace"))


def exit_code(leaving: SystemExit) -> int:
    """Return the code of a process that says ``sys.exit(x)``."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    return 1
