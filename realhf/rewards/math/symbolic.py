r"""Symbolic equality by the Math-Verify library, which is imported only when no other check decides.

Comparisons of one response take SECONDS of processor time at most in the main thread. sympy can also hang where no
signal is handled, so judges run in child processes.
"""

import functools
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, permutations
from types import FrameType
from typing import Any

from realhf.rewards.math.exact_integers import exact_value
from realhf.rewards.math.normalize import is_wrapped
from realhf.rewards.math.quantities import OTHER_VALUE
from realhf.rewards.math.units import WORD, conversion, parse_unit, with_exponents

POINTS = (2, 3, 5, 7, 4, 6, 8)
DIFFERENCE = 1e-5  # of two values, relative; answers agree to six decimals
NOISE = 1e-9  # rounding of a value that is zero
SECONDS = 2.0
WALL_SECONDS = 15.0  # less than the default reward.timeout
MAX_CHARS = 400  # of an expression that is evaluated
MAX_DEPTH = 12  # of its brackets; the parser backtracks
UNSAFE = re.compile(
    r"\^\s*\{?\s*-?\d{4}"  # huge powers
    r"|\d\s*\^\s*\{?\s*\(?\s*\d+\s*\}?\s*\^|\^\s*\{?\s*\(?\s*\d+\s*!"  # towers of powers
    r"|\d{3}\s*\)*\s*!|!\s*\)*\s*!"  # huge factorials
    r"|\d{40}"
    r"|\d'"  # minutes of arc, feet
)
UNFINISHED = re.compile(r"\\(?:sum|prod|i*int|oint|lim|[cl]?dots)(?![a-z])")
WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
TAIL_UNIT = re.compile(r'\s*"[^"]*"(?:\s*(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d)|/|\\cdot(?![a-z])|"[^"]*"|[A-Za-z]+))*$')
DROPPED = re.compile(
    r"'|\\prime(?![a-z])|\^\s*\{?\s*(?:T|\\top)(?![A-Za-z])|(?<![A-Za-z\\])[fgh]\s*\^\s*\{-1"
)  # marks that Math-Verify ignores
DEGREES = re.compile(r'(\d+(?:\.\d+)?)\s*"degree"')
ANGLE = re.compile(r'(.+?)\s*"degree"', re.DOTALL)
TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
CONSTANTS = "CcKkA"  # of integration
NUMBERED = re.compile(r"[CcKk]_(?:\d|\{\d\})")  # of them
LETTERS = "ABCDKck"  # instead of C_1, C_2
MAX_CONSTANTS = 3
MULTIPLIERS = "kmn"  # of a period


class TimeUp(BaseException):
    """The time limit has passed; not an ``Exception``, because libraries catch those and continue."""


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

    compare(read(r"\sqrt{x}+\sin x"), read(r"\frac{x}{2}"))  # loads what sympy imports on first use
    return read, compare


def same_mathematics(given: str, gold: str) -> bool:
    """Return True if two expressions in normal notation are equal, to six decimals if either is decimal.

    Expressions that are too long, unbalanced, or too expensive to evaluate (``9^{99999}``) equal no other.
    """
    if (given_value := exact_value(given)) is not None and (gold_value := exact_value(gold)) is not None:
        return given_value == gold_value
    if TRIGONOMETRIC.search(given + gold):
        given, gold = (DEGREES.sub(r"(\\frac{\1\\pi}{180})", text) for text in (given, gold))
    if ('"degree"' in given) != ('"degree"' in gold) and "\\pi" in given + gold:
        given, gold = (ANGLE.sub(r"\\frac{\\pi}{180}(\1)", text) for text in (given, gold))
    without_units = _without_units(given, gold)
    if without_units is None:
        return False
    given, gold = without_units
    if UNFINISHED.search(given) and not UNFINISHED.search(gold):
        return False  # repeats the question
    if not (is_safe_for_sympy(given) and is_safe_for_sympy(gold)):
        return False
    if "C" in (_only(CONSTANTS, gold), _only(CONSTANTS, given)):
        given = with_constant_of(gold, given)
    if "\\pi" in gold:
        given = with_constant_of(gold, given, MULTIPLIERS)
    if len(DROPPED.findall(given)) != len(DROPPED.findall(gold)):
        return False
    library()
    try:
        with TIME_LIMIT.enforced():
            return any(_same_expression(form, gold) for form in _with_constants_of(gold, given))
    except TimeUp:
        return False


def _same_expression(given: str, gold: str) -> bool:
    symbols, gold_symbols = set(SYMBOL.findall(given)), set(SYMBOL.findall(gold))
    if any(symbol.swapcase() in gold_symbols - symbols for symbol in symbols - gold_symbols):
        return False  # Math-Verify ignores case
    read, compare = library()
    parsed = read(gold), read(given)
    if IMAGINARY.search(gold + " " + given):
        parsed = _with_imaginary_unit(parsed[0]), _with_imaginary_unit(parsed[1])
    if _differ(*parsed):
        return False
    return compare(*parsed) or _same_for_positive(*parsed)


def _with_constants_of(gold: str, given: str) -> list[str]:
    """Return the forms of an expression whose constants of integration have the names of the gold one's."""
    numbered = [list(dict.fromkeys(NUMBERED.findall(text))) for text in (given, gold)]
    if numbered[0] == numbered[1]:
        return [given]
    others = [set(SYMBOL.findall(NUMBERED.sub("", text))) for text in (given, gold)]
    own, new = numbered[0] or sorted(others[0] - others[1]), numbered[1] or sorted(others[1] - others[0])
    if len(own) != len(new) or len(own) > MAX_CONSTANTS or not all(s[0] in LETTERS for s in own + new):
        return [given]
    pattern = re.compile(rf"(\\[A-Za-z]+)|{'|'.join(map(re.escape, own))}")

    def renamed(names: dict[str, str]) -> str:
        return pattern.sub(lambda match: match[1] or names[match[0]], given)

    return [renamed(dict(zip(own, order, strict=True))) for order in permutations(new)]


