"""Results of ranks as bytes: msgpack of containers, plain values and records; safetensors of tensors."""

import dataclasses
import sys
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

PLAIN = (type(None), bool, int, float, str)
CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict)}


def packed(value: Any) -> bytes:
    """Return the bytes of a value of containers, plain values, records, dtypes and tensors; else ``TypeError``."""
    tensors: dict[str, Tensor] = {}
    tree = _tree(value, tensors)
    return msgspec.msgpack.encode([tree, save(tensors)])


def unpacked(data: bytes) -> Any:
    tree, tensors = msgspec.msgpack.decode(data)
    return _value(tree, load(tensors))


def _tree(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return plain values unchanged, others as [kind, parts]; tensors are collected separately."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.dtype):
        return ["dtype", [str(value).removeprefix("torch.")]]
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
        return ["tensor", [name]]
    kind, parts = type(value).__name__, value
    if dataclasses.is_dataclass(value):
        kind, parts = _name(value), [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, tuple) and type(value) is not tuple:
        kind = _name(value)
    elif type(value) is dict:
        parts = value.items()
    elif kind not in CONTAINERS:
        raise TypeError(f"cannot encode a {type(value).__name__}")
    return [kind, [_tree(part, tensors) for part in parts]]


def _name(record: Any) -> str:
    return f"{type(record).__module__}:{type(record).__qualname__}"


def _value(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if type(tree) in PLAIN:
        return tree
    kind, parts = tree[0], [_value(part, tensors) for part in tree[1]]
    match kind:
        case "tensor":
            return tensors[parts[0]]
        case "dtype":
            return getattr(torch, parts[0])
    if kind in CONTAINERS:
        return CONTAINERS[kind](parts)
    module, _, name = kind.partition(":")
    record = getattr(sys.modules[module], name)  # only records are created, and no module is imported
    assert dataclasses.is_dataclass(record) or issubclass(record, tuple), kind
    return record(*parts)
