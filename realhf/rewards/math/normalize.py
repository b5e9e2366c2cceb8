r"""Normalizes answers to one notation: signs, spaces, brackets, fractions, roots, text, degrees.

``\text{}`` after mathematics becomes words in double quotes, so that the unit in ``5\text{ m}`` differs from the
variable in ``5m``.
"""

import re

SIGNS = {
    **dict.fromkeys([0x2212, 0x2010, 0x2011, 0x2012, 0x2013, 0xFE63, 0xFF0D], "-"),
    **dict.fromkeys([0x00A0, 0x2007, 0x2009, 0x202F], "\\,"),
    **dict.fromkeys([0x00F7, 0x2044, 0x2215, 0xFF0F], "/"),
    0x20AC: " eur ", 0x00A3: " gbp ", 0x00A5: " jpy ", 0x20B9: " inr ",
    **{0xFF10 + i: str(i) for i in range(10)},
    0xFF0C: ",", 0xFF0E: ".", 0xFF08: "(", 0xFF09: ")", 0xFF1D: "=", 0xFF0B: "+", 0xFF05: "%",
    0x00D7: "\\times ", 0x22C5: "\\cdot ", 0x00B7: "\\cdot ", 0x03C0: "\\pi ", 0x221E: "\\infty ", 0x00B1: "\\pm ",
    0x2264: "\\le ", 0x2265: "\\ge ", 0x2260: "\\ne ", 0x222A: "\\cup ", 0x2229: "\\cap ", 0x00B0: "^\\circ ",
    0x221A: "\\sqrt ", 0x03B8: "\\theta ", 0x00B2: "^2", 0x00B3: "^3", 0x2208: "\\in ",
    0x00BD: "\\frac{1}{2}", 0x00BC: "\\frac{1}{4}", 0x00BE: "\\frac{3}{4}", 0x2153: "\\frac{1}{3}",
    0x2154: "\\frac{2}{3}",
}  # fmt: skip


def _subscript(word: str, text: str) -> str:
    """Return the subscript of a number with a base; the base may be a word."""
    base = int(word) if word.isdigit() else number_of_words(word)
    return text if base is None else f"_{{{base}}}"


def _repeating(whole: str, start: str, period: str) -> str:
    """Return ``0.1\\overline{6}`` as ``\\frac{15}{90}``."""
    before = int(whole + start or "0")
    return rf"\frac{{{int(whole + start + period) - before}}}{{{(10 ** len(period) - 1) * 10 ** len(start)}}}"


def _degrees(degrees: str, minutes: str) -> str:
    return rf'\frac{{{60 * int(degrees) + int(minutes)}}}{{60}} "degree" '


