"""Environments of the verifiers library (v1): its tasks, tool servers and scoring, with our replies as the model."""

import asyncio
import contextlib
import itertools
import json
import sys
import types
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.adapters.common import final_turn, optional_library, row_number
from realhf.environments.types import Reply, Turn

Json = dict[str, Any]
HARNESS = "realhf_replies_harness"
"""The name under which verifiers finds the harness of this module."""
MESSAGE_KEYS = ("role", "content", "name", "tool_call_id")


class VerifiersEnv:
    """An environment of ``verifiers.v1``, by the id of its taskset: an installed module.

    ``taskset`` has its options, ``config`` further options of the environment. ``index`` of a row, or else the seed,
    picks one of the first ``n_tasks`` tasks (0: all, of a finite taskset). Every request to the model is a turn, and
    the environment's next request answers the reply; its tool servers run as processes of this machine. The reward is
    the sum of the episode's traces, and comes at the end. ``timeout`` is in seconds, per turn.
    """

    def __init__(
        self,
        id: str,
        taskset: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        n_tasks: int = 0,
        timeout: float = 600.0,
    ) -> None:
        self.id, self.n_tasks, self.timeout = id, n_tasks, timeout
        self.config: Json = {**(config or {}), "taskset": {**(taskset or {}), "id": id}}
        self._endpoint = _ReplyEndpoint()
        self._episode: asyncio.Task[Any] | None = None
        self._shown: list[Json] = []

    async def reset(self, row: Json, seed: int) -> Turn:
        with optional_library("verifiers", "verifiers", "VerifiersEnv"):
            import verifiers.v1 as vf

        await self.close()
        self._shown = []
        register_harness(vf)
        tasks = load_tasks(json.dumps(self.config, sort_keys=True), self.n_tasks)
        if not tasks:
            raise UserError(f"env.options.id={self.id!r}: its taskset has no tasks")
        env = vf.load_environment(environment_config(self.config))
        url = await self._endpoint.open()
        client = vf.EvalClientConfig(base_url=url, api_key_var="REALHF_VERIFIERS_KEY")
        context = vf.ModelContext(model="policy", client=client)
        self._episode = asyncio.create_task(_play(env, tasks[row_number(row, abs(seed)) % len(tasks)], context))
        return await self._next()

    async def step(self, reply: Reply) -> Turn:
        self._shown.append(self._endpoint.answer(reply))
        return await self._next()

    async def close(self) -> None:
        """Stop the episode, its tool servers and its endpoint; it may be closed twice."""
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await episode
        await self._endpoint.close()

    async def _next(self) -> Turn:
        """Return the next request of the environment as a turn, or its end."""
        assert self._episode is not None
        request = asyncio.ensure_future(self._endpoint.requests.get())
        await asyncio.wait({request, self._episode}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return self._turn(request.result())
        request.cancel()
        if not self._episode.done():
            raise TimeoutError(f"env.options.timeout={self.timeout:g}: {self.id} made no request in that time")
        return self._end(self._episode.result())

    def _turn(self, request: Json) -> Turn:
        messages = [plain_message(message) for message in request["messages"]]
        n = len(self._shown)
        if [contents(one) for one in messages[:n]] != [contents(one) for one in self._shown]:
            raise RuntimeError(f"{self.id} has rewritten earlier messages; this adapter plays one growing conversation")
        new = messages[n:]
        self._shown = messages
        return Turn(messages=new, tools=() if n else tuple(request.get("tools") or ()))

    def _end(self, episode: Any) -> Turn:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(f"{self.id}: the episode failed: {errors[-1] if errors else 'no reason given'}")
        numbers: dict[str, float] = {}
        for trace in episode.traces:
            numbers |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return final_turn("", True, float(sum(trace.reward for trace in episode.traces)), numbers)


async def _play(env: Any, task: Any, context: Any) -> Any:
    async with env.serving():
        return await env.run_episode(task, context)


def environment_config(data: Json) -> Any:
    """Return the configuration; each agent that does not name another one has our harness and a local runtime."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    try:
        seats = agent_config_fields(vf.env_config_type(data["taskset"]["id"], data.get("id", "")).model_validate({}))
        local: Json = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        return vf.resolve_env_config({**data, **{name: {**local, **data.get(name, {})} for name in seats}})
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"env.options.id={data['taskset']['id']!r}: verifiers cannot load it: {error}") from error


@lru_cache(maxsize=8)
def load_tasks(config: str, n_tasks: int) -> list[Any]:
    """Return the tasks of a configuration, as JSON; they are shared by the episodes of a process."""
    import verifiers.v1 as vf

    taskset = vf.load_taskset(environment_config(json.loads(config)).taskset)
    if taskset.INFINITE and not n_tasks:
        raise UserError("env.options.n_tasks=0: this taskset has no end; set the number of tasks to use")
    return list(itertools.islice(iter(taskset), n_tasks or None))


class _ReplyEndpoint:
    """A chat-completions server on loopback that waits for the replies of one episode."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Json] = asyncio.Queue()
        self._reply: asyncio.Future[Json] | None = None
        self._runner: Any = None
        self._n_replies = 0

    async def open(self) -> str:
        """Start the server and return its base URL."""
        from aiohttp import web

        self.requests, self._reply = asyncio.Queue(), None
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if self._reply is not None and not self._reply.done():
            self._reply.cancel()
        if runner is not None:
            await runner.cleanup()

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        if self._reply is not None and not self._reply.done():
            problem = "a second request before the reply to the first; one agent at a time can play"
            return web.json_response({"error": {"message": problem}}, status=400)
        self._reply = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(await request.json())
        return web.json_response(await self._reply)

    def answer(self, reply: Reply) -> Json:
        """Send a reply to the request that waits for it; return its message."""
        if self._reply is None or self._reply.done():
            raise RuntimeError("the environment waits for no reply")
        self._n_replies += 1
        calls = [
            {"id": f"call_{self._n_replies}_{number}", "type": "function",
             "function": {"name": call.name, "arguments": "" if call.error else json.dumps(call.arguments)}}
            for number, call in enumerate(reply.tool_calls) if call.name
        ]  # fmt: skip
        message: Json = {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}
        reason = "length" if reply.stop == "length" else "tool_calls" if calls else "stop"
        usage = {"prompt_tokens": 0, "completion_tokens": len(reply.tokens), "total_tokens": len(reply.tokens)}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        self._reply.set_result(
            {"id": "reply", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice],
             "usage": usage}
        )  # fmt: skip
        return plain_message(message)


