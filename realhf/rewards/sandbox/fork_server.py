"""The fork server of a sandbox: a preloaded interpreter that forks a process per program.

`sandbox.Sandbox` starts it with an empty environment, and it restricts itself (`isolation`). A request on its socket
carries limits and the descriptors of a control socket, the source, and the program's three streams. The source is read
only in the program's process, so that no later program inherits it. The server sends the exit status on the control
socket; any message on that socket, or closing it, kills the program.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from realhf.base.isolation.restrict import IsolationInfo, Limits, restrict_program, restrict_server

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
NOT_ISOLATED = 125  # exit code


@dataclass(frozen=True)
class RunningProgram:
    pid: int
    pidfd: int  # readable once the process has ended
    control: socket.socket
    folder: str | None  # to remove afterwards


def main(requests: int, namespaces: bool) -> None:
    """Serve until the peer closes the socket ``requests``; in a forked process, run the program."""
    server = socket.socket(fileno=requests)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    os.umask(0o022)
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    try:
        isolation = restrict_server(namespaces)
    except OSError as error:
        server.send(json.dumps({"fatal": str(error)}).encode())
        return
    server.send(json.dumps({"ready": isolation.describe()}).encode())
    gc.collect()
    gc.freeze()  # so that forks share these pages
    if (run_program := serve(server, isolation)) is not None:
        run_program(isolation, names)


def serve(server: socket.socket, isolation: IsolationInfo) -> Callable[[IsolationInfo, dict[str, Any]], None] | None:
    """Start and reap programs; return the program in the forked process, and None once the peer has hung up."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    running: dict[int, RunningProgram] = {}  # by pidfd and by control socket
    while True:
        fd, _ = poll.poll()[0]  # one event at a time: handling it may close another descriptor
        if fd == server.fileno():
            message, fds, _, _ = socket.recv_fds(server, 4096, 5)
            if not message:
                for program in set(running.values()):
                    os.kill(program.pid, signal.SIGKILL)
                    reap(program)
                return None
            control, source, *streams = fds
            request = json.loads(message)
            private = None if isolation.namespaces else tempfile.mkdtemp(prefix="realhf-program-")
            pid = os.fork()
            if pid == 0:
                limits = Limits(**request["limits"])
                return partial(exec_program, source, streams, limits, request["seconds"], private or "/tmp")
            for received in (source, *streams):
                os.close(received)
            started = RunningProgram(pid, os.pidfd_open(pid), socket.socket(fileno=control), private)
            for polled in (started.pidfd, control):
                poll.register(polled, select.POLLIN)
                running[polled] = started
            continue
        program = running[fd]
        if fd == program.pidfd:
            for polled in {fd, program.control.fileno()} & set(running):
                poll.unregister(polled)
                del running[polled]
            reap(program)
        else:
            os.kill(program.pid, signal.SIGKILL)
            poll.unregister(fd)
            del running[fd]


def reap(program: RunningProgram) -> None:
    """Wait for a process that has ended, clean up, and send its exit status."""
    _, status = os.waitpid(program.pid, 0)
    if program.folder is not None:
        shutil.rmtree(program.folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        program.control.send(struct.pack("i", status))
    program.control.close()
    os.close(program.pidfd)


def exec_program(
    source_fd: int,
    streams: Sequence[int],
    limits: Limits,
    seconds: float,
    folder: str,
    isolation: IsolationInfo,
    names: dict[str, Any],
) -> None:
    """Turn this process into the program, with no resources but its three streams and its folder."""
    with open(source_fd, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        os.environ.update(HOME=folder, TMPDIR=folder)
        restrict_program(isolation, limits, seconds, folder)
    except BaseException as error:
        os.write(2, f"the program could not be isolated: {error}".encode())
        os._exit(NOT_ISOLATED)
    sys.argv, tempfile.tempdir = ["program.py"], None
    module = types.ModuleType("__main__")
    vars(module).update(names, __name__="__main__")
    sys.modules["__main__"] = module
    run(source, vars(module))


def run(source: str, names: dict[str, Any]) -> None:
    """Run the source as a script; the process exits with its exit code once all threads have ended."""
    code = 0
    streams = (sys.stdout, sys.stderr)
    exit_process = os._exit  # the program may replace it

    def flush_and_exit() -> None:
        for stream in (sys.stdout, sys.stderr, *streams):
            with contextlib.suppress(Exception):
                stream.flush()
        exit_process(code)

    atexit.register(flush_and_exit)  # registered first, so it runs last, after all threads
    try:
        exec(compile(source, "program.py", "exec"), names)
    except SystemExit as error:
        code = (error.code or 0) & 0xFF if error.code is None or isinstance(error.code, int) else 1
    except BaseException as error:
        code = 1
        with contextlib.suppress(Exception):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            os.write(2, b"\n" + text[:500].encode(errors="replace"))