TEXT = re.compile(
    r"\\(text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|boldsymbol|bm|mbox|operatorname)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
CDOT = re.compile(r"\\cdot(?![a-z])")
DOTLESS = re.compile(r"\\([ij])math(?![a-z])")
HAT = re.compile(r"\\(?:hat|vec)(?=\s*(?:\{\s*)?(?:\\mathbf\s*\{\s*)?[ijk](?![a-z]))")  # of a unit vector
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[()\[\]]|\\(?:left|right)\.(?!\d)", " "),
        (r"[_^]\s*\{\s*\}|\\(?:math(?:bf|rm|it|sf)|boldsymbol|bm)\s+(?=[A-Za-z](?![A-Za-z]))", ""),
        (r"\s*\\approx(?![a-z]).*$", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|(?i:large|small|tiny|huge))(?![a-zA-Z])", ""),
        (r"\\(?:text)?color\s*\{\w+\}", ""),
        (r"(?<=\d)(?:\{,\}|(?<!\\)\\[,;:! ])(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\\$\s*(?=[\d.])", " usd "),
        (r"-\s*(usd|eur|gbp|jpy|inr)\s+", r"\1 -"),
        (r"\\?\$", ""),
        (r"\\%", "%"),
        (r"\\(?:lbrace|\{)", "\\\\{"),
        (r"\\rbrace", "\\\\}"),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (r"\\varnothing(?![a-z])|\\\{\s*\\\}", "\\\\emptyset "),
        (r"\{:\}", ":"),
        (r"(?<=[\d})])(?:\s*\"\s*|\s+)to(?:\s*\"\s*|\s+)(?=[\d\\(])", ":"),
        (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
        (r"\(?\s*\\?[pb]?mod(?![a-z])\s*\{?\s*(\w+)\s*\}?\s*\)?", r" \\pmod{\1}"),
        (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])C\(\s*(\w+)\s*,\s*(\w+)\s*\)", r"\\binom{\1}{\2}"),
        (r"(?:\{\})?_\s*\{?(\w+)\}?\s*C\s*_\s*\{?(\w+)\}?", r"\\binom{\1}{\2}"),
        (r"(?<![\w}\\])[({]\s*([0-9A-Fa-f]+)\s*[)}]\s*_", r"\1_"),
        (r"_\s*\{\s*\(\s*(\d{1,2})\s*\)\s*\}", r"_{\1}"),
        (r"^([0-9A-Fa-f]+)[\s\"]*\(?\s*(?:in\s+)?base[\s-]+(\d{1,2})\s*\)?[\s\"]*$", r"\1_{\2}"),
        (r"_\s*\{\s*\"?\s*(?:base\s*)?(\d{1,2}|[a-z]{3,})\s*\"?\s*\}", lambda m: _subscript(m.group(1), m.group())),
        (r"\\[lr]?vert(?![a-z])", "|"),
        (r"\\le(?:q|qslant)?(?![a-z])|<=", "\\\\le "),
        (r"\\ge(?:q|qslant)?(?![a-z])|>=", "\\\\ge "),
        (r"\\neq(?![a-z])|!=", "\\\\ne "),
        (r"\*\*", "^"),
        (r"(?<!\d)(\d{0,9})\.(\d{0,9})\\overline\s*\{(\d{1,9})\}", lambda m: _repeating(*m.groups())),
        (r"\\[dtc]frac", "\\\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"(\\frac\s*\{[^{}]*\})\s+\{", r"\1{"),
        (r"(?<![\\a-zA-Z])sqrt(?=\s*[({\d])", "\\\\sqrt"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d+|[a-zA-Z])(?![a-zA-Z{])", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])(pi|infinity)(?![a-zA-Z])", lambda m: {"pi": "\\pi "}.get(m.group(1), "\\infty ")),
        (r"\+\s*\\infty", "\\\\infty"),
        (r"\\log\s*_\s*\{?\s*e\s*\}?(?![a-z])", "\\\\ln "),
        (r"^\s*(-?)\s*\((-?\d+)\)\s*/\s*\((-?\d+)\)\s*$", r"\1\\frac{\2}{\3}"),
        (r"\\\{\s*\\begin\{array\}\{[lcr|\s]*\}(.*?)\\end\{array\}", r"\\begin{cases}\1\\end{cases}"),
        (r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z]))\s*\"?([CF](?![a-zA-Z])\"?)?",
         lambda m: ' "degree' + {"C": " celsius", "F": " fahrenheit"}.get((m.group(1) or "")[:1], "") + '" '),
        (r"(?i)(?<=[\d}%])\s*(?:\"\s*)?(?:percent|pct)(?:\s*\")?(?![a-z])", "%"),
        (r"(?i)(?<=\d)\s*\"?\s*\b([ap])\.?\s?m\b\.?\s*\"?", lambda m: f' "{m.group(1).lower()}m" '),
        (r"(?i)\b(?:negative|minus)\s+(?=[\d.\\])", "-"),
        (r"(\d+)\s*\"degree\"\s*(\d+)\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)", lambda m: _degrees(*m.groups())),
    )
]  # fmt: skip
VARIABLES = ("mathbf", "mathit", "mathsf", "boldsymbol", "bm", "operatorname")
MATHEMATICS = (*"0123456789)}]%", "\\pi", "\\circ")
LEFT_EDGE = " \t\n*`,;:"
RIGHT_EDGE = LEFT_EDGE + "."


def ascii_signs(text: str) -> str:
    """Return ``text`` with typographic signs (minus, times, pi, one half, full-width digits) as ASCII or LaTeX."""
    return text if text.isascii() else text.translate(SIGNS)


SMALL = {word: value for value, word in enumerate([
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
])}  # fmt: skip
TENS = {word: 10 * value for value, word in enumerate([
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
], 2)}  # fmt: skip
PARTS = {word: value for value, word in enumerate([
    "half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
], 2)} | {"halve": 2, "quarter": 4}  # fmt: skip
POWERS = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
WHOLE_ANSWERS = (
    (re.compile(r"(?:there\s+(?:is|are)\s+)?no\s+(?:real\s+)?solutions?|(?:the\s+)?empty\s+set", re.I), "\\emptyset"),
    (re.compile(r"(?:(?:it|the\s+limit)\s+)?does\s+not\s+exist", re.I), "DNE"),
)
ENVIRONMENT = re.compile(r"\\begin\{(aligned|align\*?|gathered|cases)\}(.*?)\\end\{\1\}", re.DOTALL)
QUALIFIER = re.compile(  # says that a variable is arbitrary: "for all x", "k \\in \\mathbb{Z}", "where c is a constant"
    r"(?<=[\w})])[\s,;(\"]+(?:(?:for|where)\b(?:[\s\",]+|(?:all|any|every|each|some|is|are|an?|the|arbitrary|real|integers?"
    r"|constants?|numbers?|of)\b|[a-zA-Z](?![a-zA-Z])|\\in(?![a-z])|\\mathbb\s*\{?[RZ]\}?)+"
    r"|[a-z]\s*\\in\s*(?:\\mathbb\s*\{?\s*)?[RZ]\s*\}?)[\s)\"]*$"
)
ISO_INTERVAL = re.compile(r"(|.*(?:\\in(?![a-z])|=)\s*)([\[\](])([^\[\]]*,[^\[\]]*)([\[\])])", re.DOTALL)


