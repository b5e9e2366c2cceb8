"""Ready tools: arithmetic, programs in the sandbox, search by BM25, and the environment with a calculator."""

import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.base.isolation.seccomp import MACHINES
from realhf.environments import Reply, Turn
from realhf.environments.env_process import EnvOptions
from realhf.environments.pool import EnvPool
from realhf.environments.single_reply import SingleReply
from realhf.environments.tool_calls import TOOL_CALL_PARSERS
from realhf.environments.tool_env import as_environment
from realhf.environments.tools import (
    MAX_BITS,
    Calculator,
    CalculatorEnv,
    CalculatorError,
    Search,
    SearchIndex,
    evaluate,
    exact_match,
    format_number,
    search_index,
    words_of,
)
from realhf.rewards.registry import VERIFIERS
from realhf.rewards.tools.math_score import score_math
from realhf.rewards.tools.python_tool import PythonTool

VALUES = {
    "2+3*4": "14", "(1 + 2) * -3": "-9", "1/3": "1/3 = 0.333333333333 (rounded)", "0.1+0.2": "0.3", "2^10": "1024",
    "2**-3": "0.125", "7 // 2": "3", "-7 % 3": "2", "sqrt(16)": "4", "sqrt(9/4)": "1.5", "factorial(20)":
    "2432902008176640000", "gcd(12, 18) + lcm(4, 6)": "18", "comb(5, 2)": "10", "round(2.567, 2)": "2.57",
    "min(1, 1/2)": "0.5", "12 × 3 ÷ 4 − 1": "8", "10**30 / 10**29": "10", "sqrt(2)": "1.41421356237 (rounded)",
    "sin(0)": "0", "floor(7/2) + ceil(7/2)": "7", "-1/8": "-0.125", "1.50": "1.5", "abs(-4)": "4", "4 ** 0.5": "2",
}  # fmt: skip


@pytest.mark.parametrize("expression", VALUES)
def test_values_of_expressions(expression: str) -> None:
    assert Calculator().calculate(expression) == VALUES[expression]


PROBLEMS = {
    "1/0": "division by zero", "9**9**9": "too large", "10**10000": "too large", "factorial(10**6)": "at most 400",
    "1e400": "too large", "2 +": "not valid", "": "not valid", "1,000": "write 1000", "x + 1": "not 'x'",
    "__import__('os')": "no function '__import__'", "(1).real": "not Attribute", "'a' * 9": "numbers only",
    "True + 1": "numbers only", "[1]": "not List", "lambda: 1": "not Lambda", "1 if 1 else 2": "not IfExp",
    "max()": "no value", "sqrt(-1)": "no value", "(-8) ** (1/3)": "not a real number", "log(0)": "no value",
    "exp(1000)": "no value", "-" * 400 + "1": "nested", "1+" * 400 + "1": "more than 500", "(" * 300 + ")" * 300:
    "more than 500", "(" * 240 + "1" + ")" * 240: "not valid", "1\0": "val", "gcd(1.5, 2)": "integers",
    "round(1, 10**9)": "at most", "2 ** (2 ** 64)": "too large", "sqrt(2, 3, x=4)": "no function",
}  # fmt: skip


@pytest.mark.parametrize("expression", PROBLEMS)
def test_other_expressions_have_an_error(expression: str) -> None:
    with pytest.raises(CalculatorError, match=PROBLEMS[expression]):
        evaluate(expression)


