"""Extracts the program of a response from its fenced code blocks."""

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

MIN_CHARS = 20  # of a program in a fence, if there is a longer one

OPENING = re.compile(r"(?P<before>.*?)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
INLINE = re.compile(r"(`{3,})(?P<info>[^\s`]*)[ \t]+(?P<code>[^`\n]+?)[ \t]*\1")
LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
PYTHON = ("python", "python3", "py", "python2", "pycon3")
UNINDENTED = re.compile(r"\n(?=\S)")


@dataclass(frozen=True)
class CodeBlock:
    """The text of a fence without its common indent; ``language`` is in lower case, and empty if there is none."""

    language: str
    text: str


def extract_code(response: str, name: str = "") -> str | None:
    """Return the program in a response, or None.

    Blocks marked as Python come before unmarked ones, and unmarked ones before the whole response. Of these, the last
    is used that defines ``name``, if given, that is more than constants, that has MIN_CHARS characters, and that does
    not use definitions of an earlier one, as far as any does. An unclosed fence extends to the end of the text.
    """
    blocks = list(code_blocks(response))
    marked = [block.text for block in blocks if block.language in PYTHON]
    for texts in (marked, [block.text for block in blocks if not block.language], [response] if not blocks else []):
        programs = [text for text in texts if text.strip() and is_python(text)]
        for is_better in (
            lambda text: bool(name) and defines(text, name),
            lambda text: not is_constant(text),
            lambda text: len(text.strip()) >= MIN_CHARS,
        ):
            programs = list(filter(is_better, programs)) or programs
        if programs:
            own = [text for i, text in enumerate(programs) if not any(uses(text, other) for other in programs[:i])]
            return own[-1]
    return None


def complete_stub(stub: str, response: str, name: str) -> str | None:
    """Return ``stub`` followed by the response, which is the body of its function ``name`` or defines it again.

    The last fenced block that defines the function is used, else the last block. Without a fence, text after the
    function is dropped if the whole is not Python.
    """
    fences = [block.text for block in code_blocks(response, dedent=False) if block.language in ("", *PYTHON)]
    defining = [block for block in map(textwrap.dedent, fences) if re.search(rf"^def {name}\b", block, re.MULTILINE)]
    blocks = (defining or fences)[-1:] or [response, UNINDENTED.split(response, maxsplit=1)[0]]
    start = stub if stub.endswith("\n") else stub + "\n"
    return next((start + block for block in blocks if block.strip() and is_python(start + block)), None)


def code_blocks(response: str, dedent: bool = True) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of a text in Markdown: indented, after other text in a line, or within one line."""
    lines = iter(response.splitlines(keepends=True))
    for line in lines:
        inline = [CodeBlock(_language(match["info"]), match["code"] + "\n") for match in INLINE.finditer(line)]
        yield from inline
        opening = OPENING.match(line.rstrip("\n"))
        if inline or opening is None:
            continue
        fence, content = opening["fence"], []
        closing = re.compile(rf"(?P<code>.*?){re.escape(fence[0])}{{{len(fence)},}}[ \t]*$")
        for inner in lines:
            if (end := closing.match(inner.rstrip("\n"))) is not None:
                content.append(end["code"])
                break
            content.append(inner)
        text = "".join(content)
        yield CodeBlock(_language(opening["info"]), textwrap.dedent(text) if dedent else text)


def _language(info: str) -> str:
    """Return the language of ``python title="a"``, ``{python}``, ``{.python .numberLines}`` or ``py:a.py``."""
    match = LANGUAGE.match(info.strip().lower())
    return match.group(1) if match else ""


def is_python(text: str) -> bool:
    return parsed(text) is not None


def parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def is_constant(text: str) -> bool:
    """Return True for sample output that is valid Python, such as ``3 4`` on two lines or ``[1, 2]``."""
    tree = parsed(text)
    calls = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return tree is not None and all(
        isinstance(node, ast.Expr) and not any(isinstance(part, calls) for part in ast.walk(node)) for node in tree.body
    )


def defines(text: str, name: str) -> bool:
    """Return True if a program has a function ``name``, or a class with such a method."""
    tree = parsed(text)
    return tree is not None and any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == name
        or isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        for node in ast.walk(tree)
    )


def uses(text: str, other: str) -> bool:
    """Return True if a program loads a name that it does not bind, and that ``other`` binds at its top level."""
    tree, earlier = parsed(text), parsed(other)
    if tree is None or earlier is None:
        return False
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return bool((loaded - set(_bound(ast.walk(tree))) - set(vars(builtins))) & set(_bound(iter(earlier.body))))


def _bound(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.arg():
                yield node.arg
            case ast.Assign() | ast.AnnAssign():
                yield from (part.id for part in ast.walk(node) if isinstance(part, ast.Name)
                            and isinstance(part.ctx, ast.Store))  # fmt: skip
            case ast.ExceptHandler(name=str(name)):
                yield name