def plain_message(message: Json) -> Json:
    """Return a message with a text as its content; other parts than texts are dropped."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return {key: content if key == "content" else message.get(key) for key in MESSAGE_KEYS if message.get(key)} | {
        "content": content
    }


def contents(message: Json) -> tuple[str, str]:
    return message["role"], message["content"]


def register_harness(vf: Any) -> None:
    """Let verifiers find a harness that talks to the model in this process, without a program of its own."""
    if HARNESS in sys.modules:
        return
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    class RepliesHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with contextlib.AsyncExitStack() as stack:
                tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)

                async def call(name: str, arguments: Json) -> Any:
                    if name not in names:
                        raise LookupError("there is no such tool")
                    return await call_mcp(connections, names, name, arguments)

                await converse(endpoint, secret, [*messages, *given], tools, call)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = types.ModuleType(HARNESS)
    vars(module).update(RepliesHarness=RepliesHarness, __all__=["RepliesHarness"])
    sys.modules[HARNESS] = module


async def converse(endpoint: str, secret: str, messages: list[Json], tools: list[Json], call: Any) -> None:
    """Ask the model, and call its tools, until a reply has no tool calls."""
    import httpx

    headers = {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(headers=headers, timeout=None) as client:  # the turn has its own deadline
        while True:
            body = {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}
            response = await client.post(f"{endpoint}/chat/completions", json=body)
            response.raise_for_status()
            message = response.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return
            for one in message["tool_calls"]:
                name, arguments = one["function"]["name"], one["function"]["arguments"]
                content = await tool_output(call, name, arguments)
                messages.append({"role": "tool", "tool_call_id": one["id"], "name": name, "content": content})


async def tool_output(call: Any, name: str, arguments: str) -> Any:
    """Return the output of a tool; its error is shown to the model."""
    try:
        values = json.loads(arguments)
    except ValueError:
        return f"error: {name}: the arguments are not valid JSON"
    try:
        return await call(name, values)
    except Exception as error:  # of the tool: the model may call another one
        return f"error: {name}: {type(error).__name__}: {error}"
