"""Environments from classes whose public methods are tools. Imports no torch.

A class with methods such as ``def add(self, a: int, b: int) -> int`` is an environment: the model calls the methods,
and the episode ends with a reply without a call. ``reset(row, seed)``, ``get_reward()`` and ``close()`` are optional.
``reset`` may return the first message of the user, or a ``Turn``. ``get_reward`` may have a parameter for the text of
the last reply.
"""

import inspect
import json
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from realhf.base.errors import did_you_mean
from realhf.environments.agents import function_agent
from realhf.environments.tool_schema import InvalidArgument, ToolFunction, tool_function
from realhf.environments.types import Reply, ToolCall, Turn

HOOKS = ("reset", "step", "close", "get_reward")


def tools_of(cls: type) -> dict[str, ToolFunction]:
    """Return the tools of a class, its public methods, by name in order; TypeError as in ``tool_function``."""
    found: dict[str, Any] = {}
    for parent in reversed(cls.__mro__[:-1]):
        found |= vars(parent)
    tools = dict[str, ToolFunction]()
    for name, value in found.items():
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if not name.startswith("_") and name not in HOOKS and inspect.isfunction(function):
            tools[name] = tool_function(function, is_method=not isinstance(value, staticmethod))
    return tools


class ToolEnvironment:
    """The environment of a user's object whose public methods are tools.

    An answer has at most ``max_output`` characters, and of a reply at
    most ``max_calls`` calls run. An exception of a tool is an answer ``Error: ...``, or with ``fatal`` the end of the
    episode. The last turn has the reward. Metrics are ``tool_calls`` and ``tool_errors``.

    With ``as_text`` the answers are a text, for models without a chat template, and the row's prompt describes the
    tools. For every call the text is ``\\n<tool_response name="add">\\n5\\n</tool_response>\\n``.
    """

    def __init__(
        self,
        tools: Any,
        as_text: bool = False,
        max_output: int = 4000,
        max_calls: int = 32,
        fatal: bool = False,
    ) -> None:
        if is_async_class(type(tools)) and not isinstance(self, AsyncToolEnvironment):
            raise TypeError(f"{type(tools).__name__} has async methods; use AsyncToolEnvironment")
        self._object, self._tools = tools, tools_of(type(tools))
        self._as_text, self._fatal = as_text, fatal
        self._max_output, self._max_calls = max_output, max_calls
        self._n_calls, self._n_errors = 0, 0
        self._last_reply = ""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as functions in OpenAI's format."""
        return [tool.schema for tool in self._tools.values()]

    def reset(self, row: dict[str, Any], seed: int) -> Any:
        return _finished(self._reset(row, seed))

    def step(self, reply: Reply) -> Any:
        return _finished(self._step(reply))

    def truncate(self) -> Any:
        return _finished(self._last_turn())

    def close(self) -> Any:
        close = getattr(self._object, "close", None)
        return close() if close is not None else None

    async def _reset(self, row: dict[str, Any], seed: int) -> Turn:
        reset = getattr(self._object, "reset", None)
        first = await _awaited(reset(row, seed)) if reset is not None else None
        if isinstance(first, Turn):
            turn = first
        elif isinstance(first, str) and self._as_text:
            turn = Turn(text=first)
        elif self._as_text:
            turn = Turn()  # the episode starts with the row's prompt
        else:
            prompt = first if isinstance(first, str) else row.get("prompt", "")
            turn = Turn(messages=[{"role": "user", "content": prompt}])
        return turn if turn.tools or not turn.messages else replace(turn, tools=self.schemas)

    async def _step(self, reply: Reply) -> Turn:
        calls, self._last_reply = reply.tool_calls, reply.text
        if not calls:
            return await self._last_turn()
        answers = [(call.name or "tool", await self._answer(call)) for call in calls[: self._max_calls]]
        if (n := len(calls) - self._max_calls) > 0:
            problem = f"Error: the last {n} calls did not run; a reply may have at most {self._max_calls} calls"
            answers.append((calls[-1].name or "tool", problem))
        if self._as_text:
            return Turn(text="".join(map(_text_answer, answers)))
        return Turn(messages=[{"role": "tool", "name": name, "content": content} for name, content in answers])

    async def _last_turn(self) -> Turn:
        get_reward = getattr(self._object, "get_reward", None)
        reward = 0.0
        if get_reward is not None:
            arguments = [self._last_reply] if inspect.signature(get_reward).parameters else []
            reward = await _awaited(get_reward(*arguments))
        return Turn(
            reward=reward, done=True, info={"tool_calls": float(self._n_calls), "tool_errors": float(self._n_errors)}
        )

    async def _answer(self, call: ToolCall) -> str:
        """Run a call and return the content of its answer."""
        self._n_calls += 1
        try:
            if call.error:
                raise InvalidArgument(call.error)
            if call.name not in self._tools:
                known = ", ".join(self._tools)
                guess = did_you_mean(call.name, self._tools)
                raise InvalidArgument(f"there is no tool {call.name!r:.80}{guess}; the tools are: {known}")
            arguments = self._tools[call.name].bind(call.arguments)
        except InvalidArgument as problem:
            self._n_errors += 1
            return self._cut(f"Error: {problem}")
        try:
            value = await _awaited(getattr(self._object, call.name)(**arguments))
            return self._cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
        except Exception as error:
            if self._fatal:
                raise
            self._n_errors += 1
            return self._cut(f"Error: {type(error).__name__}: {error}")

    def _cut(self, content: str) -> str:
        if len(content) <= self._max_output:
            return content
        return f"{content[: self._max_output]}\n... ({self._max_output} of {len(content)} characters are shown)"


