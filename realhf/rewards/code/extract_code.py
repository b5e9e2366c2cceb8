"""Extracts the program of a response from its fenced code blocks."""

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

MIN_CHARS = 20  # of a program in a fence, if there is a longer one

FENCE = re.compile(r"`{3,}|~{3,}")
INLINE = re.compile(r"([^\s`]*)[ \t]+(.*\S)")
LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
PYTHON = ("", "python", "python3", "py", "python2")
UNINDENTED = re.compile(r"\n(?=\S)")


@dataclass(frozen=True)
class CodeBlock:
    """The text of a fence without its common indent; ``language`` is in lower case, and empty if there is none."""

    language: str
    text: str


class ParsedProgram:
    """A text that is valid Python."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self.text, self._body, nodes = text, tree.body, list(ast.walk(tree))
        self.top_level = set(_bound(tree.body))
        bound = set(_bound(nodes)) | set(vars(builtins))
        self.free = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound
        self._functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}

    def defines(self, name: str) -> bool:
        """Return True if the program has a function or method ``name``, or a variable at its top level."""
        return name in self._functions or name in self.top_level

    @property
    def is_constant(self) -> bool:
        """Whether the text may be sample output that is valid Python, such as ``3 4`` on two lines or ``[1, 2]``."""
        effects = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
        parts = (part for statement in self._body for part in ast.walk(statement))
        return all(isinstance(s, ast.Expr) for s in self._body) and not any(isinstance(part, effects) for part in parts)


def extract_code(response: str, name: str = "") -> str | None:
    """Return the program in a response, or None.

    Blocks marked as Python come before unmarked ones; without any block, the whole response is used. Of these, the last
    is used that defines ``name``, if given, that is more than constants, that has MIN_CHARS characters, and that does
    not use definitions of an earlier one, as far as any does. An unclosed fence extends to the end of the text.
    """
    blocks = list(code_blocks(response))
    marked = [block.text for block in blocks if block.language in PYTHON[1:]]
    for texts in (marked, [block.text for block in blocks if not block.language], [response] if not blocks else []):
        programs = [program for text in texts if (program := parse(text)) is not None]
        programs = [p for p in programs if name and p.defines(name)] or programs
        programs = [p for p in programs if not p.is_constant] or programs
        programs = [p for p in programs if len(p.text.strip()) >= MIN_CHARS] or programs
        defined: set[str] = set()
        found = None
        for program in programs:
            if not program.free & defined:
                found = program.text
            defined |= program.top_level
        if found is not None:
            return found
    return None


def complete_stub(stub: str, response: str, name: str) -> str | None:
    """Return ``stub`` followed by the response, which is the body of its function ``name`` or defines it again.

    The last fenced block that defines the function is used, else the last block. Without a fence, text after the
    function is dropped if the whole is not Python.
    """
    fences = [block.text for block in code_blocks(response, dedent=False) if block.language in PYTHON]
    defining = [block for block in map(textwrap.dedent, fences) if re.search(rf"^def {name}\b", block, re.MULTILINE)]
    blocks = (defining or fences)[-1:] or [response, UNINDENTED.split(response, maxsplit=1)[0]]
    start = stub if stub.endswith("\n") else stub + "\n"
    return next((start + block for block in blocks if block.strip() and parse(start + block)), None)


def code_blocks(response: str, dedent: bool = True) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of a text in Markdown: indented, after other text in a line, or within one line."""
    lines = iter(response.splitlines(keepends=True))
    for line in lines:
        info = yield from _inline_blocks(line)
        if info is None:
            continue
        fence, content = info[0], []
        for inner in lines:
            stripped = inner.rstrip()
            code = stripped.rstrip(fence[0])
            if len(stripped) - len(code) >= len(fence):
                content.append(code)
                break
            content.append(inner)
        text = "".join(content)
        yield CodeBlock(_language(info[1]), textwrap.dedent(text) if dedent else text)


def _inline_blocks(line: str) -> Generator[CodeBlock, None, tuple[str, str] | None]:
    """Yield the blocks within a line; return fence and info of the block that starts at its end, or None."""
    opening = None
    for fence in FENCE.finditer(line):
        if opening is None or fence.group() != opening.group():
            opening = fence
            continue
        if (inline := INLINE.fullmatch(line[opening.end() : fence.start()].rstrip())) is not None:
            yield CodeBlock(_language(inline.group(1)), inline.group(2) + "\n")
        opening = None
    if opening is not None and "`" not in (info := line[opening.end() :].rstrip("\n")):
        return opening.group(), info
    return None


def _language(info: str) -> str:
    """Return the language of ``python title="a"``, ``{python}``, ``{.python .numberLines}`` or ``py:a.py``."""
    match = LANGUAGE.match(info.strip().lower())
    return match.group(1) if match else ""


def parse(text: str) -> ParsedProgram | None:
    """Return the program in a text, or None if it is blank or not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            return ParsedProgram(text, ast.parse(text)) if text.strip() else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that statements define."""
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
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
                yield from (part.id for part in names if isinstance(part.ctx, ast.Store))
            case ast.ExceptHandler(name=str(name)):
                yield name
