"""The rules of docs/architecture.md: levels, sizes, and what must not be loaded."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TIMEOUT_S

ROOT = Path(__file__).parents[1]
LEVELS = [
    "base",
    "api",
    "arch",
    "plan",
    "data ops comm rewards environments",
    "models",
    "algorithms",
    "system",
    "launch",
    "experiments",
    "apps",
]
LEVEL_OF = {package: number for number, packages in enumerate(LEVELS) for package in packages.split()}
SIBLINGS = {"algorithms": "models"}  # algorithms use engines through their protocol
TORCH_FREE = ("base", "api", "arch", "plan", "launch", "experiments", "apps")
MAY_TORCH = ("apps/commands/env.py",)  # it reports on torch
PACKAGE = sorted((ROOT / "realhf").rglob("*.py"))
OURS = [f for top in ("realhf", "tests", "examples", "benchmarks") for f in sorted((ROOT / top).rglob("*.py"))]
FORBIDDEN_CALLS = ("torch.load", "torch.save", "pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps")


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file with lazy imports, without TYPE_CHECKING blocks."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            child = ast.Module(child.orelse, [])
        yield child
        yield from nodes(child)


def imports(file: Path) -> Iterator[str]:
    for node in nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(module: str) -> str | None:
    """Return the package of a module of the project, or None."""
    parts = module.split(".")
    return parts[1] if parts[0] == "realhf" and len(parts) > 1 and parts[1] in LEVEL_OF else None


@pytest.mark.parametrize("home", LEVEL_OF)
def test_imports_go_down_the_levels(home: str) -> None:
    for file in (ROOT / "realhf" / home).rglob("*.py"):
        for module in imports(file):
            there = package_of(module)
            allowed = there is None or there == home or LEVEL_OF[there] < LEVEL_OF[home]
            allowed = allowed and (there is None or SIBLINGS.get(home) != there)
            assert allowed, f"{name(file)} imports {module}: {home} is on level {LEVEL_OF[home]}"


def test_every_file_has_a_level() -> None:
    found = {f.relative_to(ROOT / "realhf").parts[0] for f in PACKAGE}
    assert found - {"__init__.py", "__main__.py"} == set(LEVEL_OF)


def test_planning_launching_and_declaring_do_without_torch() -> None:
    for file in PACKAGE:
        inside = file.relative_to(ROOT / "realhf").as_posix()
        if inside.startswith(TORCH_FREE) and inside not in MAY_TORCH:
            assert not [m for m in imports(file) if m.split(".")[0] == "torch"], f"{inside} imports torch"


def loaded_by(code: str) -> set[str]:
    """Return which of the heavy libraries a fresh interpreter has loaded after ``code``."""
    heavy = ("torch", "transformers", "hydra", "omegaconf", "numpy", "rich")
    ask = f"import sys\n{code}\nprint('loaded', *(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_lower_levels_load_without_torch() -> None:
    files = [f for f in PACKAGE if f.relative_to(ROOT / "realhf").parts[0] in ("base", "api", "arch", "plan")]
    modules = [".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files]
    assert not loaded_by("import " + ", ".join(modules)) & {"torch", "transformers"}


def test_checking_a_run_needs_no_torch() -> None:
    assert "torch" not in loaded_by(
        "import realhf.apps.commands.quickstart, realhf.apps.commands.plan, realhf.apps.prepare.preflight"
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["nonsense"]])
def test_the_bare_command_loads_nothing_heavy(words: list[str]) -> None:
    assert loaded_by(f"from realhf.apps.main import run\nrun({words})") == set()


def test_no_file_and_no_function_is_too_long() -> None:
    for file in OURS:
        text = file.read_text()
        assert len(text.splitlines()) <= 400, f"{name(file)} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{name(file)}:{node.lineno}: {node.name} has {length} lines"


def test_no_globals_bare_excepts_or_pickles() -> None:
    package = frozenset(PACKAGE)
    for file in OURS:
        where, is_ours = name(file), file in package
        for node in ast.walk(ast.parse(file.read_text())):
            line = getattr(node, "lineno", 0)
            assert not isinstance(node, ast.Global), f"{where}:{line}: global"
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{where}:{line}: bare except"
            if is_ours and isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in FORBIDDEN_CALLS, f"{where}:{line}: {called}"
        if is_ours:
            assert not {"pickle", "dill", "cloudpickle"} & {m.split(".")[0] for m in imports(file)}, where


def test_class_names_are_unique() -> None:
    seen: dict[str, str] = {}
    for file in PACKAGE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                other = seen.setdefault(node.name, name(file))
                assert other == name(file), f"class {node.name} is in {other} and in {name(file)}"


def test_folders_have_at_most_16_files() -> None:
    for folder in {file.parent for file in PACKAGE}:
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(files) <= 16, f"{name(folder)} has {len(files)} files"
