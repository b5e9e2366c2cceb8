"""The child process of an environment pool: ``python -m realhf.environments.server OPTIONS``, a JSON object.

It writes ``{"ready": true}`` or ``{"fatal": text}``, and then replies to each JSON line ``{id, op, ...}`` on stdin with
``{"id", "seconds", "turn"}`` or ``{"id", "seconds", "error", "traceback"}``, in order. ``op`` is ``reset`` (``row``,
``seed``), ``step`` (``reply``), ``truncate`` or ``close``. If the methods are ``async``, the first line includes
``"asynchronous": true``, and the process executes all requests that it has received at the same time. Output of the
environment goes to stderr. The parent kills the process when a request exceeds its deadline; the process ends by itself
when the parent exits.
"""

import asyncio
import contextlib
import inspect
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

from realhf.base.child_process import describe, die_with_parent, error_reply, limit, send, take_over_streams
from realhf.base.process import raise_fd_limit
from realhf.environments.loading import load_class
from realhf.environments.tool_calls import TOOL_CALL_PARSERS
from realhf.environments.types import Reply, Turn, reply_of, turn_to_json

SECONDS_PER_YEAR = 365 * 86400


def main(options: dict[str, Any]) -> None:
    """Serve until stdin is closed."""
    raise_fd_limit()  # an agent has two connections
    requests, replies = take_over_streams()
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    loop = asyncio.new_event_loop()  # needs a socket
    limit(resource.RLIMIT_DATA, int(options["memory_gb"] * 2**30))
    try:
        make = load_class(options["cls"])
        if options["sandbox"]:
            isolate(int(options["memory_gb"] * 2**30))
    except (Exception, SystemExit) as error:
        send(replies, {"fatal": describe(error)})
        return
    threading.Thread(target=die_with_parent, args=(requests, options["timeout"]), daemon=True).start()
    methods = (getattr(make, name, None) for name in ("reset", "step"))
    asynchronous = any(map(inspect.iscoroutinefunction, methods))
    send(replies, {"ready": True, "asynchronous": asynchronous})
    loop.run_until_complete(EnvServer(make, options["options"], options["tool_format"], replies).run(requests))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):  # in a sandbox, where there are none
        os.killpg(os.getpgrp(), signal.SIGTERM)  # processes that environments left running
    os._exit(0)  # with their threads


def isolate(memory: int) -> None:
    """Isolate this process from files, network and other processes; OSError if the kernel does not permit it."""
    from realhf.base.isolation.restrict import Limits, restrict_program, restrict_server

    isolation = restrict_server(namespaces=True)
    if not (isolation.namespaces or isolation.landlock):
        raise OSError("env.sandbox=True: this kernel has no namespaces for users, and no Landlock")
    folder = "/tmp" if isolation.namespaces else tempfile.mkdtemp(prefix="realhf-environment-")
    restrict_program(isolation, Limits(memory=memory, file=2**28), SECONDS_PER_YEAR, folder)


class EnvServer:
    """The environments of open episodes, by the number of their requests' episode."""

    def __init__(self, make: Any, options: dict[str, Any], tool_format: str, replies: int) -> None:
        self._make, self._options, self._replies = make, options, replies
        self._parse = TOOL_CALL_PARSERS[tool_format]
        self._pid = os.getpid()
        self._environments: dict[int, Any] = {}

    async def run(self, requests: int) -> None:
        reader, loop = asyncio.StreamReader(limit=2**30), asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests, "rb"))
        tasks: set[asyncio.Task[None]] = set()
        async for line in reader:
            tasks.add(task := loop.create_task(self._serve(json.loads(line))))
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _serve(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any]
        start = time.perf_counter()
        try:
            answer = {"turn": await self._answer(request)}
        except (Exception, SystemExit) as error:
            answer = error_reply(error)
        if os.getpid() != self._pid:
            os._exit(0)  # a process that the environment has forked
        send(self._replies, {"id": request["id"], "seconds": time.perf_counter() - start, **answer})

    def _with_calls(self, reply: Reply) -> Reply:
        return replace(reply, tool_calls=reply.tool_calls or self._parse(reply.text))

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        episode = request["episode"]
        match request["op"]:
            case "reset":
                environment = self._environments[episode] = self._make(**self._options)
                result = environment.reset(json.loads(request["row"]), request["seed"])
            case "step":
                result = self._environments[episode].step(self._with_calls(reply_of(request["reply"])))
            case "truncate":
                truncate = getattr(self._environments[episode], "truncate", None)
                result = Turn(done=True) if truncate is None else truncate()
            case _:
                environment = self._environments.pop(episode, None)
                close = getattr(environment, "close", None)
                if close is not None and inspect.isawaitable(done := close()):
                    await done
                return None
        return turn_to_json(await result if inspect.isawaitable(result) else result)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
