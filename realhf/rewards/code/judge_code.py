"""Judges programs: finds the code in an answer, runs it in a sandbox, and compares what it gives with what is wanted.

Comparison is ours, outside of the program's process. A row holds ``input_output`` (``inputs``, ``outputs``, and perhaps
``fn_name``), or, like HumanEval, ``stub``, ``test`` and ``entry_point``.
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
from realhf.rewards.sandbox.sandbox import Program, ProgramResult, Reason, Sandbox, ServerExited
from realhf.rewards.verdict import ScoreWithReason

TEST_SECONDS = 6.0
SHARE = 0.9  # of an answer's deadline: the verdict must come before the judge is killed over it
SHORTEST = 20  # characters of a program in a fence

FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = ("", "python", "python3", "py")
UNINDENTED = re.compile(r"\n(?=\S)")
INTEGER = re.compile(r"[+-]?\d+")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
PASSED = b'"passed"'


class CodeJudge:
    """Judges programs, with ``seconds`` for an answer and TEST_SECONDS for each test; the first failure ends it.

    With ``lax``, an output also passes when it has the wanted words in any order.
    """

    def __init__(self, seconds: float, lax: bool = False) -> None:
        self.sandbox = Sandbox()
        self._harness = inspect.getsource(harness)
        self._seconds = seconds * SHARE
        self._lax = lax

    def __call__(self, prompt: str, answer: str, row: Mapping[str, Any]) -> ScoreWithReason:
        """Return 1.0 when the program in ``answer`` passes all tests of ``row``, else 0.0, with the reason."""
        reason = self.judge(answer, row).reason
        return ScoreWithReason(float(reason is Reason.ok), reason.value)

    def ready(self) -> "CodeJudge":
        """Start the sandbox now; UserError where programs cannot be shut in."""
        self.sandbox.open()
        return self

    def judge(self, answer: str, row: Mapping[str, Any]) -> ProgramResult:
        """Return how the program in ``answer`` fared: ok when it passed all tests."""
        has_stub = "input_output" not in row
        source = completed(row["stub"], answer, row["entry_point"]) if has_stub else extract_code(answer)
        if source is None:
            return ProgramResult(Reason.no_program, detail="the answer holds no Python program")
        deadline = time.monotonic() + self._seconds
        try:
            if has_stub:
                return self._check(source, row, deadline)
            tests = json.loads(row["input_output"])
            return (self._call if "fn_name" in tests else self._run)(source, tests, deadline)
        except ServerExited as stopped:
            return stopped.outcome

    def _run(self, source: str, tests: Mapping[str, Any], deadline: float) -> ProgramResult:
        """Run a script once for every input."""
        for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
            outcome = self.sandbox.run(source, given, seconds_left(deadline))
            if outcome.reason is not Reason.ok:
                return outcome
            if not same_output(outcome.stdout, wanted, self._lax):
                return ProgramResult(
                    Reason.wrong, outcome.stdout, f"{outcome.stdout!r:.200} instead of {wanted!r:.200}"
                )
        return ProgramResult(Reason.ok)

    def _call(self, source: str, tests: Mapping[str, Any], deadline: float) -> ProgramResult:
        """Call a function once for every input."""
        load = json.dumps({"do": "call", "source": source, "name": tests["fn_name"]}).encode() + b"\n"
        with closing(self.sandbox.start(self._harness, self._seconds)) as program:
            for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True):
                arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
                line = json.dumps(encode((arguments, {}))).encode()
                value = value_of(program.ask(load + line, seconds_left(deadline)))
                load = b""
                if not same_value(value, json.loads(wanted)):
                    return ProgramResult(Reason.wrong, detail=f"{value!r:.200} instead of {wanted:.200}")
        return ProgramResult(Reason.ok)

    def _check(self, source: str, row: Mapping[str, Any], deadline: float) -> ProgramResult:
        """Run a test in one process, and the function that it tests in another."""
        name = row["entry_point"]
        load = json.dumps({"do": "call", "source": source, "name": name}).encode() + b"\n"
        line = json.dumps({"do": "check", "source": row["stub"], "test": row["test"], "name": name}).encode()
        with (
            closing(self.sandbox.start(self._harness, self._seconds)) as program,
            closing(self.sandbox.start(self._harness, self._seconds)) as test,
        ):
            while (asked := ask_test(test, line, seconds_left(deadline))) != PASSED:
                line = program.ask(load + asked, seconds_left(deadline))
                load = b""
        return ProgramResult(Reason.ok)


def ask_test(test: Program, line: bytes, seconds: float) -> bytes:
    """Return what the test says next; a test that raises has found something wrong."""
    try:
        return test.ask(line, seconds)
    except ServerExited as stopped:
        if stopped.outcome.reason is Reason.error:
            raise ServerExited(ProgramResult(Reason.wrong, detail=stopped.outcome.detail)) from None
        raise


def seconds_left(deadline: float) -> float:
    """Return the seconds that one test may take."""
    return max(0.0, min(TEST_SECONDS, deadline - time.monotonic()))


def extract_code(answer: str) -> str | None:
    """Return the last fenced block that is Python, if possible one of SHORTEST characters, else a whole answer that is.

    A fence without an end goes to the end of the text.
    """
    blocks = [block for block in fenced(answer) if block.strip() and parses(block)]
    long = [block for block in blocks if len(block.strip()) >= SHORTEST]
    if blocks:
        return (long or blocks)[-1]
    return answer if answer.strip() and parses(answer) else None


def fenced(answer: str) -> list[str]:
    """Return the contents of all fences that are not marked as another language."""
    return [block for language, block in FENCE.findall(answer) if language.strip().lower() in PYTHON]


def completed(stub: str, answer: str, name: str) -> str | None:
    """Return ``stub`` with the answer behind it: the rest of its function ``name``, or that function once more.

    The last fenced block that defines it counts, else the last one; of an answer without a fence that is no Python,
    what follows the function is left out.
    """
    fences = fenced(answer)
    defining = [block for block in fences if re.search(rf"^def {name}\b", block, re.MULTILINE)]
    blocks = (defining or fences)[-1:] or [answer, UNINDENTED.split(answer, maxsplit=1)[0]]
    start = stub if stub.endswith("\n") else stub + "\n"
    return next((start + block for block in blocks if block.strip() and parses(start + block)), None)


def parses(text: str) -> bool:
    """Say whether ``text`` is Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its odd escapes
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def value_of(reply: bytes) -> object:
    """Return the result that a program wrote; Stopped when that is none."""
    try:
        return decode(json.loads(reply))
    except (ValueError, TypeError, RecursionError):
        raise ServerExited(ProgramResult(Reason.error, detail=f"its result is no value: {reply!r:.100}")) from None


