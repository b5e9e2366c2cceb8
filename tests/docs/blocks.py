"""Code blocks, headings and links of the documents."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTE = re.compile(r"<!-- (.+) -->")
COMMANDS = ("realhf", "make", "python", "pip", ".", "pre-commit", "eval")
MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced or indented block. ``note`` is the comment on the line before it."""

    page: Path
    line: int
    language: str
    text: str
    note: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def kind(self) -> str:
        """``marked`` as not run, ``python``, ``rows``, ``commands``, ``directive`` of the site, or ``output``."""
        if self.note.startswith("not run: "):
            return "marked"
        if self.language == "jsonl":
            return "rows"
        if self.language.startswith("{"):
            return "directive"
        if self.language in ("python", "yaml", "bash"):
            return {"bash": "commands"}.get(self.language, self.language)
        return "commands" if self.language == "" and self.commands() else "output"

    @property
    def file(self) -> str:
        """The name in the comment on the first line of a file, or in the note of a data file."""
        named = re.match(r"# (\S+\.py)\n", self.text) or re.fullmatch(r"file (\S+)", self.note)
        return named[1] if named else ""

    def commands(self) -> list[list[str]]:
        """Return the words of every command; ``...`` stands for further words and is dropped."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        lines = [line.strip() for line in joined.splitlines() if line.strip().split(" ")[0] in COMMANDS]
        parts = [part for line in lines for part in line.split(" && ")]
        return [[word for word in shlex.split(part, comments=True) if word != "..."] for part in parts]


@lru_cache
def tokens(page: Path) -> list[Token]:
    return MARKDOWN.parse(page.read_text())


def blocks() -> Iterator[Block]:
    for page in PAGES:
        lines = page.read_text().splitlines()
        for token in tokens(page):
            if token.type in ("fence", "code_block") and token.map:
                start = token.map[0]
                note = NOTE.fullmatch(lines[start - 1].strip()) if start else None
                yield Block(page, start + 1, token.info.strip(), token.content, note[1] if note else "")


def headings(page: Path) -> list[str]:
    """Return the texts of the headings, with their Markdown."""
    inlines = zip(tokens(page), tokens(page)[1:], strict=False)
    return [after.content for token, after in inlines if token.type == "heading_open"]


def anchors(page: Path) -> list[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    plain = (re.sub(r"[`*]", "", text).lower() for text in headings(page))
    return [re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in plain]


def links(page: Path) -> Iterator[str]:
    """Yield the targets of links and images."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs["href" if child.type == "link_open" else "src"])
