"""The words between an environment and a model: ``Turn`` from the environment, ``Reply`` from the model."""

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from realhf.base.child_process import clean_text

MAX_TURN_BYTES = 1 << 24
"""Limit of one observation, as JSON."""
MAX_DEPTH = 50
"""Levels of lists and objects in the values of an observation."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has written. ``arguments`` are as parsed; an invalid call has ``error``."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


@dataclass(frozen=True)
class Reply:
    """The model's message: text without special tokens, all token ids, and its tool calls in ``env.tool_format``.

    ``stop`` is ``stop`` after a stop token, or ``length`` for a reply cut at its limit. ``logprobs`` belong to
    ``tokens``. ``n_prompt_tokens`` counts the tokens before them.
    """

    text: str
    tokens: list[int]
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop: str = "stop"
    logprobs: list[float] = field(default_factory=list)
    n_prompt_tokens: int = 0


@dataclass(frozen=True)
class Turn:
    """The environment's message: chat ``messages`` for the chat template, or ``text`` or ``tokens`` to append.

    The first turn of an episode may have none of them: the episode then starts with the prompt of its row. ``tools``
    (JSON schemas) are passed to the chat template in the first turn. ``reward`` is for the reply before. The last turn
    is ``done``; its message is not shown to the model. Means of the numbers in the last ``info`` are metrics,
    ``CALL/info_NAME``.

    With ``whole`` the messages or tokens are the conversation from its start. It goes on in the row whose end it
    continues verbatim; else a new row begins, which has the tokens of an earlier one up to the last common reply.
    ``max_tokens`` limits the next reply.
    """

    messages: Sequence[dict[str, Any]] = ()
    text: str | None = None
    tokens: list[int] | None = None
    tools: Sequence[dict[str, Any]] = ()
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    max_tokens: int | None = None


class Environment(Protocol):
    """A user's environment. One instance plays one episode; a process has many. Methods may be ``async``."""

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        """Start an episode for a row of the data set. ``seed`` depends on the seed of the run and the prompt."""

    def step(self, reply: Reply) -> Turn:
        """Answer a reply of the model."""

    def truncate(self) -> Turn:
        """Return the last turn of an episode that ends at a limit, with the reward for its last reply; optional."""

    def close(self) -> None:
        """Release resources; optional."""


def turn_to_json(value: object) -> dict[str, Any]:
    """Return a turn as JSON values; TypeError or ValueError for an invalid one."""
    if isinstance(value, str):
        value = Turn(text=value)
    if not isinstance(value, Turn):
        raise TypeError(f"the environment returned {value!r:.100}, a {type(value).__name__}; it must return a Turn")
    if not isinstance(value.reward, numbers.Real) or not math.isfinite(value.reward):
        raise ValueError(f"Turn.reward is {value.reward!r:.100}; it must be a finite number")
    if sum((bool(value.messages), value.text is not None, value.tokens is not None)) > 1:
        raise ValueError("a Turn has messages, text or tokens, not several of them")
    if value.text is not None and not isinstance(value.text, str):
        raise TypeError(f"Turn.text is a {type(value.text).__name__}; it must be text")
    for message in value.messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TypeError(f"Turn.messages has {message!r:.100}; a message is a dict with texts 'role' and 'content'")
    size = len(value.text or "") + sum(len(message["content"]) for message in value.messages)
    if size > MAX_TURN_BYTES:
        raise ValueError(f"the Turn has {size} characters, more than {MAX_TURN_BYTES}")
    if value.tokens is not None and not all(isinstance(t, int) and t >= 0 for t in value.tokens):
        raise TypeError("Turn.tokens must be token ids, integers >= 0")
    if value.whole and not (value.messages or value.tokens):
        raise ValueError("a Turn with whole=True has no messages and no tokens")
    if value.max_tokens is not None and (not isinstance(value.max_tokens, int) or value.max_tokens < 1):
        raise ValueError(f"Turn.max_tokens is {value.max_tokens!r:.100}; it must be an integer >= 1")
    info = {str(k): float(v) for k, v in value.info.items() if isinstance(v, numbers.Real | bool)}
    known = {"reward": float(value.reward), "done": bool(value.done), "info": info}
    fields: dict[str, Any] = plain_value({**vars(value), **known})
    size = len(json.dumps(fields))
    if size > MAX_TURN_BYTES:
        raise ValueError(f"the Turn has {size} bytes, more than {MAX_TURN_BYTES}")
    return fields


def plain_value(value: object, depth: int = 0) -> Any:
    """Return a JSON value with clean texts; TypeError or ValueError for one that not every format encodes."""
    if depth > MAX_DEPTH:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"an integer of {value.bit_length()} bits is too large; it may have 63")
        return int(value)
    if isinstance(value, Mapping):
        return {clean_text(str(key)): plain_value(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(one, depth + 1) for one in value]
    raise TypeError(f"{value!r:.100} is a {type(value).__name__}, which is no JSON value")


def turn_of(fields: dict[str, Any]) -> Turn:
    return Turn(**{**fields, "messages": tuple(fields["messages"]), "tools": tuple(fields["tools"])})


def reply_to_json(reply: Reply) -> dict[str, Any]:
    return {**vars(reply), "tool_calls": [vars(call) for call in reply.tool_calls]}


def reply_of(fields: dict[str, Any]) -> Reply:
    return Reply(**{**fields, "tool_calls": [ToolCall(**call) for call in fields["tool_calls"]]})