def same_output(given: str, wanted: str, lax: bool = False) -> bool:
    """Say whether two outputs agree: word for word in every line that is not blank, numbers up to rounding.

    With ``lax``, it is enough that the same words occur.
    """
    if lax and set(given.split()) == set(wanted.split()):
        return True
    ours, theirs = ([line.split() for line in text.split("\n") if line.strip()] for text in (given, wanted))
    return [len(line) for line in ours] == [len(line) for line in theirs] and all(
        same_word(a, b) for line, other in zip(ours, theirs, strict=True) for a, b in zip(line, other, strict=True)
    )


def same_word(given: str, wanted: str) -> bool:
    """Say whether two words agree; integers do so exactly, other numbers up to rounding."""
    if given == wanted:
        return True
    if not (NUMBER.fullmatch(given) and NUMBER.fullmatch(wanted)):
        return False
    if INTEGER.fullmatch(given) and INTEGER.fullmatch(wanted):
        return False
    return math.isfinite(float(wanted)) and close(float(given), float(wanted))


def same_value(given: object, wanted: object) -> bool:
    """Say whether a result agrees with a JSON value; tuples are lists, keys their JSON text, floats may be rounded."""
    match given, wanted:
        case ((list() | tuple()), list()):
            return len(given) == len(wanted) and all(map(same_value, given, wanted))
        case dict(), dict():
            plain = (bool, int, float, type(None))
            named = {json.dumps(key) if isinstance(key, plain) else key: value for key, value in given.items()}
            return named.keys() == wanted.keys() and all(same_value(named[key], wanted[key]) for key in wanted)
        case int() | float(), int() | float() if isinstance(given, float) or isinstance(wanted, float):
            return close(given, wanted)
    return given == wanted


def close(given: float, wanted: float) -> bool:
    """Say whether two numbers agree up to rounding."""
    try:
        return math.isclose(given, wanted, rel_tol=1e-5, abs_tol=1e-8)
    except OverflowError:  # an integer that no float can hold
        return False
