"""Judges programs: extracts the code of a response, runs it in a sandbox, and compares outputs with expected ones.

Outputs are compared outside the program's process. A row has ``input_output`` (``inputs``, ``outputs``, optionally
``fn_name``) as in APPS, or ``stub``, ``test`` and ``entry_point`` as in HumanEval.
"""

import ast
import inspect
import json
import math
import re
import time
import warnings
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from realhf.rewards.code import harness
from realhf.rewards.code.harness import decode, encode
from realhf.rewards.sandbox.sandbox import Program, ProgramResult, ProgramStopped, Reason, Sandbox
from realhf.rewards.verdict import ScoreWithReason

TEST_SECONDS = 6.0
DEADLINE_FRACTION = 0.9  # the verdict must precede the deadline at which the judge is killed
MIN_CHARS = 20  # of a program in a fence, if there is a longer one

FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("", "python", "python3", "py")
UNINDENTED = re.compile(r"\n(?=\S)")
INTEGER = re.compile(r"[+-]?\d+")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
PASSED = b'"passed"'


class CodeJudge:
    """Judges programs until the first failed test, with ``seconds`` per response and TEST_SECONDS per test.

    With ``unordered``, an output also passes if it has the same set of words as the expected one. UserError if this
    machine cannot isolate programs.
    """

    def __init__(self, seconds: float, unordered: bool = False) -> None:
        self.sandbox = Sandbox()
        self._harness = inspect.getsource(harness)
        self._seconds = seconds * DEADLINE_FRACTION
        self._unordered = unordered
        self.sandbox.open()

    def __call__(self, prompt: str, answer: str, row: Mapping[str, Any]) -> ScoreWithReason:
        """Return 1.0 if the program in ``answer``, a response, passes all tests of ``row``, else 0.0."""
        reason = self.judge(answer, row).reason
        return ScoreWithReason(float(reason is Reason.ok), reason.value)

    def judge(self, response: str, row: Mapping[str, Any]) -> ProgramResult:
        """Return how the program in ``response`` ended: ok if it passed all tests."""
        has_stub = "input_output" not in row
        source = complete_stub(row["stub"], response, row["entry_point"]) if has_stub else extract_code(response)
        if source is None:
            return ProgramResult(Reason.no_program, detail="the response contains no Python program")
        deadline = time.monotonic() + self._seconds
        try:
            if has_stub:
                return self._check(source, row, deadline)
            tests = json.loads(row["input_output"])
            return (self._call if "fn_name" in tests else self._run)(source, tests, deadline)
        except ProgramStopped as stopped:
            return stopped.result

    def _run(self, source: str, tests: Mapping[str, Any], deadline: float) -> ProgramResult:
        for stdin, expected in zip(tests["inputs"], tests["outputs"], strict=True):
            result = self.sandbox.run(source, stdin, seconds_left(deadline))
            if result.reason is not Reason.ok:
                return result
            if not same_output(result.stdout, expected, self._unordered):
                return ProgramResult(
                    Reason.wrong, result.stdout, f"{result.stdout!r:.200} instead of {expected!r:.200}"
                )
        return ProgramResult(Reason.ok)

    def _call(self, source: str, tests: Mapping[str, Any], deadline: float) -> ProgramResult:
        load = json.dumps({"do": "call", "source": source, "name": tests["fn_name"]}).encode() + b"\n"
        with closing(self.sandbox.start(self._harness, self._seconds)) as program:
            for text, expected in zip(tests["inputs"], tests["outputs"], strict=True):
                arguments = [json.loads(line) for line in text.splitlines() if line.strip()]
                line = json.dumps(encode((arguments, {}))).encode()
                value = value_of(program.ask(load + line, seconds_left(deadline)))
                load = b""
                if not same_value(value, json.loads(expected)):
                    return ProgramResult(Reason.wrong, detail=f"{value!r:.200} instead of {expected:.200}")
        return ProgramResult(Reason.ok)

    def _check(self, source: str, row: Mapping[str, Any], deadline: float) -> ProgramResult:
        """Run a test in one process and the tested function in another."""
        name = row["entry_point"]
        load = json.dumps({"do": "call", "source": source, "name": name}).encode() + b"\n"
        line = json.dumps({"do": "check", "source": row["stub"], "test": row["test"], "name": name}).encode()
        with (
            closing(self.sandbox.start(self._harness, self._seconds)) as program,
            closing(self.sandbox.start(self._harness, self._seconds)) as test,
        ):
            while (arguments := ask_test(test, line, seconds_left(deadline))) != PASSED:
                line = program.ask(load + arguments, seconds_left(deadline))
                load = b""
        return ProgramResult(Reason.ok)