@given(
    st.recursive(
        st.integers(-50, 50).map(str) | st.decimals(0, 9, places=2).map(str),
        lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner),
        max_leaves=6,
    )
)
def test_arithmetic_is_exact(expression: str) -> None:
    """The reference is Python's own evaluation with fractions in place of the numbers."""
    numbers = words_and_signs(expression)
    try:
        expected = eval(numbers, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            evaluate(expression)
        return
    assert evaluate(expression) == expected
    shown = format_number(expected)
    assert Fraction(shown.split(" ")[0]) == expected


def words_and_signs(expression: str) -> str:
    return " ".join(
        f"Fraction('{word.strip('()')}')".join((word[: word.count("(")], word[len(word) - word.count(")") :]))
        if any(letter.isdigit() for letter in word)
        else word
        for word in expression.split()
    )


@given(st.text(st.sampled_from("0123456789.+-*/%^() e,xsqrt'[]{}:=!\n\0"), max_size=40) | st.text(max_size=30))
def test_garbage_is_a_value_or_an_error_for_the_model(text: str) -> None:
    try:
        value = evaluate(text)
    except CalculatorError as error:
        assert str(error)
    else:
        assert isinstance(value, float) or value.numerator.bit_length() <= MAX_BITS
        assert format_number(value)


programs = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="the sandbox needs Linux"
)


@pytest.fixture(scope="module")
def python() -> PythonTool:
    return PythonTool(seconds=20.0, memory_mb=512)


PROGRAMS = {
    "print(6 * 7)": "42",
    "print(Counter('aab').most_common(1), sqrt(16))": "[('a', 2)] 4.0",
    "x = 1": "(no output)",
    "import sys; print('note', file=sys.stderr)": "note",
    "print('a')\n1/0": 'a\nTraceback (most recent call last):\n  File "program.py", line 2, in <module>\n    1/0\n'
                       "    ~^~\nZeroDivisionError: division by zero",
    "import sys; sys.exit(3)": "The program failed: exit code 3",
    "print(input())": "EOFError: EOF when reading a line",
    "x =": "SyntaxError: invalid syntax",
    "print('é{}' + '''\"\"\"''')": 'é{}"""',
}  # fmt: skip


@programs
@pytest.mark.parametrize("code", PROGRAMS)
def test_programs_run(code: str, python: PythonTool) -> None:
    output = python.python(code)
    is_part = "Error" in PROGRAMS[code]
    assert PROGRAMS[code] in output if is_part else PROGRAMS[code] == output


@programs
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("x = bytearray(10**10)", "The program had too little memory: MemoryError"),
        ("import os\nwhile True:\n    os.fork()", "The program tried what is not permitted: PermissionError"),
        ("import subprocess; subprocess.run(['ls'])", "PermissionError"),
        ("import socket; socket.socket()", "The program tried what is not permitted: PermissionError"),
        (f"print(open({str(Path(__file__))!r}).read())", "Error: [Errno"),
        ("open('/etc/passwd')", "Error: [Errno"),
        ("open('/usr/planted', 'w')", "Error: [Errno"),
        ("while True:\n    print('x' * 10**6)", "The program wrote too much"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "The program was killed"),
    ],
)
def test_hostile_programs_are_contained(code: str, problem: str, python: PythonTool) -> None:
    assert problem in python.python(code)
    assert python.python("print(1)") == "1"


@programs
@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(1000)", "print('a', flush=True)\nwhile 1: 1"]
)
def test_a_program_that_hangs_is_stopped(code: str) -> None:
    tool = PythonTool(seconds=1.0, memory_mb=512)
    assert tool.python(code).endswith("The program was stopped: not done after 1 s")


@programs
def test_programs_share_nothing_and_output_is_cut(python: PythonTool) -> None:
    assert python.python("x = 1; open('f', 'w').write('x')") == "(no output)"
    assert "NameError" in python.python("print(x)") and "FileNotFoundError" in python.python("open('f')")
    short = PythonTool(max_output=10)
    assert short.python("print('a' * 9 + 'b' * 9)") == "aaaaa\n... (8 characters are not shown) ...\nbbbbb"


PASSAGES = [
    {"id": "paris", "title": "Paris", "text": "Paris is the capital of France. The river is the Seine."},
    {"id": "rome", "title": "Rome", "text": "Rome is the capital of Italy, and has a river, the Tiber."},
    {"id": "cat", "text": "A cat sleeps. A cat eats. The cat is the capital of cats."},
    {"text": ""},
    {"text": "the the the the"},
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    pytest.importorskip("bm25s")
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in PASSAGES) + "\n")
    return str(file)


