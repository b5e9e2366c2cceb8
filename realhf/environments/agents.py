"""Agents: a program or an async function of the user's that talks to the model by OpenAI's API.

The requests of an agent are the turns of an episode. A request that continues the conversation extends its tokens.
"""

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import os
import shlex
import signal
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.endpoint import AgentEndpoint, EndpointServer
from realhf.environments.types import Reply, Turn

MAX_OUTPUT = 1 << 20
"""Bytes of a program's output that are kept."""
SERVERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EndpointServer] = weakref.WeakKeyDictionary()


class AgentEnvironment:
    """An episode of an agent: it starts with the agent, and ends with it. Subclasses implement ``run``."""

    def __init__(self) -> None:
        self._endpoint: AgentEndpoint | None = None
        self._agent: asyncio.Task[Turn] | None = None

    async def run(self, row: dict[str, Any], seed: int, base_url: str) -> Any:
        """Run the agent; return a reward, or a mapping with a ``reward`` and metrics."""
        raise NotImplementedError

    async def reset(self, row: dict[str, Any], seed: int) -> Turn:
        await self.close()
        server = SERVERS.setdefault(asyncio.get_running_loop(), EndpointServer())
        self._endpoint, base_url = await server.open()
        self._agent = asyncio.create_task(self._play(row, seed, base_url))
        return await self._next()

    async def _play(self, row: dict[str, Any], seed: int, base_url: str) -> Turn:
        try:
            return last_turn(await self.run(row, seed, base_url))
        except SystemExit as error:  # would end the event loop
            raise RuntimeError(f"the agent raised SystemExit({error.code!r:.100})") from error

    async def step(self, reply: Reply) -> Turn:
        assert self._endpoint is not None
        self._endpoint.answer(reply)
        return await self._next()

    async def truncate(self) -> Turn:
        """Refuse the pending request and later ones, and wait for the agent's reward: 0 if it fails without them."""
        assert self._endpoint is not None and self._agent is not None
        self._endpoint.refuse()
        try:
            return await self._agent
        except Exception as error:
            print(f"an agent at its limit of turns or tokens: {type(error).__name__}: {error!s:.200}", file=sys.stderr)
            return Turn(done=True)

    async def _next(self) -> Turn:
        """Return the next request as a turn, or the end of the agent."""
        assert self._endpoint is not None and self._agent is not None
        request = asyncio.ensure_future(self._endpoint.next_turn())
        await asyncio.wait({request, self._agent}, return_when=asyncio.FIRST_COMPLETED)
        if request.done() and not self._agent.done():
            return request.result()
        request.cancel()
        return self._agent.result()

    async def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.cancel()
            await asyncio.wait({agent})
        if self._endpoint is not None:
            SERVERS[asyncio.get_running_loop()].close(self._endpoint)
            self._endpoint = None


def last_turn(result: Any) -> Turn:
    """Return the last turn of an agent's result; TypeError or ValueError for one without a reward."""
    values: Mapping[Any, Any] = result if isinstance(result, Mapping) else {"reward": result}
    reward = values.get("reward")
    if isinstance(reward, bool):
        reward = float(reward)
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"the agent returned {result!r:.100}; it must return a reward, a number, or {{'reward': ...}}")
    if not math.isfinite(reward):
        raise ValueError(f"the agent's reward is {reward!r}; it must be finite")
    info = {key: value for key, value in values.items() if key != "reward"}
    return Turn(reward=float(reward), done=True, info=info)


def function_agent(function: Any) -> type[AgentEnvironment]:
    """Return the environment class of ``async def solve(row, base_url)``, or ``solve(row, base_url, seed)``."""
    takes_seed = "seed" in inspect.signature(function).parameters

    class FunctionAgent(AgentEnvironment):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self._options = options

        async def run(self, row: dict[str, Any], seed: int, base_url: str) -> Any:
            more = {"seed": seed} if takes_seed else {}
            return await function(row, base_url, **more, **self._options)

    return FunctionAgent


class AgentProgram(AgentEnvironment):
    """A program, started once per episode. Its requests go to ``OPENAI_BASE_URL``.

    ``command`` is split as by a shell. The program gets the row as JSON on stdin, and the seed in ``REALHF_SEED``. The
    last line of its output is the reward: a number, or a JSON object with ``reward`` and metrics. An exit status other
    than 0 fails the episode.
    """

    def __init__(
        self, command: str | Sequence[str], cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._command = shlex.split(command) if isinstance(command, str) else [str(one) for one in command]
        if not self._command:
            raise UserError("env.options.command is empty")
        self._cwd, self._variables = cwd, {str(key): str(value) for key, value in (env or {}).items()}

    async def run(self, row: dict[str, Any], seed: int, base_url: str) -> Any:
        variables = {**os.environ, **self._variables, "OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url,
                     "OPENAI_API_KEY": "realhf", "REALHF_SEED": str(seed)}  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=self._cwd, env=variables
            )
        except OSError as error:
            raise UserError(f"env.options.command={shlex.join(self._command)!r}: {error}") from error
        assert process.stdin and process.stdout and process.stderr
        try:
            streams = (_kept(process.stdout), _kept(process.stderr), _feed(process.stdin, json.dumps(row).encode()))
            output, errors, _ = await asyncio.gather(*streams)
            status = await process.wait()
        finally:
            if process.returncode is None:
                kill_tree(process.pid)
        if status:
            how = f"exit status {status}" if status > 0 else f"{signal.strsignal(-status)}"
            raise RuntimeError(f"the agent's program ended with {how}: {errors.decode(errors='replace')[-2000:]}")
        return reported(output.decode(errors="replace"))


async def _kept(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, and return its last bytes."""
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-MAX_OUTPUT:]
    return kept


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read its row
        stream.write(data)
        await stream.drain()
        stream.close()


def reported(output: str) -> Any:
    """Return the last line of a program's output as JSON; ValueError if it is none."""
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        last = f"{lines[-1]!r:.100}" if lines else "nothing"
        raise ValueError(
            f"the last line of the agent's output is {last}; it must be the reward: a number, or JSON such as "
            '{"reward": 1.0}'
        ) from None


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    for one in [pid, *_descendants(pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from _descendants(child)
