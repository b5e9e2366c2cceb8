"""Dependencies are declared, used, bounded and pinned; no data is unpickled; results of audits."""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from itertools import chain, product
from pathlib import Path

import pytest
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from realhf.ops import varlen
from tests.audit import verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ("test", "dev", "docs")  # extras that the package itself does not import
ELSEWHERE = {"vllm", "flash_attn_interface"}  # of the interpreter of `make vllm`; built from source
OURS = ("realhf", "tests", "examples", "benchmarks", "experiments", "docs")
UNPICKLING = re.compile(r"(pickle|dill|cloudpickle|marshal|joblib)\.(load|loads|Unpickler)|shelve\.open|"
                        r"pandas\.read_pickle|yaml\.(unsafe_load|full_load|unsafe_load_all|full_load_all)|"
                        r"(.+\.)?((all_gather|gather|broadcast|scatter|send|recv)_object(_list)?|recv_pyobj)|"
                        r"(multiprocessing|mp)\.(.+\.)?(\w*Queue|\w*Manager|Listener|Client)")  # fmt: skip


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = {canonicalize_name(r.name): r for r in map(Requirement, lines)}
    return {name: r for name, r in found.items() if name != PROJECT["name"]}


EXTRAS = {name: requirements(lines) for name, lines in PROJECT["optional-dependencies"].items()}
RUNTIME = requirements(PROJECT["dependencies"]) | {
    name: r for extra, found in EXTRAS.items() if extra not in TOOLS for name, r in found.items()
}
DECLARED = RUNTIME | {name: r for extra in TOOLS for name, r in EXTRAS[extra].items()}
PINS = requirements(re.sub(r"#.*", "", (ROOT / "constraints.txt").read_text()).split())


def trees(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for file in chain.from_iterable(sorted((ROOT / folder).rglob("*.py")) for folder in folders):
        yield file.relative_to(ROOT).as_posix(), ast.parse(file.read_text())


def imported() -> dict[str, str]:
    """Return the third-party modules that realhf imports, each with an importing file."""
    found: dict[str, str] = {}
    for file, tree in trees("realhf"):
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.split(".")[0]: file for name in names}
    found |= {module.split(".")[0]: "realhf/ops/varlen.py" for module, *_ in varlen.SOURCES}  # by their names
    ours = {"realhf", *ELSEWHERE, *sys.stdlib_module_names}
    return {name: file for name, file in found.items() if name not in ours}


def distributions() -> dict[str, str]:
    """Return the distribution of every module that realhf imports; one that is not installed has the module's name."""
    known = packages_distributions()
    return {name: canonicalize_name(known.get(name, [name])[0]) for name in imported()}


def test_what_is_imported_is_declared() -> None:
    files = imported()
    assert {name: files[name] for name, owner in distributions().items() if owner not in RUNTIME} == {}


def test_no_extra_replaces_the_torch_of_the_environment() -> None:
    """Every vllm pins one version of torch."""
    assert not ELSEWHERE & set(DECLARED)


def test_what_is_declared_is_imported() -> None:
    assert not set(RUNTIME) - set(distributions().values())


def test_every_dependency_has_a_lower_bound_and_a_pin_that_keeps_it() -> None:
    for name, wanted in DECLARED.items():
        assert any(bound.operator in (">=", "==") for bound in wanted.specifier), f"{wanted}: which version is needed?"
        (pin,) = PINS[name].specifier
        assert pin.operator == "==" and wanted.specifier.contains(pin.version), f"{PINS[name]} is not {wanted}"
    assert set(PINS) <= set(DECLARED), "what is pinned is declared"


def loads_objects(call: ast.Call) -> bool:
    """Return whether a call may execute code from data."""
    name, options = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
    match name:
        case "torch.load":
            return options.get("weights_only") != "True"
        case "np.load" | "numpy.load":
            return options.get("allow_pickle", "False") != "False"
        case "yaml.load" | "yaml.load_all":
            return not any(
                "SafeLoader" in ast.unparse(value) for value in (*call.args, *(k.value for k in call.keywords))
            )
    if name.endswith(".recv"):
        return not call.args  # of a multiprocessing.Connection; that of a socket has a size
    return bool(UNPICKLING.fullmatch(name))


def test_nothing_is_unpickled_anywhere() -> None:
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, tree in trees(*OURS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and loads_objects(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "unsafe"),
    [
        ("pickle.loads(x)", True),
        ("torch.load(f)", True),
        ("torch.load(f, weights_only=False)", True),
        ("torch.load(f, weights_only=True)", False),
        ("yaml.load(f)", True),
        ("yaml.load(f, yaml.Loader)", True),
        ("yaml.load(f, Loader=yaml.CSafeLoader)", False),
        ("yaml.safe_load(f)", False),
        ("np.load(f, allow_pickle=True)", True),
        ("np.load(f)", False),
        ("json.loads(x)", False),
        ("connection.recv()", True),
        ("connection.recv_bytes()", False),
        ("sock.recv(4)", False),
        ("channel.recv_pyobj()", True),
        ("multiprocessing.Queue()", True),
        ("multiprocessing.Process(target=f)", False),
        ("queue.SimpleQueue()", False),
    ],
)
def test_which_calls_those_are(text: str, unsafe: bool) -> None:
    (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert loads_objects(call) is unsafe


def test_every_collective_of_torch_that_unpickles_is_found() -> None:
    functions = [(name, getattr(dist, name)) for name in dir(dist) if inspect.isfunction(getattr(dist, name))]
    unpickling = [name for name, function in functions if "_tensor_to_object(" in inspect.getsource(function)]
    assert "all_gather_object" in unpickling and "broadcast_object_list" in unpickling
    for name, prefix in product(unpickling, ("dist.", "torch.distributed.", "")):
        (call,) = (node for node in ast.walk(ast.parse(f"{prefix}{name}(x, y)")) if isinstance(node, ast.Call))
        assert loads_objects(call), name


HOLE = {
    "name": "b",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}, {"id": "X", "fix_versions": []}],
}
CLEAN, UNKNOWN = {"name": "a", "version": "1", "vulns": []}, {"name": "c", "skip_reason": "unknown package"}


@pytest.mark.parametrize(
    ("pins", "code", "lines"),
    [
        ([CLEAN], 0, ["1 pinned versions were asked for, 0 vulnerabilities are known"]),
        ([CLEAN, HOLE], 1, ["2 pinned versions were asked for, 2 vulnerabilities are known",
                            "b 2: PYSEC-1, fixed in 3", "b 2: X, fixed in no version"]),
        ([CLEAN, UNKNOWN], 0, ["1 pinned versions were asked for, 0 vulnerabilities are known",
                               "NOT AUDITED, the database does not know them: c"]),
    ],
)  # fmt: skip
def test_what_an_audit_says(pins: list[dict], code: int, lines: list[str]) -> None:
    assert verdict(json.dumps({"dependencies": pins}), "") == (code, "\n".join(lines))


def test_an_audit_that_could_not_ask_says_so() -> None:
    code, text = verdict("", "Traceback: long\nConnectionError: no such host\n")
    assert code == 0 and text.startswith("NOT AUDITED") and text.endswith("ConnectionError: no such host")