def ask_test(test: Program, line: bytes, seconds: float) -> bytes:
    """Return the next line of the test; an exception in the test means that the program is wrong."""
    try:
        return test.ask(line, seconds)
    except ProgramStopped as stopped:
        if stopped.result.reason is Reason.error:
            raise ProgramStopped(ProgramResult(Reason.wrong, detail=stopped.result.detail)) from None
        raise


def seconds_left(deadline: float) -> float:
    """Return the time limit of the next test."""
    return max(0.0, min(TEST_SECONDS, deadline - time.monotonic()))


def extract_code(response: str) -> str | None:
    """Return the last fenced block that is Python, else the whole response if it is Python, else None.

    Blocks of at least MIN_CHARS characters are preferred. An unclosed fence extends to the end of the text.
    """
    blocks = [block for block in fenced_blocks(response) if block.strip() and is_python(block)]
    long = [block for block in blocks if len(block.strip()) >= MIN_CHARS]
    if blocks:
        return (long or blocks)[-1]
    return response if response.strip() and is_python(response) else None


def fenced_blocks(response: str) -> list[str]:
    """Return the contents of all fences that are not marked as another language."""
    return [block for language, block in FENCE.findall(response) if language.strip().lower() in PYTHON]


def complete_stub(stub: str, response: str, name: str) -> str | None:
    """Return ``stub`` followed by the response, which is the body of its function ``name`` or defines it again.

    The last fenced block that defines the function is used, else the last block. Without a fence, text after the
    function is dropped if the whole is not Python.
    """
    fences = fenced_blocks(response)
    defining = [block for block in fences if re.search(rf"^def {name}\b", block, re.MULTILINE)]
    blocks = (defining or fences)[-1:] or [response, UNINDENTED.split(response, maxsplit=1)[0]]
    start = stub if stub.endswith("\n") else stub + "\n"
    return next((start + block for block in blocks if block.strip() and is_python(start + block)), None)


def is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def value_of(reply: bytes) -> object:
    """Return the value in a reply of the harness; ProgramStopped if it is invalid."""
    try:
        return decode(json.loads(reply))
    except (ValueError, TypeError, RecursionError):
        raise ProgramStopped(ProgramResult(Reason.error, detail=f"invalid result: {reply!r:.100}")) from None


def same_output(output: str, expected: str, unordered: bool = False) -> bool:
    """Return True if all words on non-blank lines are equal up to rounding, or with ``unordered`` the sets of words."""
    if unordered and set(output.split()) == set(expected.split()):
        return True
    lines, others = ([line.split() for line in text.split("\n") if line.strip()] for text in (output, expected))
    return [len(line) for line in lines] == [len(line) for line in others] and all(
        same_word(a, b) for line, other in zip(lines, others, strict=True) for a, b in zip(line, other, strict=True)
    )


def same_word(word: str, expected: str) -> bool:
    """Return True if two words are equal; numbers may differ by rounding unless both are integers."""
    if word == expected:
        return True
    if not (NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)):
        return False
    if INTEGER.fullmatch(word) and INTEGER.fullmatch(expected):
        return False
    return math.isfinite(float(expected)) and is_close(float(word), float(expected))


def same_value(value: object, expected: object) -> bool:
    """Return True if a value equals a JSON one; tuples equal lists, keys their JSON text, floats may be rounded."""
    match value, expected:
        case ((list() | tuple()), list()):
            return len(value) == len(expected) and all(map(same_value, value, expected))
        case dict(), dict():
            plain = (bool, int, float, type(None))
            named = {json.dumps(key) if isinstance(key, plain) else key: content for key, content in value.items()}
            return named.keys() == expected.keys() and all(same_value(named[key], expected[key]) for key in expected)
        case int() | float(), int() | float() if isinstance(value, float) or isinstance(expected, float):
            return is_close(value, expected)
    return value == expected


def is_close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=1e-5, abs_tol=1e-8)
    except OverflowError:  # an integer too large for a float
        return False
