"""Plain data from values and back (cattrs): JSON files and msgpack messages share it. Unknown keys are errors.

What a master of many workers writes and reads most has hooks of its own: tuples that are plain already stay, holders,
which many rows share, make a table, and a reply tells only what there is to tell.
"""

import json
from functools import partial
from operator import eq
from typing import Any, TypeVar

import cattrs
from cattrs.gen import make_dict_unstructure_fn
from cattrs.strategies import configure_tagged_union

from realhf.api.batch import RowId
from realhf.api.messages import Done, Holders, SpanTuple, ToMaster, ToWorker
from realhf.api.program import Instruction

T = TypeVar("T")


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    for plain in (tuple[int, ...], tuple[RowId, ...], tuple[SpanTuple, ...]):
        converter.register_unstructure_hook_func(partial(eq, plain), _as_it_is)
    for kind, hook in ((tuple[int, ...], _numbers), (tuple[RowId, ...], _ids), (tuple[SpanTuple, ...], _spans)):
        converter.register_structure_hook_func(partial(eq, kind), hook)
    converter.register_unstructure_hook_func(partial(eq, Holders), _table)
    converter.register_structure_hook_func(partial(eq, Holders), _holders)
    converter.register_unstructure_hook(Done, make_dict_unstructure_fn(Done, converter, _cattrs_omit_if_default=True))
    for union in (Instruction, ToWorker, ToMaster):
        configure_tagged_union(union, converter, tag_name="type")
    return converter


def _as_it_is(value: Any) -> Any:
    return value


def _numbers(value: Any, type_: object) -> tuple[int, ...]:
    return tuple(map(int, value))


def _ids(value: Any, type_: object) -> tuple[RowId, ...]:
    return tuple([RowId(int(prompt), int(sample)) for prompt, sample in value])


def _spans(value: Any, type_: object) -> tuple[SpanTuple, ...]:
    return tuple([(str(name), int(start), int(duration)) for name, start, duration in value])


def _table(holders: Holders) -> dict[str, Any]:
    """Return the tuples of workers that are shared once, and for every row which of them it has."""
    shared = {id(ranks): ranks for at in holders.values() for ranks in at}
    number = {name: i for i, name in enumerate(shared)}
    rows = {key: [number[name] for name in map(id, at)] for key, at in holders.items()}
    return {"ranks": list(shared.values()), "rows": rows}


def _holders(value: Any, type_: object) -> Holders:
    table = [tuple(map(int, ranks)) for ranks in value["ranks"]]
    if any(number < 0 for at in value["rows"].values() for number in at):
        raise ValueError("a row whose holders have a negative number")
    return {str(key): tuple([table[number] for number in at]) for key, at in value["rows"].items()}


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
