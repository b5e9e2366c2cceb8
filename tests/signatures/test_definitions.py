"""Definitions are found in sources without importing them, and agree with the installed packages."""

import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.signatures.definitions import Definitions
from tests.signatures.record import read_records

SOURCES = {
    "pkg/__init__.py": """
from typing import TYPE_CHECKING
from ._impl import plain, Thing as Renamed
from .star import *
from . import sub
if TYPE_CHECKING:
    from pkg.builtins import native
wrapped = decorate(native_linear)
tool = _Tool()
alias = sub.deep
class _Tool:
    def run(self, path, *, force=False): ...
""",
    "pkg/__init__.pyi": "def wrapped(a, b=None): ...",
    "pkg/_impl.py": """
def plain(a, /, b, c=1, *args, d, e=2, **rest): ...
class Base:
    def __init__(self, x, y=0): self.attribute = x
    @staticmethod
    def helper(z): ...
class Thing(Base):
    def method(self, q): ...
""",
    "pkg/star.py": """
from dataclasses import dataclass, field
import other
@dataclass
class Parent:
    first: int
    hidden: int = field(init=False, default=0)
@dataclass(frozen=True)
class Options(Parent):
    second: list = field(default_factory=list)
    third: int = field(metadata={})
    constant: ClassVar[int] = 1
@overload
def many(a: int): ...
@overload
def many(a: int, b: int): ...
def many(*args): ...
Foreign = other.Foreign
""",
    "pkg/builtins.pyi": "@overload\ndef native(a): ...\n@overload\ndef native(a, *, out=...): ...",
    "pkg/sub/__init__.py": "from .module import deep",
    "pkg/sub/module.py": "def deep(n): ...",
}
KINDS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("pkg.plain", ["a, /, b, c=, *args, d, e=, **rest"]),
        ("pkg.Renamed", ["x, y="]),
        ("pkg.Renamed.method", ["q"]),
        ("pkg.Renamed.helper", ["z"]),
        ("pkg.Renamed.attribute", []),
        ("pkg.Renamed.missing", None),
        ("pkg.Options", ["first, second=, third"]),
        ("pkg.many", ["*args"]),
        ("pkg.native", ["a", "a, *, out="]),
        ("pkg.wrapped", ["a, b="]),
        ("pkg.tool", []),
        ("pkg.tool.run", ["path, *, force="]),
        ("pkg.alias", ["n"]),
        ("pkg.sub.deep", ["n"]),
        ("pkg.sub.module.deep", ["n"]),
        ("pkg.Foreign", []),
        ("pkg.missing", None),
        ("absent.name", None),
        ("pkg.sub.missing", None),
    ],
)
def test_a_name_is_followed_to_its_definition(name: str, expected: list[str] | None) -> None:
    def reader(text: str) -> Callable[[], str]:
        return lambda: text

    definitions = Definitions({path: reader(text) for path, text in SOURCES.items()})
    assert definitions.signatures(name) == expected


def parameters(function: Any, n_bound: int) -> list[tuple[str, bool]]:
    """Return the names of parameters, and whether they have a default."""
    found = list(inspect.signature(function).parameters.values())[n_bound:]
    return [(KINDS.get(one.kind, "") + one.name, one.default is not one.empty) for one in found]


def recorded(signature: str) -> list[tuple[str, bool]]:
    words = [one for one in signature.split(", ") if one not in ("*", "/", "")]
    return [(one.removesuffix("="), one.endswith("=")) for one in words]


def test_the_record_agrees_with_the_installed_torch() -> None:
    """Compares functions and classes written in Python; others have no signature at run time."""
    version = Version(torch.__version__).base_version
    record = read_records()["torch"].get(version)
    if record is None:
        pytest.skip(f"torch {version} is not recorded")
    n_compared = 0
    for name, signatures in record.items():
        owner, _, last = name.rpartition(".")
        function = getattr(resolve_name(owner), last) if signatures else None
        constructor = vars(function).get("__init__") if inspect.isclass(function) else function
        if signatures and inspect.isfunction(constructor):
            n_bound = int(inspect.isclass(resolve_name(owner)))
            assert parameters(function, n_bound) in [recorded(one) for one in signatures], name
            n_compared += 1
    assert n_compared >= 50
