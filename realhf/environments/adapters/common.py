"""What the adapters share: errors of optional imports, and turns of plain observations."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from realhf.base.errors import UserError
from realhf.environments.types import Turn


@contextlib.contextmanager
def optional_library(module: str, extra: str, cls: str) -> Iterator[None]:
    """Report a library that the statements inside cannot import; UserError with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise  # a package that the library itself needs
        package = module.replace("_", "-")
        raise UserError(f"env.cls=...:{cls} needs the package {package}: pip install 'realhf[{extra}]'") from error


def observation_turn(
    text: str, chat: bool = True, reward: float = 0.0, info: Mapping[str, float] | None = None
) -> Turn:
    """Return a turn that shows ``text`` as a user's message, or as text to append."""
    if chat:
        return Turn(messages=({"role": "user", "content": text},), reward=reward, info=dict(info or {}))
    return Turn(text=text, reward=reward, info=dict(info or {}))


def final_turn(text: str, chat: bool, reward: float, info: Mapping[str, float] | None = None) -> Turn:
    """Return the last turn of an episode."""
    turn = observation_turn(text, chat) if text else Turn()
    return Turn(messages=turn.messages, text=turn.text, reward=reward, done=True, info=dict(info or {}))


def row_number(row: Mapping[str, Any], seed: int) -> int:
    """Return the integer ``index`` of a row, or the seed; UserError for an index that is none."""
    index = row.get("index", seed)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise UserError(f"'index' of a row is {index!r:.100}; it must be an integer >= 0")
    return index
