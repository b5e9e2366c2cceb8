"""Environments of the verifiers library (v1): its tasks, tool servers and scoring, with our replies as the model."""

import asyncio
import contextlib
import itertools
import json
import ssl
import sys
import types
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.adapters.common import optional_library, row_number
from realhf.environments.agents import AgentEnvironment
from realhf.environments.endpoint import EPISODE_HEADER

Json = dict[str, Any]
HARNESS = "realhf_replies_harness"
"""The name under which verifiers finds the harness of this module."""
EPISODE: ContextVar[str] = ContextVar("EPISODE", default="")
"""The name of the endpoint of the episode that a task runs."""


class VerifiersEnv(AgentEnvironment):
    """An environment of ``verifiers.v1``, by the id of its taskset: an installed module.

    ``taskset`` has its options, ``config`` further options of the environment. ``index`` of a row, or else the seed,
    picks one of the first ``n_tasks`` tasks (0: all, of a finite taskset). Every request to the model is a turn, and
    the environment's next request answers the reply; its tool servers run as processes of this machine. The reward is
    the sum of the episode's traces, and comes at the end.
    """

    def __init__(
        self,
        id: str,
        taskset: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        n_tasks: int = 0,
    ) -> None:
        super().__init__()
        self.id, self.n_tasks = id, n_tasks
        self.config: Json = {**(config or {}), "taskset": {**(taskset or {}), "id": id}}

    async def run(self, row: Json, seed: int, base_url: str) -> Json:
        with optional_library("verifiers", "verifiers", "VerifiersEnv"):
            import verifiers.v1 as vf

        register_harness(vf)
        config = json.dumps(self.config, sort_keys=True)
        tasks = load_tasks(config, self.n_tasks)
        if not tasks:
            raise UserError(f"env.options.id={self.id!r}: its taskset has no tasks")
        served = SERVED.setdefault(config, SharedEnvironment(self.config))
        address, _, name = base_url.removesuffix("/v1").rpartition("/")
        EPISODE.set(name)
        # one client per address: with our harness, its requests name their episode
        client = vf.EvalClientConfig(base_url=f"{address}/v1" if served.has_our_harness else base_url,
                                     api_key_var="REALHF_VERIFIERS_KEY")  # fmt: skip
        async with served.open() as env:
            context = vf.ModelContext(model="policy", client=client)
            episode = await env.run_episode(tasks[row_number(row, abs(seed)) % len(tasks)], context)
        return self._result(episode)

    def _result(self, episode: Any) -> Json:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(f"{self.id}: the episode failed: {errors[-1] if errors else 'no reason given'}")
        numbers: dict[str, float] = {}
        for trace in episode.traces:
            numbers |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return {**numbers, "reward": float(sum(trace.reward for trace in episode.traces))}


@dataclass
class _Serving:
    """The servers of an environment: ``ready`` is the environment once they run, ``stop`` ends them."""

    ready: asyncio.Future[Any]
    stop: asyncio.Event
    task: asyncio.Task[None] | None = None


class SharedEnvironment:
    """The environment of a configuration, whose servers run as long as episodes use them."""

    def __init__(self, config: Json) -> None:
        self._config = environment_config(config)
        seats = (getattr(self._config, name) for name in agent_names(config))
        self.has_our_harness = all(seat.harness.id == HARNESS for seat in seats)
        self._users = 0
        self._serving: _Serving | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        self._users += 1
        if self._serving is None:
            self._serving = _Serving(asyncio.get_running_loop().create_future(), asyncio.Event())
            self._serving.task = asyncio.create_task(self._serve(self._serving))
        serving = self._serving
        try:
            yield await asyncio.shield(serving.ready)
        finally:
            self._users -= 1
            if not self._users:
                self._serving = None
                serving.stop.set()
                assert serving.task is not None
                await serving.task

    async def _serve(self, serving: _Serving) -> None:
        """Run the servers in a task of their own: an episode that ends or is cancelled must not stop them."""
        import verifiers.v1 as vf

        try:
            env = vf.load_environment(self._config)
            async with env.serving():
                serving.ready.set_result(env)
                await serving.stop.wait()
        except Exception as error:
            if serving.ready.done():
                raise
            serving.ready.set_exception(error)


SERVED: dict[str, SharedEnvironment] = {}
"""By configuration, as JSON."""


def agent_names(data: Json) -> list[str]:
    """Return the names of an environment's agents, whose configurations are attributes of its configuration."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    return list(agent_config_fields(vf.env_config_type(data["taskset"]["id"], data.get("id", "")).model_validate({})))


def environment_config(data: Json) -> Any:
    """Return the configuration; each agent that does not name another one has our harness and a local runtime."""
    import verifiers.v1 as vf

    try:
        seats = agent_names(data)
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

    headers = {"Authorization": f"Bearer {secret}", EPISODE_HEADER: EPISODE.get()}
    # the turn has its own deadline
    async with httpx.AsyncClient(headers=headers, timeout=None, verify=certificates()) as client:
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


@lru_cache(maxsize=1)
def certificates() -> ssl.SSLContext:
    """Return the context that a client would load by itself, which takes 50 ms."""
    return ssl.create_default_context()


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
