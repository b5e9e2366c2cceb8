"""The helper that declares an option with its default and its ``--help`` line."""

from dataclasses import field
from typing import Any


def opt(default: Any, text: str) -> Any:
    """A field with a default and the line that ``--help`` shows."""
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})
