"""Words that standard technical English does not use here. They may not appear in code, tests or documents."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIALECT = re.compile(
    r"\b(anew|seldom|dearest|reckon\w*|lest|nor|whoever|whatever|whichever|whomever|nobody|for ever|to the bit"
    r"|twins?|see to it|tell whether|strangers?|and its kin|of like length|give no sign|said aloud|by way of"
    r"|you can mend|mend(ed|s|ing)?|the house|goes? on from|go on (with|from)|lends?|lent|is at home|at hand"
    r"|all short of|on the fullest|carry out|carries out|carried out|in the place of|what .{1,40} says? of)\b",
    re.IGNORECASE,
)
SUFFIXES = (".py", ".md", ".h", ".cpp", ".cu", ".yaml", ".sh", ".toml")
TOPS = ["realhf/" + p.name for p in sorted((ROOT / "realhf").iterdir()) if p.is_dir() and p.name != "__pycache__"]
TOPS += ["tests", "csrc", "benchmarks", "examples", "experiments", "docs", "README.md", "CONTRIBUTING.md", "Makefile"]
EXEMPT = ("tests/test_english.py", "docs/options.md")


def files_of(top: str) -> list[Path]:
    path = ROOT / top
    found = [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix in SUFFIXES]
    return sorted(f for f in found if f.relative_to(ROOT).as_posix() not in EXEMPT)


@pytest.mark.parametrize("top", TOPS)
def test_no_dialect_words(top: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match.group()}"
        for file in files_of(top)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (match := DIALECT.search(line))
    ]
    assert not found, f"{len(found)} lines:\n" + "\n".join(found)
