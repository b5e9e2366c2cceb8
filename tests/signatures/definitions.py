"""Definitions of names in Python sources, found without running them."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.signatures.archives import Sources
from tests.signatures.parameters import dataclass_parameters, is_dataclass, parameters_of

ANY = "*args, **kwargs"
BLOCKS = (ast.If, ast.Try, ast.With)
STRUCTURAL_BASES = ("object", "Generic", "Protocol", "ABC", "Struct")
"""Base classes without constructor arguments of their own."""


@dataclass(frozen=True)
class Module:
    name: str


@dataclass(frozen=True)
class Function:
    nodes: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    is_method: bool = False


@dataclass(frozen=True)
class Class:
    module: str
    node: ast.ClassDef


@dataclass(frozen=True)
class Instance:
    """A variable whose class is known."""

    owner: Class


@dataclass(frozen=True)
class Value:
    """Another variable, or a name of another package. Its attributes are unknown."""


Known = Module | Function | Class | Instance
Definition = Known | Value


class Scope:
    """The names that a module or a class binds, in order, and the modules it imports all names of."""

    def __init__(self, module: str, is_package: bool, body: list[ast.stmt]) -> None:
        self.module = module
        self.package = module if is_package else module.rpartition(".")[0]
        self.names: dict[str, list[ast.stmt | str]] = defaultdict(list)
        self.stars: list[str] = []
        for statement in body:
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.names[statement.name].append(statement)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            self._add_import(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self.names[target.id].append(statement)
        elif isinstance(statement, BLOCKS):
            for child in ast.iter_child_nodes(statement):
                for inner in child.body if isinstance(child, ast.ExceptHandler) else [child]:
                    if isinstance(inner, ast.stmt):
                        self._add(inner)

    def _add_import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.split(".")[0]
                self.names[alias.asname or top].append(alias.name if alias.asname else top)
            return
        parts = self.package.split(".")
        base = parts[: len(parts) - statement.level + 1] if statement.level else []
        source = ".".join([*base, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                self.names[alias.asname or alias.name].append(f"{source}.{alias.name}")


class Definitions:
    """The definitions of one release."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._scopes: dict[str, Scope] = {}

    @cached_property
    def packages(self) -> frozenset[str]:
        return frozenset(path.split("/")[0].split(".")[0] for path in self.sources)

    def signatures(self, name: str) -> list[str] | None:
        """Return the signatures of a dotted name, [] if it has none to check, None if the release has no such name."""
        if name.split(".")[0] not in self.packages:
            return None
        match self.find(name):
            case None:
                return None
            case Function(nodes, is_method):
                return unique(parameters_of(node, is_method) for node in selected(nodes))
            case Class() as found:
                return unique(self._constructor(found))
            case _:
                return []

    def find(self, name: str, seen: frozenset[str] = frozenset()) -> Definition | None:
        """Return the definition of a dotted name."""
        if name in seen:
            return None
        parts = name.split(".")
        if parts[0] not in self.packages:
            return Value()
        for size in range(len(parts), 0, -1):
            module = ".".join(parts[:size])
            if self._files(module):
                break
        else:
            return None
        found: Definition | None = Module(module)
        for part in parts[size:]:
            found = self._member(found, part, seen | {name}) if found else None
        return found

    def _files(self, module: str) -> list[str]:
        """Return the files of a module: the source before the stubs."""
        path = module.replace(".", "/")
        return [file for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi")
                if file in self.sources]  # fmt: skip

    def _scope(self, module: str, file: str) -> Scope:
        if file not in self._scopes:
            body = ast.parse(self.sources[file]()).body
            self._scopes[file] = Scope(module, "/__init__.py" in file, body)
        return self._scopes[file]

    def _member(self, owner: Definition, name: str, seen: frozenset[str]) -> Definition | None:
        if isinstance(owner, Module):
            return self._in_module(owner.name, name, seen)
        if isinstance(owner, Class | Instance):
            for one in self._mro(owner if isinstance(owner, Class) else owner.owner, seen):
                scope = Scope(one.module, False, one.node.body)
                if (found := self._bound(scope, name, seen)) is not None:
                    return Function(found.nodes, is_method=True) if isinstance(found, Function) else found
                if name in instance_attributes(one.node):
                    return Value()
            return None
        return Value()

    def _in_module(self, module: str, name: str, seen: frozenset[str]) -> Definition | None:
        """Return what a module binds to a name: a variable only if there is nothing else, also in stubs."""
        found: Definition | None = None
        for file in self._files(module):
            scope = self._scope(module, file)
            bound = self._bound(scope, name, seen)
            if isinstance(bound, Known):
                return bound
            found = found or bound
        for file in self._files(module):
            for source in self._scope(module, file).stars:
                bound = self.find(f"{source}.{name}", seen) if source.split(".")[0] in self.packages else None
                if isinstance(bound, Known):
                    return bound
                found = found or bound
        if found is None and self._files(f"{module}.{name}"):
            return Module(f"{module}.{name}")
        return found

    def _bound(self, scope: Scope, name: str, seen: frozenset[str]) -> Definition | None:
        """Return the definition of a name in a scope: functions, or the first binding that can be followed."""
        bindings = scope.names.get(name, [])
        functions = tuple(one for one in bindings if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
        if functions:
            return Function(functions)
        found: Definition | None = None
        for binding in bindings:
            if isinstance(binding, ast.ClassDef):
                return Class(scope.module, binding)
            followed = self.find(binding, seen) if isinstance(binding, str) else self._value(scope, binding, seen)
            if isinstance(followed, Known):
                return followed
            found = found or followed
        return found

    def _value(self, scope: Scope, statement: ast.stmt, seen: frozenset[str]) -> Definition | None:
        """Return the definition of an assigned value: another name, or the class of which it is an instance."""
        assert isinstance(statement, ast.Assign | ast.AnnAssign)
        value = statement.value
        called = value.func if isinstance(value, ast.Call) else None
        expression = dotted(called or value)
        found = self._expression(scope.module, expression, seen) if expression else None
        if called:
            return Instance(found) if isinstance(found, Class) else Value()
        return found or Value()

    def _expression(self, module: str, expression: str, seen: frozenset[str]) -> Definition | None:
        head, *rest = expression.split(".")
        key = f"{module}:{expression}"
        if key in seen:
            return None
        found = self._in_module(module, head, seen | {key})
        for part in rest:
            found = self._member(found, part, seen | {key}) if found else None
        return found

    def _mro(self, owner: Class, seen: frozenset[str]) -> Iterator[Class]:
        """Yield a class and its base classes that are found, depth first."""
        yield owner
        for base in self._bases(owner, seen):
            if isinstance(base, Class):
                yield from self._mro(base, seen)

    def _bases(self, owner: Class, seen: frozenset[str] = frozenset()) -> Iterator[Definition | None]:
        for base in owner.node.bases:
            name = dotted(base.value if isinstance(base, ast.Subscript) else base)
            if name.split(".")[-1] not in STRUCTURAL_BASES:
                yield self._expression(owner.module, name, seen) if name else None

    def _constructor(self, owner: Class) -> list[str]:
        classes = list(self._mro(owner, frozenset()))
        for one in classes:
            scope = Scope(one.module, False, one.node.body)
            for method in ("__init__", "__new__"):
                found = self._bound(scope, method, frozenset())
                if isinstance(found, Function):
                    return [parameters_of(node, is_method=True) for node in selected(found.nodes)]
            if is_dataclass(one.node):
                return [dataclass_parameters(c.node for c in reversed(classes) if is_dataclass(c.node))]
        is_known = all(isinstance(base, Class) for one in classes for base in self._bases(one))
        return [""] if is_known else [ANY]


def instance_attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that methods of a class assign."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and dotted(one.value) == "self"
    }


def dotted(expression: ast.expr | None) -> str:
    """Return ``a.b.c`` for such an expression, or an empty string."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute) and (owner := dotted(expression.value)):
        return f"{owner}.{expression.attr}"
    return ""


def selected(
    nodes: Iterable[ast.FunctionDef | ast.AsyncFunctionDef],
) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the implementations of a function, or its overloads if there are only stubs."""
    stubs = [node for node in nodes if any(dotted(one).endswith("overload") for one in node.decorator_list)]
    return [node for node in nodes if node not in stubs] or stubs


def unique(signatures: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(signatures))