def bm25(texts: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Plain BM25 in the form of Lucene (Kamphuis et al. 2020)."""
    documents = [words_of(text) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in words_of(query):
            n = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            score += idf * counts[word] / (counts[word] + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


WORDS = ["river", "capital", "cat", "France", "the", "Tiber", "unknown", "Paris", "is", "of"]


def test_the_ranking_is_that_of_bm25(corpus: str) -> None:
    index, texts = search_index(corpus), [f"{one.get('title', '')} {one['text']}" for one in PASSAGES]
    for query in [" ".join(WORDS[i::step]) for step in (1, 2, 3, 7) for i in range(step)] + ["the the river"]:
        expected = bm25(texts, query)
        found = index.search(query, 10)
        assert [score for _, score in found] == pytest.approx([expected[number] for number, _ in found], rel=1e-5)
        assert {number for number, _ in found} == {number for number, score in enumerate(expected) if score > 0}
        assert all(expected[a] >= expected[b] - 1e-6 for (a, _), (b, _) in zip(found, found[1:], strict=False))


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), max_size=6), min_size=1, max_size=6), st.text("abcdefg ", max_size=8)
)
def test_any_corpus_is_ranked_by_bm25(documents: list[list[str]], query: str) -> None:
    pytest.importorskip("bm25s")
    if not any(documents):
        return
    texts = [" ".join(words) for words in documents]
    index = SearchIndex([{"text": text} for text in texts])
    expected = bm25(texts, query)
    found = dict(index.search(query, 10))
    assert found == pytest.approx({i: score for i, score in enumerate(expected) if score > 0}, rel=1e-4)


def test_search_shows_passages(corpus: str) -> None:
    tool = Search(corpus, n_results=2, max_passage=20)
    assert tool.search("France") == "[paris] Paris\nParis is the capital"
    assert tool.search("capital river").count("[") == 2
    assert tool.search("") == tool.search("zebra ?!") == "No passage contains a word of the query."
    assert search_index(corpus) is search_index(corpus)


@pytest.mark.parametrize(
    ("content", "problem"),
    [('{"text": "a"}\n{"id": 1}\n', ":2: it must be an object"), ("[", ":1: not valid JSON"), ("", "have no words"),
     ('{"text": "?!"}', "have no words"), ("[" * 100_000, ":1: not valid JSON")],
)  # fmt: skip
def test_an_invalid_corpus_is_an_error(content: str, problem: str, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(UserError, match=problem):
        Search(str(tmp_path / "c.jsonl"))
    with pytest.raises(UserError, match="no such file"):
        Search(str(tmp_path / "missing.jsonl"))


MATCHES = [
    ("42", "42", 1.0), ("The answer is 42.", "42", 1.0), ("It is 1,234.", "1234", 1.0), ("0.5", "1/2", 1.0),
    ("It is 42, or 43.", "42", 0.0), ("blue", "blue", 1.0), ("It is blue", "blue", 0.0), ("", "42", 0.0),
    ("-3", "3", 0.0), ("1/0", "1", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "answer", "score"), MATCHES)
def test_exact_matches(reply: str, answer: str, score: float) -> None:
    assert exact_match(reply, {"answer": answer}) == score


def test_the_scorer_is_the_verdict_of_math() -> None:
    assert score_math(r"So \boxed{\frac{1}{2}}", {"answer": "0.5"}) == 1.0
    assert score_math(r"So \boxed{3}", {"solutions": ["#### 4"]}) == 0.0


FUNCTION = "def score(prompt, answer, row):\n    return len(prompt + answer) + row['bonus']\n"


def test_a_single_reply_has_the_reward_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def score(prompt, answer, row):\n    return len(prompt + answer) + row['bonus']\n"
    )
    for fn in (f"{tmp_path}/own.py:score", lambda prompt, answer, row: len(prompt + answer) + row["bonus"]):
        made = SingleReply(fn)
        assert made.reset({"prompt": "ab", "bonus": 0.5}, 0) == Turn()
        last = made.step(Reply("cde", [1, 2], stop="length"))
        assert last.done and last.reward == 5.5
    with pytest.raises(ValueError, match="fn='maths' must be one of math, math_strict, code, code_unordered, "):
        SingleReply("maths")

    async def slow(prompt: str, answer: str, row: dict) -> float:
        return 1.0

    with pytest.raises(ValueError, match="must not be asynchronous"):
        SingleReply(slow)
    made = SingleReply()
    made.reset({"prompt": "1/4 + 1/4?", "solutions": ["#### 0.5"]}, 0)
    assert [made.step(Reply(text, [1])).reward for text in (r"\boxed{\frac{1}{2}}", r"\boxed{2}")] == [1.0, 0.0]


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_single_reply_has_the_score_of_a_verifier(name: str) -> None:
    """By the self-tests of the verifiers, through the processes of environments."""
    tests = VERIFIERS[name].self_test
    pool = EnvPool(EnvOptions("realhf.environments.single_reply:SingleReply", {"fn": name}, workers=2))
    rewards: dict[int, Any] = {}
    with closing(pool):
        for number, (_, row, _) in enumerate(tests):
            pool.reset(number, row, 0)
        deadline = time.monotonic() + 120
        while len(rewards) < len(tests):
            assert time.monotonic() < deadline, rewards
            for answer in pool.poll(5.0):
                if isinstance(answer.result, Turn) and not answer.result.done:
                    pool.step(answer.episode, Reply(tests[answer.episode][0], [1]))
                else:
                    rewards[answer.episode] = getattr(answer.result, "reward", answer.result)
                    pool.end(answer.episode)
    assert rewards == {number: score for number, (_, _, score) in enumerate(tests)}


def test_calls_have_a_cost() -> None:
    made = as_environment(CalculatorEnv)(call_cost=0.25)
    first = made.reset({"prompt": "6 * 7?", "answer": 42}, 0)
    assert first.messages[0]["content"] == "6 * 7?" and first.tools[0]["function"]["name"] == "calculate"
    text = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
    assert made.step(Reply(text, [1], TOOL_CALL_PARSERS["hermes"](text))).messages[0]["content"] == "42"
    assert made.step(Reply("It is 42.", [1])).reward == 0.75


ENVIRONMENT = """
from realhf.environments.tool_env import as_environment
from realhf.environments.tools import CalculatorEnv
from realhf.rewards.tools.python_tool import PythonTool

class Both(CalculatorEnv, PythonTool):
    def __init__(self, **options):
        CalculatorEnv.__init__(self, **options)
        PythonTool.__init__(self, memory_mb=512)

Environment = as_environment(Both)
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[EnvPool]:
    (tmp_path / "both.py").write_text(ENVIRONMENT)
    options = {"scorer": "realhf.rewards.tools.math_score:score_math", "call_cost": 0.5}
    made = EnvPool(EnvOptions(f"{tmp_path}/both.py:Environment", options, timeout=120.0))
    yield made
    made.close()


@programs
def test_an_episode_with_both_tools_in_a_child_process(pool: EnvPool) -> None:
    replies = [
        '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
        '<tool_call>{"name": "python", "arguments": {"code": "print(6*7)\\nopen(\'/etc/shadow\')"}}</tool_call>',
        r"It is \boxed{42} after 2 calls.",
    ]
    pool.reset(0, {"prompt": "6 * 7?", "answer": "42"}, 0)
    turns: list[Turn] = []
    deadline = time.monotonic() + 300
    while not turns or not turns[-1].done:
        assert time.monotonic() < deadline
        for answer in pool.poll(5.0):
            assert isinstance(answer.result, Turn), answer
            turns.append(answer.result)
            if not answer.result.done:
                pool.step(0, Reply(replies[len(turns) - 1], [1]))
    first, answers, last = turns
    assert [tool["function"]["name"] for tool in first.tools] == ["python", "calculate"]
    calculated, ran = (message["content"] for message in answers.messages)
    assert calculated == "42" and ran.startswith("42\nTraceback") and "Error: [Errno" in ran
    assert last.reward == 0.5 and last.info == {"tool_calls": 2.0, "tool_errors": 0.0}
