"""Writes docs/research/studies.md from the studies that have run: verdict, question, figures; copies their pictures."""

import re
from collections.abc import Iterator
from pathlib import Path

from experiments.all import HERE, studies, title, verdict
from experiments.studies import load_results

PAGE, FIGURES = Path(__file__).parent / "research" / "studies.md", Path(__file__).parent / "figures"
INTRODUCTION = """# Studies

Made by `make docs` from `experiments/`. Each study has a question, a design and criteria that were committed before it
ran. Its verdict is a function of its results: `python -m experiments.all --list` prints them, `--run NAME` runs one
again."""


def section(name: str, heading: str) -> str:
    """Return the text of a section of a study's README."""
    text = (HERE / name / "README.md").read_text()
    found = re.search(rf"^## {heading}\n\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def summary(name: str) -> str:
    """Return the two lines of the verdict in a study's README."""
    text = (HERE / name / "README.md").read_text()
    found = re.search(r"^\*\*Verdict: .*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return found[0] if found else ""


def finished() -> list[str]:
    return [name for name in studies() if verdict(name) is not None]


def lines() -> Iterator[str]:
    yield INTRODUCTION
    for name in finished():
        minutes = f"{load_results(HERE / name)['minutes']:g}"
        yield from ("", f"## {title(name)}", "", summary(name), "", section(name, "Question"), "")
        yield from (f"![{title(name)}](../figures/study_{name}.svg)", "", (HERE / name / "table.md").read_text())
        yield (f"`python -m experiments.{name}.study` ({minutes} minutes). Design and criteria: "
               f"`experiments/{name}/README.md`.")  # fmt: skip


def pictures() -> dict[Path, str]:
    """Return the files of pictures and their contents."""
    return {FIGURES / f"study_{name}.svg": (HERE / name / "figure.svg").read_text() for name in finished()}


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()) + "\n")
    for file, content in pictures().items():
        file.write_text(content)
