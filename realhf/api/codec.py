"""Conversion between values and plain JSON data (cattrs). Unknown keys are errors."""

import json
from typing import Any, TypeVar

import cattrs
from cattrs.strategies import configure_tagged_union

from realhf.api.program import Instruction

T = TypeVar("T")
_CONVERTER = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
configure_tagged_union(Instruction, _CONVERTER, tag_name="type")


def to_plain(value: Any, type_: Any = None) -> Any:
    """Convert a value to dicts, lists, strings and numbers; ``type_`` is required for members of a union."""
    return _CONVERTER.unstructure(value, type_)


def from_plain(data: Any, type_: type[T]) -> T:
    """Build a value of ``type_``; raises an error for missing and unknown fields and for wrong types."""
    return _CONVERTER.structure(data, type_)


def to_json(value: Any, type_: Any = None) -> str:
    return json.dumps(to_plain(value, type_), indent=1)


def from_json(text: str, type_: type[T]) -> T:
    return from_plain(json.loads(text), type_)
