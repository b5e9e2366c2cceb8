"""Tools from Python functions: JSON schemas of parameters, and checks of a model's arguments. Imports no torch."""

import inspect
import json
import math
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from realhf.base.errors import did_you_mean

Json = dict[str, Any]
SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
NAMES = {str: "a text", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object"}
SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*")
ENTRY = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?:\s*(.*)")
INTEGER = re.compile(r"\s*[+-]?\d{1,4000}\s*")
MAX_SHOWN = 60
"""Characters of a value in a message."""


class InvalidArgument(ValueError):
    """An argument of a tool call does not fit; the message is for the model."""


@dataclass(frozen=True)
class ToolFunction:
    """A tool: ``schema`` is a function in OpenAI's format; ``hints`` are the types of its parameters."""

    name: str
    schema: Json
    hints: Json
    required: tuple[str, ...]
    is_async: bool

    def bind(self, arguments: Json) -> Json:
        """Return the arguments converted to the types of the parameters; InvalidArgument if they do not fit."""
        for name in arguments:
            if name not in self.hints:
                known = ", ".join(self.hints) or "none"
                raise InvalidArgument(
                    f"{self.name} has no argument {name!r}{did_you_mean(name, self.hints)}; its arguments are: {known}"
                )
        if missing := [name for name in self.required if name not in arguments]:
            raise InvalidArgument(f"{self.name} needs the argument {missing[0]!r}")
        return {key: convert(value, self.hints[key], f"argument {key!r}") for key, value in arguments.items()}


def tool_function(function: Callable[..., Any], is_method: bool = False) -> ToolFunction:
    """Return the tool of a function; TypeError if it has no docstring, or a parameter without a supported type."""
    name = function.__name__
    doc, descriptions = parse_docstring(inspect.getdoc(function) or "")
    if not doc:
        raise TypeError(f"tool {name} has no docstring; it is the description for the model")
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    properties: dict[str, Json] = {}
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise TypeError(f"tool {name}: the parameter {one} must have a name and be usable as a keyword")
        if one.name not in hints:
            raise TypeError(f"tool {name}: the parameter '{one.name}' has no type hint")
        described = {"description": descriptions[one.name]} if one.name in descriptions else {}
        properties[one.name] = {**schema_of(hints[one.name], f"tool {name}, parameter '{one.name}'"), **described}
    required = [one.name for one in parameters if one.default is one.empty]
    fields: Json = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    schema = {"type": "function", "function": {"name": name, "description": doc, "parameters": fields}}
    types_of = {one.name: hints[one.name] for one in parameters}
    return ToolFunction(name, schema, types_of, tuple(required), inspect.iscoroutinefunction(function))


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the description of a Google-style docstring, and those of its parameters."""
    lines = doc.splitlines()
    sections = [number for number, line in enumerate(lines) if SECTION.fullmatch(line)] + [len(lines)]
    found: dict[str, str] = {}
    for first, last in zip(sections, sections[1:], strict=False):
        if not lines[first].startswith(("Args:", "Arguments:", "Parameters:")):
            continue
        body = [line for line in lines[first + 1 : last] if line.strip()]
        indent = len(body[0]) - len(body[0].lstrip()) if body else 0
        name = ""
        for line in body:
            entry = ENTRY.fullmatch(line.strip()) if len(line) - len(line.lstrip()) <= indent else None
            if entry:
                name = entry[1]
                found[name] = entry[2].strip()
            elif name:
                found[name] = f"{found[name]} {line.strip()}".strip()
    return "\n".join(lines[: sections[0]]).strip(), found


def schema_of(hint: Any, where: str = "hint") -> Json:
    """Return the JSON schema of a type; TypeError for one that JSON does not have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return _enum_schema([member.value for member in hint], where)
    if origin is Literal:
        return _enum_schema(list(arguments), where)
    if origin in (Union, types.UnionType):
        return _union_schema(arguments, where)
    if hint is list or origin is list:
        return {"type": "array", **({"items": schema_of(arguments[0], where)} if arguments else {})}
    if origin is tuple and arguments and ... not in arguments:
        return {"type": "array", "prefixItems": [schema_of(one, where) for one in arguments]}
    if hint is dict or (origin is dict and arguments[0] is str):
        return {"type": "object", **({"additionalProperties": schema_of(arguments[1], where)} if arguments else {})}
    raise TypeError(f"{where}: the type {hint} cannot be the type of a tool's parameter")


def _enum_schema(values: list[Any], where: str) -> Json:
    if not values or any(type(value) not in SCALARS for value in values):
        raise TypeError(f"{where}: the values {values} must be texts, numbers, booleans or None")
    kinds = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union_schema(members: tuple[Any, ...], where: str) -> Json:
    """Return the schema in the form that chat templates know: ``nullable``, a list of types, or ``anyOf``."""
    schemas = [schema_of(member, where) for member in members if member is not type(None)]
    nullable = {"nullable": True} if type(None) in members else {}
    if len(schemas) == 1:
        return {**schemas[0], **nullable}
    if all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        return {"type": sorted({schema["type"] for schema in schemas}), **nullable}
    return {"anyOf": schemas, **nullable}


def convert(value: Any, hint: Any, where: str, strict: bool = False) -> Any:
    """Return a value converted to a type; InvalidArgument if that is not possible.

    Texts become numbers, booleans, lists and objects, and numbers become texts. With ``strict`` they do not.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments, where, strict)
    if origin is Literal:
        return _choice(value, {one: one for one in arguments}, where, strict)
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return _choice(value, {member.value: member for member in hint}, where, strict)
    if origin in (list, tuple, dict) or hint in (list, dict):
        return _convert_container(value, hint, where, strict)
    if hint is type(None):
        if value is None or (not strict and value in ("null", "None")):
            return None
        raise InvalidArgument(f"{where} must be null, not {_shown(value)}")
    return _convert_scalar(value, hint, where, strict)


def _convert_scalar(value: Any, hint: Any, where: str, strict: bool) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number and _is_finite(value):
        return float(value)
    if type(value) is hint and hint is not float:
        return value
    if not strict:
        if hint is str and is_number:
            return str(value)
        if hint is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if hint is int and isinstance(value, str) and INTEGER.fullmatch(value):
            return int(value)
        if hint is float and isinstance(value, str) and (number := _number(value)) is not None:
            return number
        if hint is bool and isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
    raise InvalidArgument(f"{where} must be {NAMES[hint]}, not {_shown(value)}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of an integer
        return False


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _convert_container(value: Any, hint: Any, where: str, strict: bool) -> Any:
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    form = dict if kind is dict else list
    if isinstance(value, str) and not strict:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidArgument(f"{where} must be {NAMES[form]}, not {_shown(value)}") from None
    if isinstance(value, tuple) and form is list:
        value = list(value)
    if not isinstance(value, form):
        raise InvalidArgument(f"{where} must be {NAMES[form]}, not {_shown(value)}")
    if not arguments:
        return value
    if isinstance(value, dict):
        return {key: convert(one, arguments[1], f"{where}, key {key!r}", strict) for key, one in value.items()}
    if kind is tuple:
        if len(value) != len(arguments):
            raise InvalidArgument(f"{where} must have {len(arguments)} values, not {len(value)}")
        pairs = enumerate(zip(value, arguments, strict=True))
        return tuple(convert(one, member, f"{where}, value {i + 1}", strict) for i, (one, member) in pairs)
    return [convert(one, arguments[0], f"{where}, value {i + 1}", strict) for i, one in enumerate(value)]


def _convert_union(value: Any, members: tuple[Any, ...], where: str, strict: bool) -> Any:
    """Return the value as the first type that it has, else as the first type that it can be converted to."""
    problems = list[str]()
    for is_strict in (True,) if strict else (True, False):
        for member in members:
            try:
                return convert(value, member, where, is_strict)
            except InvalidArgument as problem:
                problems.append(str(problem))
    others = [one for one in members if one is not type(None)]
    if len(others) == 1:
        raise InvalidArgument(problems[-len(members) + members.index(others[0])])
    kinds = " or ".join(NAMES.get(get_origin(one) or one, str(one)) for one in others)
    raise InvalidArgument(f"{where} must be {kinds}, not {_shown(value)}")


def _choice(value: Any, choices: dict[Any, Any], where: str, strict: bool) -> Any:
    for key, choice in choices.items():
        if type(key) is type(value) and key == value:
            return choice
    for key, choice in choices.items():
        if not strict and isinstance(value, str) and value in (str(key), getattr(choice, "name", None)):
            return choice
    known = ", ".join(json.dumps(key) for key in choices)
    raise InvalidArgument(f"{where} must be one of {known}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = json.dumps(text[:MAX_SHOWN] + "..." if len(text) > MAX_SHOWN else text, ensure_ascii=False)
    return text if isinstance(value, str) else text[1:-1]
