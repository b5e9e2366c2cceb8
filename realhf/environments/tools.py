"""Ready tools: a calculator, and a search over a local file; and an environment with a calculator. Imports no torch.

A class inherits a tool, or calls one in a method of its own. The tool that runs programs is
``realhf.rewards.tools.python_tool:PythonTool``.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from realhf.base.errors import UserError
from realhf.environments.loading import load_class

Number = Fraction | float
MAX_CHARS, MAX_DEPTH, MAX_BITS = 500, 100, 4096
"""Limits of an expression, and of the numerator and denominator of a result."""
MAX_FACTORIAL = 400
SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
WORD = re.compile(r"\w+")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
CONSTANTS = {"pi": math.pi, "e": math.e}


class CalculatorError(ValueError):
    """An expression without a value; the message is for the model."""


class Calculator:
    """A tool for arithmetic. Integers and fractions are exact; roots, logarithms and angles may be approximate."""

    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and brackets, and the functions sqrt, abs, min, max, round, floor,
                ceil, gcd, lcm, factorial, comb, log, log2, log10, exp, sin, cos, tan; for example (2 + 3) * sqrt(16)
        """
        return format_number(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression; CalculatorError for any other text, or one with too large numbers.

    The numbers of an expression are exact, unless a function such as ``sin`` gives an approximate one.
    """
    text = expression.strip().translate(SIGNS).replace("^", "**")
    if len(text) > MAX_CHARS:
        raise CalculatorError(f"the expression has more than {MAX_CHARS} characters")
    try:
        tree = ast.parse(text, mode="eval").body
        return _checked(_value(tree, 0))
    except CalculatorError:
        raise
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except SyntaxError as error:
        raise CalculatorError(f"the expression is not valid: {error.msg}") from None
    except (ValueError, TypeError, OverflowError, ArithmeticError) as error:
        raise CalculatorError(f"the expression has no value: {error}") from None
    except (RecursionError, MemoryError):
        raise CalculatorError("the expression is nested too deeply") from None


def format_number(value: Number) -> str:
    """Return an integer or a short decimal as such, and another fraction as ``1/3 = 0.333333333333 (rounded)``."""
    if isinstance(value, float):
        return f"{value:.12g} (rounded)" if not value.is_integer() or abs(value) >= 2**53 else str(int(value))
    if value.denominator == 1:
        return str(value.numerator)
    digits = _decimal_places(value.denominator)
    if digits is not None and digits <= 30:
        scaled = abs(value.numerator) * 10**digits // value.denominator
        whole, rest = divmod(scaled, 10**digits)
        return f"{'-' if value < 0 else ''}{whole}.{rest:0{digits}d}"
    try:
        return f"{value} = {float(value):.12g} (rounded)"
    except OverflowError:
        return str(value)


def _decimal_places(denominator: int) -> int | None:
    """Return the digits after the point of a fraction in lowest terms, or None if they do not end."""
    counts = []
    for factor in (2, 5):
        count = 0
        while denominator % factor == 0:
            denominator, count = denominator // factor, count + 1
        counts.append(count)
    return max(counts) if denominator == 1 else None


def _value(node: ast.AST, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise CalculatorError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=bool()):
            raise CalculatorError("an expression has numbers only")
        case ast.Constant(value=int() | float() as value):
            if not math.isfinite(value):
                raise CalculatorError("the number is too large")
            return Fraction(str(value))  # the decimal as it is written
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _checked(_power(_value(left, depth + 1), _value(right, depth + 1)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _checked(_as_number(OPERATORS[type(op)](_value(left, depth + 1), _value(right, depth + 1))))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _checked(_as_number(FUNCTIONS[name](*(_value(one, depth + 1) for one in arguments))))
        case ast.Call(func=ast.Name(id=name)):
            raise CalculatorError(f"there is no function {name!r}; the functions are: {', '.join(FUNCTIONS)}")
        case ast.Name(id=name):
            raise CalculatorError(f"an expression has numbers only, not {name!r}")
        case ast.Tuple():
            raise CalculatorError("the expression has a comma; write 1000 instead of 1,000")
        case _:
            raise CalculatorError(f"an expression has numbers only, not {type(node).__name__}")


def _as_number(value: Any) -> Number:
    return Fraction(value) if isinstance(value, int) else value


def _checked(value: Number) -> Number:
    if isinstance(value, complex):
        raise CalculatorError("the value is not a real number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculatorError("the value is too large, or undefined")
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError(f"the value is too large: it has more than {MAX_BITS} bits")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, float) or isinstance(exponent, float) or exponent.denominator != 1:
        if exponent == Fraction(1, 2):
            return _root(base)
        return float(base) ** float(exponent)
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > MAX_BITS * 2 and abs(base) not in (0, 1) or size * abs(exponent) > 2 * MAX_BITS and size > 1:
        raise CalculatorError("the power is too large")
    return base ** int(exponent)


def _root(value: Number) -> Number:
    """Return the square root, exact if it is a fraction."""
    if isinstance(value, Fraction) and value >= 0:
        roots = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if Fraction(roots[0] ** 2, roots[1] ** 2) == value:
            return Fraction(*roots)
    return math.sqrt(value)


def _integers(function: Callable[..., int], most: int = 0) -> Callable[..., int]:
    """Return a function of integers of size up to ``most``, if not 0; CalculatorError for other arguments."""

    def checked(*values: Number) -> int:
        if any(isinstance(value, float) or value.denominator != 1 or (most and abs(value) > most) for value in values):
            raise CalculatorError(f"{function.__name__} needs integers{f' of at most {most}' if most else ''}")
        return function(*map(int, values))

    return checked


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    if not -MAX_DEPTH <= digits <= MAX_DEPTH:
        raise CalculatorError(f"round needs at most {MAX_DEPTH} digits")
    return round(Fraction(value), int(digits))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": _root,
    "abs": abs,
    "min": min,
    "max": max,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "gcd": _integers(math.gcd),
    "lcm": _integers(math.lcm),
    "factorial": _integers(math.factorial, MAX_FACTORIAL),
    "comb": _integers(math.comb, MAX_FACTORIAL),
    **{name: getattr(math, name) for name in ("log", "log2", "log10", "exp", "sin", "cos", "tan")},
}


class Scorer(Protocol):
    """Scores the text of a final reply for a row: 1 if it is right, else 0."""

    def __call__(self, reply: str, row: dict[str, Any]) -> float: ...


def exact_match(reply: str, row: dict[str, Any]) -> float:
    """Return 1 if a reply is the text of ``row["answer"]``, or if its last number equals that number, else 0."""
    answer = str(row["answer"]).strip()
    given = NUMBER.findall(reply)
    numbers = [_fraction(text) for text in (given[-1] if given else "", answer)]
    return float(reply.strip() == answer or (None not in numbers and numbers[0] == numbers[1]))


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


class CalculatorEnv(Calculator):
    """Questions with a calculator: rows have ``prompt`` and ``answer``, and the final reply is scored.

    ``scorer`` is a function, or its name: ``realhf.rewards.tools.math_score:score_math`` is the verdict of
    ``reward.fn=math``. ``call_cost`` is subtracted for every call that runs.
    """

    def __init__(self, scorer: str | Scorer = exact_match, call_cost: float = 0.0) -> None:
        self._scorer: Scorer = load_class(scorer) if isinstance(scorer, str) else scorer
        self._call_cost, self._n_calls = call_cost, 0
        self._row: dict[str, Any] = {}

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self._row, self._n_calls = row, 0

    def calculate(self, expression: str) -> str:
        self._n_calls += 1
        return super().calculate(expression)

    calculate.__doc__ = Calculator.calculate.__doc__

    def get_reward(self, reply: str) -> float:
        return self._scorer(reply, self._row) - self._call_cost * self._n_calls


class SearchIndex:
    """A BM25 index over passages with ``text`` and optionally ``title``.

    UserError without words, or without the package ``bm25s`` (``pip install realhf[search]``).
    """

    def __init__(self, passages: list[dict[str, Any]]) -> None:
        try:
            import bm25s
        except ImportError:
            raise UserError("the search tool needs bm25s: pip install 'realhf[search]'") from None
        self.passages = passages
        self._vocabulary: dict[str, int] = {}
        texts = (f"{one.get('title', '')} {one['text']}" for one in passages)
        ids = [[self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words_of(text)] for text in texts]
        if not self._vocabulary:
            raise UserError("the passages to search have no words")
        self._index = bm25s.BM25()
        self._index.index((ids, self._vocabulary), create_empty_token=False, show_progress=False)

    def search(self, query: str, n: int) -> list[tuple[int, float]]:
        """Return the numbers and scores of the ``n`` best passages with a word of the query, best first."""
        ids = [self._vocabulary[word] for word in words_of(query) if word in self._vocabulary]
        scores = self._index.get_scores(ids).tolist() if ids else []
        found = [(number, score) for number, score in enumerate(scores) if score > 0]
        return sorted(found, key=lambda one: (-one[1], one[0]))[:n]


class Search:
    """A tool that finds passages by BM25 in a JSONL file of objects with ``text``, optionally ``id`` and ``title``.

    ``max_passage`` is in characters. UserError for an invalid file.
    """

    def __init__(self, corpus: str, n_results: int = 3, max_passage: int = 1000) -> None:
        self._index, self._n_results, self._max_passage = search_index(corpus), n_results, max_passage

    def search(self, query: str) -> str:
        """Find passages that contain the words of a query.

        Args:
            query: A few words that the passage contains
        """
        results = list[str]()
        for number, _ in self._index.search(query, self._n_results):
            one = self._index.passages[number]
            heading = " ".join(part for part in (f"[{one.get('id', number)}]", one.get("title", "")) if part)
            results.append(f"{heading}\n{one['text'][: self._max_passage]}")
        return "\n\n".join(results) or "No passage contains a word of the query."


@lru_cache(4)
def search_index(path: str) -> SearchIndex:
    """Return the index of a file, made once per process."""
    return SearchIndex(read_corpus(path))


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def read_corpus(path: str) -> list[dict[str, Any]]:
    """Return the passages of a JSONL file; UserError for an invalid line."""
    passages, problems = list[dict[str, Any]](), list[str]()
    if not Path(path).is_file():
        raise UserError(f"no such file: {path}")
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                problems.append(f"{path}:{number}: not valid JSON ({error})")
                continue
            if isinstance(value, dict) and isinstance(value.get("text"), str):
                title = value.get("title")
                passages.append({**value, "title": title if isinstance(title, str) else ""})
            elif line.strip():
                problems.append(f"{path}:{number}: it must be an object with a text 'text'")
    if problems:
        raise UserError(problems[:10])
    return passages
