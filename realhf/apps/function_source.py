"""The source of a function as a file that other processes can load: functions of scripts and notebooks as rewards.

Functions are not pickled. The file contains the function and what it uses of its module, recursively: imports,
functions, classes, constants. The rest of a script or notebook is not run again.
"""

import __future__

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from realhf.base.errors import UserError

Parts = dict[str, tuple[Any, str]]
"""By the name of a global variable: its value and definition, in the order of definition."""

ADVICE = "or put it into a file and pass its name, 'file.py:function'"


def reference(function: Callable) -> str | None:
    """Return ``file.py:name`` for a function at the top of a file that other processes may load, else None.

    Modules of packages need their package, and files that are run as scripts would be run again.
    """
    module = sys.modules.get(getattr(function, "__module__", ""))
    name, path = getattr(function, "__name__", ""), getattr(module, "__file__", None) or ""
    if module is None or module.__name__ == "__main__" or module.__package__ or not path.endswith(".py"):
        return None
    return f"{Path(path).resolve()}:{name}" if vars(module).get(name) is function else None


def module_source(function: Callable) -> str:
    """Return the text of a module that defines ``function``; ``UserError`` if it uses what has no source."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType) or not inner.__name__.isidentifier():
        raise UserError(f"{function!r:.80} must be a function defined by 'def', {ADVICE}")
    if inner.__closure__:
        names = ", ".join(inner.__code__.co_freevars)
        raise UserError(f"{function.__name__} uses variables of an enclosing function ({names}): {ADVICE}")
    parts: Parts = {}
    _define(function.__name__, function, parts, function.__name__)
    return "\n\n".join([*_future_imports(inner), *(text for _, text in parts.values())]) + "\n"


def _future_imports(function: FunctionType) -> Iterator[str]:
    for name in __future__.all_feature_names:
        if function.__code__.co_flags & getattr(__future__, name).compiler_flag:
            yield f"from __future__ import {name}"


def _define(name: str, value: Any, parts: Parts, user: str) -> None:
    """Add the definition of a global variable after everything that it needs, unless it is there."""
    if name in parts:
        if parts[name][0] is not value:
            raise UserError(f"{user} uses two variables of the name {name}: rename one, {ADVICE}")
    elif isinstance(value, ModuleType):
        parts[name] = value, f"import {value.__name__} as {name}"
    elif (definition := _constant(value)) is not None:
        parts[name] = value, f"{name} = {definition}"
    elif _is_importable(value):
        parts[name] = value, f"from {value.__module__} import {value.__qualname__} as {name}"
    elif isinstance(value, FunctionType | type) or hasattr(value, "__wrapped__"):
        _copy(name, value, parts)
    else:
        raise UserError(f"{user} uses the variable {name} of type {type(value).__name__}, which has no source: "
                        f"create it in the function, {ADVICE}")  # fmt: skip


def _is_importable(value: Any) -> bool:
    """Return True for a function or class that other processes find under its name."""
    module = getattr(value, "__module__", None)
    return (
        module in sys.modules
        and module != "__main__"
        and vars(sys.modules[module]).get(getattr(value, "__qualname__", "")) is value
    )


def _copy(name: str, value: Any, parts: Parts) -> None:
    """Add the source of a function or class, and what it uses."""
    inner = inspect.unwrap(value)
    try:
        source = textwrap.dedent(inspect.getsource(inner)).rstrip()
    except (OSError, TypeError) as error:
        raise UserError(f"{name} has no source ({error}): define it in a file or a cell, {ADVICE}") from error
    parts[name] = value, ""  # ends the recursion of functions that use each other
    variables = inner.__globals__ if isinstance(inner, FunctionType) else vars(sys.modules[inner.__module__])
    for used in _names(ast.parse(source)):
        if used in variables and (used == "__file__" or not used.startswith("__")):
            _define(used, variables[used], parts, name)
    del parts[name]
    parts[name] = value, source + ("" if name == inner.__name__ else f"\n\n{name} = {inner.__name__}")


def _names(tree: ast.AST) -> list[str]:
    """Return the names that a definition may read, in order."""
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def _constant(value: Any) -> str | None:
    """Return an expression for a constant, or None: literals of Python, infinity, compiled regular expressions."""
    if isinstance(value, re.Pattern):
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    if isinstance(value, float):
        return f"float({str(value)!r})"
    try:
        return repr(value) if ast.literal_eval(repr(value)) == value else None
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
