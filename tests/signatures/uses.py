"""Names of other packages that Python files use, and the arguments of the calls."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.signatures.definitions import dotted

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call; more may follow after unpacking or in a partial call."""

    n_positional: int
    keywords: tuple[str, ...] = ()
    more_positional: bool = False
    more_keywords: bool = False

    def __str__(self) -> str:
        words = ["_"] * self.n_positional + ["*..."] * self.more_positional
        words += [f"{keyword}=" for keyword in self.keywords] + ["**..."] * self.more_keywords
        return f"({', '.join(words)})"


@dataclass(frozen=True)
class Use:
    """A dotted name in a file, with the arguments if it is called."""

    where: str
    name: str
    arguments: Arguments | None = None


def uses_in(file: Path, packages: Iterable[str], objects: Mapping[str, str] | None = None) -> Iterator[Use]:
    """Yield the uses of packages in a file. ``objects`` has classes of expressions, ``{"self.llm": "vllm.LLM"}``."""
    tree = ast.parse(file.read_text())
    names = {**imported(tree, frozenset(packages)), **(objects or {})}
    where = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
    calls = calls_in(tree)
    for node, name in named_nodes(tree, names):
        yield Use(f"{where}:{node.lineno}", name, calls.get(node))


def named_nodes(node: ast.AST, names: Mapping[str, str]) -> Iterator[tuple[ast.expr, str]]:
    """Yield the longest expressions with a known dotted name: of imported names, and of parameters by their class."""
    if isinstance(node, ast.Name | ast.Attribute) and (name := full_name(node, names)):
        yield node, name
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        names = {**names, **classes_of(parameters_in(node.args), names)}
    elif isinstance(node, ast.ClassDef):
        fields = [(one.target, one.annotation) for one in node.body if isinstance(one, ast.AnnAssign)]
        own = {f"self.{dotted(target)}": annotation for target, annotation in fields}
        names = {**names, **{target: name for target, name in classes_of(own, names).items() if name}}
    for child in ast.iter_child_nodes(node):
        yield from named_nodes(child, names)


def parameters_in(args: ast.arguments) -> dict[str, ast.expr | None]:
    """Return the annotations of parameters; those of ``*args`` and ``**kwargs`` are not the class of their value."""
    named = {one.arg: one.annotation for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    return named | {one.arg: None for one in (args.vararg, args.kwarg) if one}


def classes_of(annotations: Mapping[str, ast.expr | None], names: Mapping[str, str]) -> dict[str, str]:
    """Return the dotted names of annotations, also of ``X | None``. Other annotations hide a name: ""."""
    found = {}
    for variable, annotation in annotations.items():
        if isinstance(annotation, ast.BinOp) and ast.unparse(annotation.right) == "None":
            annotation = annotation.left
        found[variable] = full_name(annotation, names) if annotation else ""
    return found


def imported(tree: ast.AST, packages: frozenset[str]) -> dict[str, str]:
    """Return the dotted names of imported names."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (top := alias.name.split(".")[0]) in packages:
                    names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in packages:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def full_name(node: ast.expr, names: Mapping[str, str]) -> str:
    """Return the dotted name of an expression whose longest known prefix is in ``names``, or an empty string."""
    parts = dotted(node).split(".")
    for size in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:size])) in names:
            return ".".join([names[prefix], *parts[size:]]) if names[prefix] else ""
    return ""


def calls_in(tree: ast.AST) -> dict[ast.AST, Arguments]:
    """Return the arguments of calls by the called expression, also of ``partial(function, ...)``."""
    calls: dict[ast.AST, Arguments] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls[node.func] = arguments_of(node.args, node.keywords)
            if dotted(node.func).split(".")[-1] == "partial" and node.args:
                given = arguments_of(node.args[1:], node.keywords)
                calls[node.args[0]] = Arguments(given.n_positional, given.keywords, True, True)
    return calls


def arguments_of(args: list[ast.expr], keywords: list[ast.keyword]) -> Arguments:
    return Arguments(
        sum(not isinstance(one, ast.Starred) for one in args),
        tuple(one.arg for one in keywords if one.arg),
        any(isinstance(one, ast.Starred) for one in args),
        any(one.arg is None for one in keywords),
    )
