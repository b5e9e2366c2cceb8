"""Parameters of functions as short text, ``a, b=, *, c=``: names, kinds, and whether they have a default."""

import ast
from collections.abc import Iterable


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> str:
    """Return the parameters of a function, without those that a method is bound to."""
    is_static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list)
    return text_of(node.args, n_bound=1 if is_method and (not is_static or node.name == "__new__") else 0)


def text_of(args: ast.arguments, n_bound: int = 0) -> str:
    positional = [*args.posonlyargs, *args.args]
    n_required = len(positional) - len(args.defaults)
    words = [one.arg + ("=" if index >= n_required else "") for index, one in enumerate(positional)]
    if args.posonlyargs and len(args.posonlyargs) > n_bound:
        words.insert(len(args.posonlyargs), "/")
    words = words[n_bound:] if positional else words
    if args.vararg:
        words.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        words.append("*")
    words += [
        one.arg + ("=" if default else "") for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        words.append(f"**{args.kwarg.arg}")
    return ", ".join(words)


def parsed(text: str) -> ast.arguments:
    """Return the parameters that ``text_of`` has written; every default is 0."""
    function = ast.parse(f"def f({text.replace('=', '=0')}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def is_dataclass(node: ast.ClassDef) -> bool:
    """Return True if the constructor of a class is made from its fields: a dataclass, also pydantic's, or a Struct."""
    decorators = [ast.unparse(one) for one in node.decorator_list]
    bases = [ast.unparse(one) for one in node.bases]
    return any("dataclass" in one for one in decorators) or any(one.split(".")[-1] == "Struct" for one in bases)


def dataclass_parameters(classes: Iterable[ast.ClassDef]) -> str:
    """Return the constructor parameters of a dataclass, given its base classes before it."""
    fields: dict[str, bool] = {}
    for node in classes:
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and is_argument(statement):
                fields[ast.unparse(statement.target)] = statement.value is not None and has_default(statement.value)
    return ", ".join(name + ("=" if optional else "") for name, optional in fields.items())


def is_argument(field: ast.AnnAssign) -> bool:
    keywords = field_keywords(field.value)
    is_set_later = "init" in keywords and ast.unparse(keywords["init"]) == "False"
    return not is_set_later and "ClassVar" not in ast.unparse(field.annotation)


def has_default(value: ast.expr) -> bool:
    """Return True if the value of a field is a default, or a ``field()`` that has one."""
    is_field = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field"
    return not is_field or bool({"default", "default_factory"} & set(field_keywords(value)))


def field_keywords(value: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(value, ast.Call):
        return {}
    return {one.arg: one.value for one in value.keywords if one.arg}