def _without_units(given: str, gold: str) -> tuple[str, str] | None:
    """Return two expressions in the unit of the second, or None if their units are of different kinds."""
    tails = [with_exponents(tail.group()) if (tail := TAIL_UNIT.search(text)) else "" for text in (given, gold)]
    factor = conversion(*map(parse_unit, tails))
    if factor is None or OTHER_VALUE & set(WORD.findall(" ".join(tails))):
        return None
    given, gold = (TAIL_UNIT.sub("", text).replace('"', " ").strip() for text in (given, gold))
    return (given if factor == 1 else rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}({given})"), gold


def _differ(gold: list, given: list, sign: int = 1) -> bool:
    """Return True if two expressions have different values at all points of a few with integer coordinates.

    Simplification can take long to find that two expressions differ; values are cheap. At a pole they are noise.
    """
    from sympy import Expr

    if not (gold and given and isinstance(gold[0], Expr) and isinstance(given[0], Expr)):
        return False
    symbols = sorted(gold[0].free_symbols | given[0].free_symbols, key=str)
    is_different = False
    for shift in range(3):
        point = {symbol: sign * POINTS[(i + shift) % len(POINTS)] for i, symbol in enumerate(symbols)}
        try:
            a, b = (part[0].evalf(subs=point) for part in (gold, given))
        except Exception:  # sympy raises many kinds for values that are too large
            continue
        if a.is_Float and b.is_Float:
            if abs(a - b) <= DIFFERENCE * max(abs(a), abs(b), NOISE / DIFFERENCE):
                return False
            is_different = True
    return is_different


def _same_for_positive(gold: list, given: list) -> bool:
    r"""Return True if two expressions are equal where both are real, as ``\ln(x/y)`` and ``\ln x-\ln y`` are."""
    from sympy import Expr, Symbol, expand_log, simplify

    if not (gold and given and isinstance(gold[0], Expr) and isinstance(given[0], Expr)):
        return False
    symbols = gold[0].free_symbols
    if not symbols or symbols != given[0].free_symbols or _differ(gold, given, sign=-1):
        return False
    positive = {symbol: Symbol(f"{symbol}", positive=True) for symbol in symbols}
    return bool(simplify(expand_log((gold[0] - given[0]).subs(positive))) == 0)


def _with_imaginary_unit(parsed: list) -> list:
    """Return the expressions with the symbol i as the imaginary unit."""
    unit = library()[0](r"\sqrt{-1}")[0].doit()

    def replaced(part: Any) -> Any:
        return part.subs({symbol: unit for symbol in part.free_symbols if str(symbol) == "i"})

    return [replaced(part) if hasattr(part, "free_symbols") else part for part in parsed]


class TimeLimit:
    """Limits the comparisons of one response together; without effect outside the main thread.

    ``seconds`` limits processor time, so that verdicts do not depend on the load; ``wall_seconds`` limits blocking.
    """

    def __init__(self, seconds: float = SECONDS, wall_seconds: float = WALL_SECONDS) -> None:
        self._limits = {signal.ITIMER_PROF: seconds, signal.ITIMER_REAL: wall_seconds}
        self._left: dict[int, float] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Limit the comparisons in the block together; outside of such a block there is no limit."""
        self._left = dict(self._limits)
        try:
            yield
        finally:
            self._left = {}

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Raise ``TimeUp`` in the block when no time is left."""
        if threading.current_thread() is not threading.main_thread() or not self._left:
            yield
            return

        def stop(signum: int, frame: FrameType | None) -> None:
            self._left = dict.fromkeys(self._left, 0.0)
            raise TimeUp

        if min(self._left.values()) <= 0:
            raise TimeUp
        previous = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
        for timer, left in self._left.items():
            signal.setitimer(timer, left, 1.0)  # again if the first exception was lost in a destructor
        try:
            yield
        finally:
            for timer, left in self._left.items():
                self._left[timer] = min(left, signal.setitimer(timer, 0)[0])
            for number, handler in previous.items():
                signal.signal(number, handler)


TIME_LIMIT = TimeLimit()


def is_safe_for_sympy(text: str) -> bool:
    """Return True if the text is an expression that can be evaluated in reasonable time."""
    if not text or len(text) > MAX_CHARS or UNSAFE.search(text) or WORDS.search(text):
        return False
    without_escapes = re.sub(r"\\.", "", text)
    if max(accumulate((char in "([{") - (char in ")]}") for char in without_escapes), default=0) > MAX_DEPTH:
        return False
    return is_wrapped(f"{{{without_escapes}}}", "{", "}")  # true if its own braces are balanced


def with_constant_of(gold: str, given: str, letters: str = CONSTANTS) -> str:
    """Return an expression with the gold one's letter if both have only one of the letters."""
    if (old := _only(letters, given)) and (new := _only(letters, gold)):
        return re.sub(rf"(\\[A-Za-z]+)|{old}", lambda match: match[1] or new, given)
    return given


def _only(letters: str, text: str) -> str:
    """Return the only symbol of ``text`` that is one of the letters, or "" if there is none or several."""
    found = [symbol for symbol in SYMBOL.findall(text) if symbol in letters]
    return found[0] if len(found) == 1 else ""
