"""Judges programs: extracts the code of a response, runs it in a sandbox, and compares outputs with expected ones.

Outputs are compared outside the program's process. A row has ``input_output`` (``inputs``, ``outputs``, optionally
``fn_name``) as in APPS, or ``stub``, ``test`` and ``entry_point`` as in HumanEval.
"""

import inspect
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import closing
from decimal import Decimal
from itertools import chain
from typing import Any

from realhf.api.code_tests import CodeTests, parse_code_tests
from realhf.base.errors import kind_of
from realhf.rewards.code import harness
from realhf.rewards.code.extract_code import complete_stub, extract_code
from realhf.rewards.code.harness import decode, encode
from realhf.rewards.sandbox.sandbox import Program, ProgramResult, ProgramStopped, Reason, Sandbox
from realhf.rewards.verdict import ScoreWithReason

DEADLINE_FRACTION = 0.9  # the verdict must precede the deadline at which the judge is killed
MAX_EXACT = 2**53  # larger integers are not all floats

INTEGER = re.compile(r"[+-]?\d+")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
PASSED = b'"passed"'


class CodeJudge:
    """Judges programs until the first failed test, with ``seconds`` per response and ``test_seconds`` per test.

    With ``unordered``, an output also passes if it has the same set of words as the expected one. UserError if this
    machine cannot isolate programs.
    """

    def __init__(self, seconds: float, test_seconds: float = math.inf, unordered: bool = False) -> None:
        self.sandbox = Sandbox()
        self._harness = inspect.getsource(harness)
        self._seconds, self._test_seconds = seconds * DEADLINE_FRACTION, test_seconds
        self._unordered = unordered
        self.sandbox.open()

    def __call__(self, prompt: str, answer: str, row: Mapping[str, Any]) -> ScoreWithReason:
        """Return 1.0 if the program in ``answer``, a response, passes all tests of ``row``, else 0.0.

        ``ValueError`` for a row without valid tests.
        """
        reason = self.judge(answer, row).reason
        return ScoreWithReason(float(reason is Reason.ok), reason.value)

    def judge(self, response: str, row: Mapping[str, Any]) -> ProgramResult:
        """Return how the program in ``response`` ended: ok if it passed all tests."""
        tests = parse_code_tests(row["input_output"]) if "input_output" in row else None
        if tests is None:
            check_stub(row)
            source = complete_stub(row["stub"], response, row["entry_point"])
        else:
            source = extract_code(response, tests.fn_name)
        if source is None:
            return ProgramResult(Reason.no_program, detail="the response contains no Python program")
        deadline = time.monotonic() + self._seconds
        try:
            if tests is None:
                return self._check(source, row, deadline)
            return (self._call if tests.fn_name else self._run)(source, tests, deadline)
        except ProgramStopped as stopped:
            return stopped.result

    def _run(self, source: str, tests: CodeTests, deadline: float) -> ProgramResult:
        for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
            result = self.sandbox.run(source, stdin, self._limit(deadline))
            if result.reason is not Reason.ok:
                return result
            if not same_output(result.stdout, expected, self._unordered):
                detail = f"{result.stdout!r:.200} instead of {expected!r:.200}"
                return ProgramResult(Reason.wrong, result.stdout, detail)
        return ProgramResult(Reason.ok)

    def _call(self, source: str, tests: CodeTests, deadline: float) -> ProgramResult:
        load = json.dumps({"do": "call", "source": source, "name": tests.fn_name}).encode() + b"\n"
        with closing(self.sandbox.start(self._harness, self._seconds)) as program:
            for text, expected in zip(tests.inputs, tests.outputs, strict=True):
                arguments = [json.loads(line) for line in text.splitlines() if line.strip()]
                line = json.dumps(encode((arguments, {}))).encode()
                value = value_of(program.ask(load + line, self._limit(deadline)))
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
            while (arguments := ask_test(test, line, self._limit(deadline))) != PASSED:
                line = program.ask(load + arguments, self._limit(deadline))
                load = b""
        return ProgramResult(Reason.ok)

    def _limit(self, deadline: float) -> float:
        """Return the time limit of the next test in seconds."""
        return max(0.0, min(self._test_seconds, deadline - time.monotonic()))


def ask_test(test: Program, line: bytes, seconds: float) -> bytes:
    """Return the next line of the test; an exception in the test means that the program is wrong."""
    try:
        return test.ask(line, seconds)
    except ProgramStopped as stopped:
        if stopped.result.reason is Reason.error:
            raise ProgramStopped(ProgramResult(Reason.wrong, detail=stopped.result.detail)) from None
        raise


def check_stub(row: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a row without tests and without a stub with a test."""
    for key in ("stub", "test", "entry_point"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise ValueError(f"the row has no 'input_output', and no text {key!r}: {key!r} is {kind_of(row.get(key))}")


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
    return list(map(len, lines)) == list(map(len, others)) and all(map(same_word, chain(*lines), chain(*others)))


def same_word(word: str, expected: str) -> bool:
    """Return True if two words are equal. A number equals an integer exactly, and a decimal up to rounding."""
    if word == expected:
        return True
    if not (NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)):
        return False
    if INTEGER.fullmatch(expected):
        return not INTEGER.fullmatch(word) and Decimal(word) == Decimal(expected)
    return math.isfinite(float(expected)) and is_close(float(word), float(expected))


def same_value(value: object, expected: object) -> bool:
    """Return True if a value equals a JSON one; tuples equal lists, keys their JSON text.

    Two floats may differ by rounding. An integer equals a float only if the float represents it exactly, and a boolean
    equals no number.
    """
    match value, expected:
        case ((list() | tuple()), list()):
            return len(value) == len(expected) and all(map(same_value, value, expected))
        case dict(), dict():
            plain = (bool, int, float, type(None))
            named = {json.dumps(key) if isinstance(key, plain) else key: content for key, content in value.items()}
            return named.keys() == expected.keys() and all(same_value(named[key], expected[key]) for key in expected)
        case (bool(), _) | (_, bool()):
            return value is expected
        case float(), float():
            return is_close(value, expected)
        case float(), int():
            return abs(value) <= MAX_EXACT and value == expected
    return value == expected


def is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-5, abs_tol=1e-8)
