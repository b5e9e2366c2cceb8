"""Loads the class of an environment from ``my_file.py:Class`` or ``package.module:Class``."""

import ast
import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from realhf.base.errors import did_you_mean
from realhf.environments.tool_env import as_environment

DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def check_class(name: str) -> list[str]:
    """Return the problems of an ``env.cls``, one line each, without running the file."""
    path, colon, cls = name.rpartition(":")
    if not colon or not cls.isidentifier():
        return [f"env.cls={name!r} must be 'file.py:Class' or 'package.module:Class'"]
    if not path.endswith(".py"):
        found = None
        with contextlib.suppress(ImportError, ValueError):
            found = importlib.util.find_spec(path.partition(".")[0])
        return [] if found else [f"env.cls={name!r}: there is no module '{path}'"]
    if not Path(path).is_file():
        return [f"env.cls={name!r}: no such file: {path}"]
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        return [f"env.cls={name!r}: {path} is not valid Python: {error}"]
    names = {getattr(node, "name", "") for node in ast.walk(tree)}
    names |= {alias.asname or alias.name for node in ast.walk(tree) for alias in getattr(node, "names", [])
              if isinstance(alias, ast.alias)}  # fmt: skip
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return [] if cls in names else [f"env.cls={name!r}: {path} does not define '{cls}'{did_you_mean(cls, names)}"]


def is_async_class(name: str) -> bool:
    """Return whether ``env.cls`` has async methods, or is an agent, without running its file: by its name there."""
    path, _, cls = name.rpartition(":")
    file: str | None = path
    if not path.endswith(".py"):
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(path)
            file = spec.origin if spec else None
    try:
        tree = ast.parse(Path(file or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return _is_async(cls, {node.name: node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)})


def _is_async(name: str, known: dict[str, Any]) -> bool:
    node = known.get(name)
    if not isinstance(node, ast.ClassDef):
        return isinstance(node, ast.AsyncFunctionDef) or name == "AgentEnvironment"
    parents = [getattr(base, "id", getattr(base, "attr", "")) for base in node.bases]
    is_own = any(isinstance(child, ast.AsyncFunctionDef) for child in node.body)
    rest = {key: value for key, value in known.items() if key != name}
    return is_own or any(_is_async(parent, rest) for parent in parents)


def absolute_class(name: str) -> str:
    """Return ``env.cls`` with an absolute path."""
    path, _, cls = name.rpartition(":")
    return f"{Path(path).resolve()}:{cls}" if path.endswith(".py") else name


def load_class(name: str) -> Any:
    """Import a class or factory; one whose methods are tools becomes an environment.

    AttributeError or TypeError if it is none.
    """
    path, _, attribute = name.rpartition(":")
    if path.endswith(".py"):
        sys.path.insert(0, str(Path(path).parent))  # the file may import its neighbours
        spec = importlib.util.spec_from_file_location("realhf_environment", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    found = vars(module).get(attribute)
    if found is None:
        raise AttributeError(f"{path} has no class '{attribute}'{did_you_mean(attribute, vars(module))}")
    return as_environment(found)
