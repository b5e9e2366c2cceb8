"""Declaration of options with help texts."""

from dataclasses import field
from typing import Any


def opt(default: Any, text: str) -> Any:
    """Return a dataclass field with a default (or a factory of it) and the text that ``--help`` shows."""
    if callable(default):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})
