r"""Symbolic equality by the Math-Verify library, which is imported only when no other check decides.

There is no time limit here: sympy hangs on ``9^99999999``, so judges run in child processes.
"""

import functools
import logging
import re
from collections.abc import Callable

MAX_CHARS = 400  # of an expression that is evaluated
ENDLESS = re.compile(
    r"\^\s*\{?\s*-?\d{4}"  # huge powers
    r"|\d\s*\^\s*\{?\s*\(?\s*\d+\s*\}?\s*\^|\^\s*\{?\s*\(?\s*\d+\s*!"  # towers of powers
    r"|\d{3}\s*\)*\s*!|!\s*\)*\s*!"  # huge factorials
    r"|\d{40}"
)
UNFINISHED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|[cl]?dots)(?![a-z])")
WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
TAIL_UNIT = re.compile(r'\s*"[^"]*"(?:\s*\^\s*\{?\s*\d\s*\}?)?$')
CONSTANT = re.compile(r"(?<![A-Za-z\\])[CcKk](?![A-Za-z])")


@functools.cache
def library() -> tuple[Callable[[str], list], Callable[[list, list], bool]]:
    """Return Math-Verify's ``parse`` and ``verify`` for one formula; the first call takes a second or more."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    keep_units = LatexExtractionConfig(normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    ))  # fmt: skip

    def read(formula: str) -> list:
        return parse(f"${formula}$", [keep_units], parsing_timeout=None)

    def compare(gold: list, given: list) -> bool:
        return verify(gold, given, timeout_seconds=None, allow_set_relation_comp=True)

    return read, compare


def same_mathematics(given: str, gold: str) -> bool:
    """Return True if two expressions in normal notation are equal, to six decimals if either is decimal.

    Expressions that are too long, unbalanced, or too expensive to evaluate (``9^{99999}``) equal no other.
    """
    given, gold = (TAIL_UNIT.sub("", text).replace('"', " ").strip() for text in (given, gold))
    if UNFINISHED.search(given) and not UNFINISHED.search(gold):
        return False  # repeats the question
    if not (is_safe_for_sympy(given) and is_safe_for_sympy(gold)):
        return False
    if constant_of(gold) == "C" and (letter := constant_of(given)):
        given = re.sub(rf"(?<![A-Za-z\\]){letter}(?![A-Za-z])", "C", given)
    read, compare = library()
    return compare(read(gold), read(given))


def is_safe_for_sympy(text: str) -> bool:
    """Return True if the text is an expression that can be evaluated in reasonable time."""
    if not text or len(text) > MAX_CHARS or ENDLESS.search(text) or WORDS.search(text):
        return False
    depth = 0
    for char in re.sub(r"\\.", "", text):
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0


def constant_of(text: str) -> str:
    """Return the constant of integration, ``C`` or ``K`` in either case, or "" unless there is exactly one."""
    letters = CONSTANT.findall(text)
    return letters[0] if len(letters) == 1 else ""
