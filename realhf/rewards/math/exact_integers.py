r"""Exact values of arithmetic with integers, such as ``2^{2024}-1`` or ``\frac{3^{1000}+1}{2}``."""

import math
import re
from fractions import Fraction

MAX_CHARS = 400  # of an expression
MAX_BITS = 200_000  # of a number during evaluation
BRACKETS = {"(": ")", "{": "}"}
TOKEN = re.compile(r"\s*(\d+|\\frac|\\binom|\\cdot|\\times|\\div|[-+*/^!(){}])")


def exact_value(text: str) -> Fraction | None:
    """Return the value of an expression in normal notation, or None."""
    if len(text) > MAX_CHARS:
        return None
    try:
        parser = _Parser(text)
        value = parser.sum()
        return value if parser.next is None else None
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


class _Parser:
    """Recursive descent over the tokens of one expression; ValueError if it is none, or its value is too large."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        end = 0
        while (match := TOKEN.match(text, end)) is not None:
            self._tokens.append(match.group(1))
            end = match.end()
        if text[end:].strip() or not self._tokens:
            raise ValueError
        self._tokens.reverse()

    @property
    def next(self) -> str | None:
        return self._tokens[-1] if self._tokens else None

    def take(self, *expected: str) -> str:
        if self.next is None or (expected and self.next not in expected):
            raise ValueError
        return self._tokens.pop()

    def sum(self) -> Fraction:
        negative = self.next in ("-", "+") and self.take() == "-"
        value = -self.product() if negative else self.product()
        while self.next in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.power()
        while self.next is not None and self.next not in ("+", "-", ")", "}"):
            if self.next in ("/", "\\div"):
                self.take()
                value /= self.power()
            else:
                if self.next in ("*", "\\cdot", "\\times"):
                    self.take()
                elif self.next.isdigit():
                    raise ValueError  # 2 3
                value *= self.power()
                if _bits(value) > MAX_BITS:
                    raise ValueError
        return value

    def power(self) -> Fraction:
        base = self.factorial()
        if self.next != "^":
            return base
        self.take()
        exponent = self.braced() if self.next == "{" else self.factorial()
        if exponent.denominator != 1 or (not base and exponent < 0):
            raise ValueError
        if _bits(base) * abs(exponent) > MAX_BITS:
            raise ValueError
        return base ** int(exponent)

    def factorial(self) -> Fraction:
        value = self.atom()
        if self.next == "!":
            self.take()
            if value.denominator != 1 or not 0 <= value <= 3000 or self.next == "!":
                raise ValueError
            value = Fraction(math.factorial(int(value)))
        return value

    def atom(self) -> Fraction:
        token = self.take()
        if token.isdigit():
            return Fraction(int(token))
        if token in BRACKETS:
            return self.until(BRACKETS[token])
        if token == "\\frac":
            return self.braced() / self.braced()
        if token == "\\binom":
            n, k = self.braced(), self.braced()
            if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= 5000:
                raise ValueError
            return Fraction(math.comb(int(n), int(k)))
        raise ValueError

    def braced(self) -> Fraction:
        self.take("{")
        return self.until("}")

    def until(self, closing: str) -> Fraction:
        value = self.sum()
        self.take(closing)
        return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
