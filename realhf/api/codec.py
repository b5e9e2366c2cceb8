"""Plain data from values and back (cattrs), as JSON files have it. Unknown keys are errors."""

import json
from typing import Any, TypeVar

import cattrs
from cattrs.strategies import configure_tagged_union

from realhf.api.program import Instruction

T = TypeVar("T")


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    configure_tagged_union(Instruction, converter, tag_name="type")
    return converter


_CONVERTER = _converter()


def to_plain(value: Any, type_: Any = None) -> Any:
    """Return dicts, lists, strings and numbers for a value; ``type_`` is needed for members of a union."""
    return _CONVERTER.unstructure(value, type_)


def from_plain(data: Any, type_: type[T]) -> T:
    """Build a value of ``type_``; raises when a field is missing, unknown or of the wrong kind."""
    return _CONVERTER.structure(data, type_)


def to_json(value: Any, type_: Any = None) -> str:
    return json.dumps(to_plain(value, type_), indent=1)


def from_json(text: str, type_: type[T]) -> T:
    return from_plain(json.loads(text), type_)