def number_of_words(text: str) -> int | None:
    """Return the value of number words such as ``one hundred and twenty-one``; None for any other text."""
    words = [word for word in re.split(r"[\s-]+", text.casefold().strip()) if word != "and"]
    total = group = 0
    smallest = 10**12  # the power of the preceding words: one thousand two million is no number
    for word in words:
        low = group % 100
        if word in SMALL and (low == 0 if SMALL[word] > 9 else low in (0, *TENS.values())):
            if SMALL[word] == 0 and len(words) > 1:
                return None
            group += SMALL[word]
        elif word in TENS and low == 0:
            group += TENS[word]
        elif word == "hundred" and 0 < group < 10:
            group *= 100
        elif word in POWERS and 0 < group < 1000 and POWERS[word] < smallest:
            total, group, smallest = total + group * POWERS[word], 0, POWERS[word]
        else:
            return None
    return total + group if words else None


def _spelled(text: str) -> str | None:
    """Return ``-8`` for ``negative eight`` and a fraction for ``two thirds``; None for any other text."""
    sign, words = re.fullmatch(r"(?i)(?:(negative|minus)\s+)?(.*)", text).groups()  # type: ignore[union-attr]
    *numerator, part = re.split(r"[\s-]+", words.casefold())
    divisor = PARTS.get(part.removesuffix("s"))
    if divisor is not None and len(numerator) == 1 and numerator[0] in SMALL:
        number = rf"\frac{{{SMALL[numerator[0]]}}}{{{divisor}}}"
    elif (value := number_of_words(words)) is not None:
        number = str(value)
    else:
        return None
    return ("-" if sign else "") + number


def _rows_as_list(match: re.Match[str]) -> str:
    r"""Return ``x=1,y=2`` for rows ``x&=1\\y&=2``; an environment with conditions is unchanged."""
    rows = [row.strip(" \t\n,;.") for row in match.group(2).split("\\\\")]
    rows = [row for row in rows if row]
    if any("&" in row and not re.search(r"&\s*(?:=|\\|<|>)|=\s*&", row) for row in rows):
        return match.group()
    return ", ".join(row.replace("&", "") for row in rows)


def _without_iso_brackets(text: str) -> str:
    r"""Return ``(2,5]`` for ``]2,5]``, also in unions and after ``x \in``; other brackets are unchanged."""
    parts = text.split("\\cup")
    for i, part in enumerate(parts):
        if (match := ISO_INTERVAL.fullmatch(part.strip())) is not None:
            before, opening, ends, closing = match.groups()
            if opening == "]" or closing == "[":
                parts[i] = before + opening.replace("]", "(") + ends + closing.replace("[", ")")
    return "\\cup ".join(parts)


def normalize(text: str) -> str:
    """Return an answer in the normal notation; an answer without mathematics keeps its words and their case."""
    text = trimmed(" ".join(ascii_signs(text).split()))  # long spaces take the patterns quadratic time
    text = HAT.sub(r"\\mathbf", DOTLESS.sub(r" \1", text))
    for _ in range(2):
        text = TEXT.sub(_words, text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = trimmed(" ".join(_without_iso_brackets(ENVIRONMENT.sub(_rows_as_list, text)).split()))
    text = QUALIFIER.sub("", text)
    if text[:1].isalpha():
        text = next((symbol for pattern, symbol in WHOLE_ANSWERS if pattern.fullmatch(text)), _spelled(text) or text)
    while is_wrapped(text, "{", "}"):
        text = trimmed(text[1:-1])
    return text


def trimmed(text: str) -> str:
    """Return ``text`` without surrounding punctuation, emphasis and LaTeX spaces."""
    return re.sub(r"(?<!\\)\\$", "", text.lstrip(LEFT_EDGE).rstrip(RIGHT_EDGE))


def _words(match: re.Match[str]) -> str:
    """Return the words of a ``\\text{}``, quoted after mathematics unless they join two answers."""
    font, words = match.group(1), match.group(2).strip()
    before = match.string[: match.start()].rstrip("\\ \t\n~,;:!$")
    if font not in VARIABLES and words and words not in ("and", "or") and before.endswith(MATHEMATICS):
        return f' "{CDOT.sub(" ", words)}" '
    return words if len(words) == 1 and not match.string[: match.start()][-1:].isalpha() else f" {words} "


def is_wrapped(text: str, opening: str, closing: str) -> bool:
    """Return True if the first character is in ``opening`` and its matching bracket in ``closing`` is the last."""
    if len(text) < 2 or text[0] not in opening or text[-1] not in closing:
        return False
    depth = 0
    for i, char in enumerate(text):
        depth += (char in opening) - (char in closing)
        if depth == 0:
            return i == len(text) - 1
    return False


def strip_spaces(text: str) -> str:
    """Return ``text`` without spaces, except between digits: ``3 1/3`` is not ``31/3``."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def split_outside(text: str, separator: str) -> list[str]:
    """Split at each ``separator`` outside brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]