class AsyncToolEnvironment(ToolEnvironment):
    """The environment of a user's object with ``async`` tools: episodes of one process wait together."""

    async def reset(self, row: dict[str, Any], seed: int) -> Turn:
        return await self._reset(row, seed)

    async def step(self, reply: Reply) -> Turn:
        return await self._step(reply)

    async def truncate(self) -> Turn:
        return await self._last_turn()


def is_async_class(cls: type) -> bool:
    """Return whether a tool or another method of the episode is ``async``."""
    hooks = (getattr(cls, name, None) for name in ("reset", "get_reward"))
    return any(map(inspect.iscoroutinefunction, hooks)) or any(tool.is_async for tool in tools_of(cls).values())


def as_environment(cls: Any) -> Any:
    """Return a class with ``step``, or a factory, unchanged; the environment of an async function, which is an agent.

    A class with tools becomes an environment class. Its arguments are those of the user's class, and ``as_text``,
    ``max_output``, ``max_calls`` and ``fatal``. TypeError for a class without tools, or with invalid ones.
    """
    if inspect.iscoroutinefunction(cls):
        return function_agent(cls)
    if not inspect.isclass(cls) or callable(getattr(cls, "step", None)):
        return cls
    if not tools_of(cls):
        raise TypeError(f"class '{cls.__name__}' has no method 'step', and no public method as a tool")
    parent: type[ToolEnvironment] = AsyncToolEnvironment if is_async_class(cls) else ToolEnvironment
    ours = tuple(inspect.signature(ToolEnvironment).parameters)[1:]

    def init(self: ToolEnvironment, **options: Any) -> None:
        own = {key: options.pop(key) for key in ours if key in options}
        parent.__init__(self, cls(**options), **own)

    return type(cls.__name__, (parent,), {"__init__": init, "__doc__": cls.__doc__, "__module__": cls.__module__})


def _text_answer(answer: Sequence[str]) -> str:
    return f'\n<tool_response name="{answer[0]}">\n{answer[1]}\n</tool_response>\n'


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _finished(work: Coroutine[Any, Any, Turn]) -> Turn:
    """Return the result of a coroutine that does not wait; RuntimeError if it waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    work.close()
    raise RuntimeError("a tool waits, but it is not an async function; declare it with 'async def'")
