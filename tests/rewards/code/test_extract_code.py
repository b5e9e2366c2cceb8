"""Programs in responses: generated Markdown around a known program."""

import textwrap
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from realhf.rewards.code.extract_code import code_blocks, extract_code
from realhf.rewards.judge.pool import JudgePool
from tests.conftest import TIMEOUT_S
from tests.rewards.code.test_judge_code import ADD, runs
from tests.scaling import examples

PROGRAM = "def solve(a, b):\n    return a + b\n\n\nprint(solve(*map(int, input().split())))\n"
USAGES = ("print(solve(1, 2))\n", "assert solve(1, 2) == 3\n", "result = solve(3, 4)\nprint(result)\n", "solve(1, 2)\n")
OUTPUTS = ("3\n", "3\n7\n", "[1, 2]\n", "Hello\n", "'a'\n", "1 2 3\n", "-5\n", "True\n")
INFOS = (
    "python",
    "Python",
    "python3",
    "py",
    "{python}",
    "{.python .numberLines}",
    'python title="main.py"',
    "python:a.py",
)
OTHERS = ("bash", "text", "cpp", "json", "output", "console")
BEFORE = ("", "Here it is:\n\n", "Here it is: ", "1. First, the program:\n\n   ", "> quoted\n\n")


def fenced(text: str, info: str, fence: str = "```", indent: str = "") -> str:
    return textwrap.indent(f"{fence}{info}\n{text}{fence}\n", indent)


fences = st.sampled_from(["```", "````", "~~~", "~~~~"])
marked = st.sampled_from(INFOS)
trailing = st.one_of(
    st.builds(fenced, st.sampled_from(USAGES), st.sampled_from(["python", ""]), fences),
    st.builds(fenced, st.sampled_from(OUTPUTS), st.sampled_from(["", "text", "output"]), fences),
    st.builds(
        fenced, st.sampled_from(["print(1)\n", "x = [1, 2, 3]\nprint(sum(x))\n"]), st.sampled_from(OTHERS), fences
    ),
    st.sampled_from(["That is all.\n", "It prints `3`.\n", "\n"]),
)


@given(marked, fences, st.sampled_from(BEFORE), st.lists(trailing, max_size=3))
@settings(max_examples=examples(150))
def test_the_program_is_found_in_any_markdown(info: str, fence: str, before: str, after: list[str]) -> None:
    response = before + fenced(PROGRAM, info, fence).lstrip() + "\nThen:\n\n".join(["", *after])
    assert extract_code(response) == PROGRAM


@given(fences, st.integers(1, 8), st.sampled_from(["python", ""]))
@settings(max_examples=examples(40))
def test_an_indented_block_is_dedented(fence: str, indent: int, info: str) -> None:
    assert extract_code("- In a list:\n\n" + fenced(PROGRAM, info, fence, " " * indent)) == PROGRAM


@given(st.sampled_from(OUTPUTS), fences)
@settings(max_examples=examples(40))
def test_sample_output_is_not_the_program(output: str, fence: str) -> None:
    assert extract_code(fenced(PROGRAM, "", fence) + "Output:\n" + fenced(output, "", fence)) == PROGRAM


@pytest.mark.parametrize("first", [0, 1])
def test_a_marked_block_beats_an_unmarked_one(first: int) -> None:
    other = "import sys\nprint(len(sys.stdin.read()))\n"
    blocks = [fenced(PROGRAM, "python"), fenced(other, "")]
    assert extract_code("\n".join(blocks[first:] + blocks[:first])) == PROGRAM


@pytest.mark.parametrize("usage", USAGES)
def test_a_usage_example_does_not_replace_a_called_function(usage: str) -> None:
    response = fenced(PROGRAM, "python") + "Usage:\n" + fenced(usage + "# and more of the same\n", "python")
    assert extract_code(response, "solve") == extract_code(response) == PROGRAM


def test_the_last_of_two_programs_is_used() -> None:
    better = PROGRAM.replace("a + b", "b + a")
    assert extract_code(fenced(PROGRAM, "python") + "Better:\n" + fenced(better, "python")) == better


def test_a_block_within_a_line_and_an_unclosed_block() -> None:
    assert extract_code("Use ```python print(sum(map(int, input().split())))``` here") == (
        "print(sum(map(int, input().split())))\n"
    )
    assert extract_code("Code:\n```python\n" + PROGRAM) == PROGRAM
    assert extract_code("```python\n" + PROGRAM.rstrip() + "```") == PROGRAM.rstrip()


def test_no_program() -> None:
    assert extract_code("I do not know.") is None
    assert extract_code("```bash\nls\n```") is None
    assert extract_code(PROGRAM) == PROGRAM


LINES = ("x = 1", "print('a')", "    y = 2", "text", "", "- item", "if x:", "# a", "a ` b")
PROSE = ("Some text.", "", "Another `code` line", "1. thing")


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Draw prose and fences; a fence may contain shorter ones or those of the other kind, and the last may be open."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            lines.append(draw(st.sampled_from(PROSE)))
            continue
        fence = draw(st.sampled_from(["```", "````", "~~~", "~~~~~"]))
        inner = ["```", "~~~"] if len(fence) > 3 else ["~~~" if fence == "```" else "```"]
        lines.append(fence + draw(st.sampled_from(["", "python", "py", "cpp", 'python title="a"'])))
        lines += draw(st.lists(st.sampled_from([*LINES, *inner]), max_size=4))
        lines += [fence, ""]
    return "\n".join(lines[: draw(st.sampled_from([len(lines), -2]))]) + "\n"


@given(documents())
@settings(max_examples=examples(200))
def test_blocks_equal_those_of_a_markdown_parser(text: str) -> None:
    expected = [
        (token.info.split()[0] if token.info.strip() else "", textwrap.dedent(token.content).rstrip("\n"))
        for token in MarkdownIt().parse(text)
        if token.type == "fence"
    ]
    assert [(block.language, block.text.rstrip("\n")) for block in code_blocks(text)] == expected


HOSTILE = {
    "backquotes": "`" * 50_000 + "a`",
    "spaced backquotes": "``` a " * 10_000 + "`",
    "tildes": "~" * 50_000 + "`",
    "spaces": "``` " + " " * 50_000 + "x",
    "inline blocks": "```python x```" * 5_000,
    "open blocks": "```cpp\n" * 5_000,
    "brackets": "```python\n" + "[" * 50_000 + "\n```",
    "dependent blocks": "".join(f"```python\ndef f{i}(): return f{i - 1}()\n```\n" for i in range(2_000)),
}


@runs
def test_hostile_markdown_is_judged_within_the_time_limit() -> None:
    with closing(JudgePool("code", timeout=TIMEOUT_S, processes=2)) as pool:
        verdicts = pool.judge([("", text, ADD) for text in HOSTILE.values()])
    expected = dict.fromkeys(HOSTILE, "no_program")
    expected |= {"spaced backquotes": "error", "inline blocks": "error", "dependent blocks": "wrong"}
    assert {name: verdict.detail for name, verdict in zip(HOSTILE, verdicts, strict=True)} == expected
