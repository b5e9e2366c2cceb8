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
    0x221A: "\\sqrt ", 0x03B8: "\\theta ", 0x2208: "\\in ",
    0x00BD: "\\frac{1}{2}", 0x00BC: "\\frac{1}{4}", 0x00BE: "\\frac{3}{4}", 0x2153: "\\frac{1}{3}",
    0x2154: "\\frac{2}{3}", 0x00A2: " cents ", 0x2026: "\\ldots ", 0x2126: "\\Omega ", 0x03A9: "\\Omega ",
}  # fmt: skip
RAISED = dict(
    zip(
        map(ord, "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f"),
        "0123456789-n",
        strict=True,
    )
)
LOWERED = {0x2080 + i: str(i) for i in range(10)}
RAISED_RUN, LOWERED_RUN = (re.compile(f"[{''.join(map(chr, table))}]+") for table in (RAISED, LOWERED))


def _subscript(word: str, text: str) -> str:
    """Return the subscript of a number with a base; the base may be a word."""
    base = int(word) if word.isdigit() else number_of_words(word)
    return text if base is None else f"_{{{base}}}"


def _repeating(whole: str, start: str, period: str) -> str:
    """Return ``0.1\\overline{6}`` as ``\\frac{15}{90}``."""
    before = int(whole + start or "0")
    return rf"\frac{{{int(whole + start + period) - before}}}{{{(10 ** len(period) - 1) * 10 ** len(start)}}}"


def _continued(whole: str, digits: str) -> str | None:
    """Return ``0.1666\\ldots`` as a fraction; None if its last digits do not repeat."""
    for length in range(1, len(digits)):
        for start in range(length):
            period = digits[start:length]
            rest = digits[start:]
            if len(rest) >= max(3, 2 * len(period)) and (period * len(rest)).startswith(rest):
                return _repeating(whole, digits[:start], period)
    return None


def _degrees(degrees: str, minutes: str) -> str:
    return rf'\frac{{{60 * int(degrees) + int(minutes)}}}{{60}} "degree" '


def _column(entries: str) -> str:
    r"""Return the vector as a column without brackets, which equals a column matrix and a tuple."""
    return r"\begin{matrix}" + r"\\".join(split_outside(entries, ",")) + r"\end{matrix}"


FUNCTION = r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp)"
TOKEN = r"(?:\d|\\(?:pi|theta|alpha|beta|lambda)(?![a-z]))"
BRACED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"
ELLIPSIS = re.compile(r"(?<=\d{3})\.{3}")
TEXT = re.compile(
    r"\\(text(?:bf|it|rm|sf|tt|normal)?|emph|underline|math(?:rm|bf|it|sf)|boldsymbol|bm|mbox|operatorname)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
QUOTIENT = re.compile(
    r"\\[dt]?frac\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}"
)
CDOT = re.compile(r"\\cdot(?![a-z])")
DOTLESS = re.compile(r"\\([ij])math(?![a-z])")
HAT = re.compile(r"\\(?:hat|vec)(?=\s*(?:\{\s*)?(?:\\mathbf\s*\{\s*)?[ijk](?![a-z]))")  # of a unit vector
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[()\[\]]|\\(?:left|right)\.(?!\d)", " "),
        (r"[_^]\s*\{\s*\}|\\(?:math(?:bf|rm|it|sf)|boldsymbol|bm)\s+(?=[A-Za-z](?![A-Za-z]))", ""),
        (r"^\s*\\approx(?![a-z])|\s*\\approx(?![a-z]).*$", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|(?i:large|small|tiny|huge))(?![a-zA-Z])", ""),
        (r"\\(?:text)?color\s*\{\w+\}|\\(?:[hv]space|phantom)\*?\s*\{[^{}]*\}", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<=\d)(?:\{,\}|(?<!\\)\\[,;:! ])(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\\$\s*(?=[\d.])", " usd "),
        (r"-\s*(usd|eur|gbp|jpy|inr)\s+", r"\1 -"),
        (r"\\?\$", ""),
        (r"\\%", "%"),
        (r"\\(?:lbrace|\{)", "\\\\{"),
        (r"\\rbrace", "\\\\}"),
        (r"\\langle(?![a-z])([^<>()]*?,[^<>()]*?)\\rangle(?![a-z])", lambda m: _column(m.group(1))),
        (r"^[(\[]([^()\[\]]*,[^()\[\]]*)[)\]]\s*\^\s*\{?\s*(?:T|\\top)\s*\}?$", lambda m: _column(m.group(1))),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (r"\\varnothing(?![a-z])|\\\{\s*\\\}", "\\\\emptyset "),
        (r"\{:\}", ":"),
        (r"(?<=[\d})])(?:\s*\"\s*|\s+)to(?:\s*\"\s*|\s+)(?=[\d\\(])", ":"),
        (r"(?<=\d)\s*(?:\^\s*\{?)?[\s\"]*(?<![a-z])(?:st|nd|rd|th)\b[\s\"]*\}?", ""),
        (r"\(?\s*\\?[pb]?mod(?![a-z])\s*(?:\{\s*(\w+)\s*\}|(\w+))\s*\)?", r" \\pmod{\1\2}"),
        (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])C\(\s*(\w+)\s*,\s*(\w+)\s*\)", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])C\s*_\s*\{?(\d+|[a-z])\}?\s*\^\s*\{?(\d+|[a-z])\}?", r"\\binom{\1}{\2}"),
        (r"(?:\{\})?_\s*\{?(\w+)\}?\s*C\s*_\s*\{?(\w+)\}?", r"\\binom{\1}{\2}"),
        (r"(?<![\w}\\])[({]\s*([0-9A-Fa-f]+)\s*[)}]\s*_", r"\1_"),
        (r"_\s*\{\s*\(\s*(\d{1,2})\s*\)\s*\}", r"_{\1}"),
        (r"^([0-9A-Fa-f]+)[\s\"]*\(?\s*(?:in\s+)?base[\s-]+(\d{1,2}|[a-z]{3,})\s*\)?[\s\"]*$",
         lambda m: m[1] + _subscript(m[2], m[2])),
        (r"_\s*\{\s*\"?\s*(?:base\s*)?(\d{1,2}|[a-z]{3,})\s*\"?\s*\}", lambda m: _subscript(m.group(1), m.group())),
        (r"(?<=\d)_\s*([a-z]{3,})\s*$", lambda m: _subscript(m.group(1), m.group())),
        (r"\\[lr]?vert(?![a-z])", "|"),
        (r"\\[lc]?dots[bcmi]?(?![a-z])", r"\\ldots"),
        (r"\\sqrt\s*\[([3579])\]\s*\{\s*-([^{}+-]+)\}", r"(-\\sqrt[\1]{\2})"),
        (r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)|ln|log|exp)(?=\s*\(|\s+[a-z\d](?![a-z])|\s*\\)", r"\\\1"),
        (r"\\le(?:q|qslant)?(?![a-z])|<=", "\\\\le "),
        (r"\\ge(?:q|qslant)?(?![a-z])|>=", "\\\\ge "),
        (r"\\neq(?![a-z])|!=", "\\\\ne "),
        (r"\*\*", "^"),
        (r"\\dot\s*\{?(\d)\}?(\d{0,7})\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"(?<!\d)(\d{0,9})\.(\d{0,9})\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,9})\s*\}|(\d))",
         lambda m: _repeating(m[1], m[2], m[3] or m[4])),
        (r"^\s*(\d{0,9})\.(\d{0,9})\((\d{1,9})\)\s*$", lambda m: _repeating(*m.groups())),
        (r"(?<![\d.])(\d{0,9})\.(\d{3,20})\s*\\[lcd]?dots(?![a-z])", lambda m: _continued(*m.groups()) or m.group()),
        (r"\\[dtc]frac", "\\\\frac"),
        (rf"\\frac\s*({TOKEN}|(?<=\s)[A-Za-z])", r"\\frac{\1}"),
        (rf"(\\frac\s*\{{{BRACED}\}})\s*({TOKEN}|[A-Za-z])", r"\1{\2}"),
        (r"(\\frac\s*\{[^{}]*\})\s+\{", r"\1{"),
        (r"(?<![\\a-zA-Z])sqrt(?=\s*[({\d])", "\\\\sqrt"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d+|[a-zA-Z])(?![a-zA-Z{])", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])(pi|infinity)(?![a-zA-Z])", lambda m: {"pi": "\\pi "}.get(m.group(1), "\\infty ")),
        (r"\+\s*\\infty", "\\\\infty"),
        (r"\\lg(?![a-z])", r"\\log_{10}"),
        (rf"({FUNCTION}(?:[_^]\s*(?:\{{[^{{}}]*\}}|\w))*)\s*\{{({BRACED})\}}", r"\1(\2)"),
        (r"\\(max|min|gcd|lcm)\s*\\\{([^{}]*)\\\}", r"\\\1(\2)"),
        (r"\\log\s*_\s*\{?\s*e\s*\}?(?![a-z])", "\\\\ln "),
        (r"^\s*(-?)\s*\((-?\d+)\)\s*/\s*\((-?\d+)\)\s*$", r"\1\\frac{\2}{\3}"),
        (r"\\\{\s*\\begin\{array\}\{[lcr|\s]*\}(.*?)\\end\{array\}", r"\\begin{cases}\1\\end{cases}"),
        (r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-z]))\s*\"?([CF](?![a-zA-Z])\"?)?",
         lambda m: ' "degree' + {"C": " celsius", "F": " fahrenheit"}.get((m.group(1) or "")[:1], "") + '" '),
        (r"\\?(?<![A-Za-z])cis[\s\"]*(\([^()]*\)|\\frac\{[^{}]*\}\{[^{}]*\}|\d+\s*(?:\"degree\"|\\pi)?)",
         r"(\\cos(\1)+i\\sin(\1))"),
        (r"(?<=\d)\s*\\Omega(?![a-z])", ' "ohm" '),
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
    if text.isascii():
        return text
    text = LOWERED_RUN.sub(lambda m: f"_{{{m.group().translate(LOWERED)}}}", text)
    return RAISED_RUN.sub(lambda m: f"^{{{m.group().translate(RAISED)}}}", text).translate(SIGNS)


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
ORDINALS = {"first": 1, "second": 2} | {word: value for word, value in PARTS.items() if word.endswith(("d", "th"))}
POWERS = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
ALL = r"(?:(?:the\s+set\s+of\s+)?(?:all|every|any|each)\s+)?(?:the\s+)?"
REALS = r"\\mathbb\s*\{?\s*R\s*\}?"
WHOLE_ANSWERS = [(re.compile(pattern, re.IGNORECASE), symbol) for pattern, symbol in (
    (r"(?:there\s+(?:is|are|exists?)\s+)?no\s+(?:(?:such|real|integer|positive|natural|valid|possible|prime)\s+)*"
     r"(?:solutions?|integers?|numbers?|values?|pairs?|triples?|primes?|functions?|roots?|[a-z])(?:\s+exists?)?"
     r"|none(?:\s+exists?)?|(?:the\s+)?empty\s+set", "\\emptyset"),
    (r"(?:there\s+are\s+)?(?:an\s+)?infinite(?:ly\s+many)?(?:\s+number\s+of)?(?:\s+solutions)?", "infinitely many"),
    (rf"{ALL}(?:positive\s+reals?(?:\s+numbers?)?|{REALS}\s*(?:\^\s*\{{?\s*\+\s*\}}?|_\s*\{{\s*>\s*0\s*\}}))",
     "(0,\\infty)"),
    (rf"{ALL}(?:non-?\s?negative\s+reals?(?:\s+numbers?)?|{REALS}\s*_\s*\{{\s*\\ge\s*0\s*\}})", "[0,\\infty)"),
    (rf"{ALL}integers?", "\\mathbb{Z}"),
    (rf"{ALL}(?:positive\s+integers?|natural\s+numbers?)"
     r"|\\mathbb\s*\{?\s*(?:N|Z\s*\}?\s*(?:\^\s*\{?\s*\+|_\s*\{\s*>\s*0))\s*\}?", "\\mathbb{N}"),
    (r"(?:(?:it|the\s+limit)\s+)?does\s+not\s+exist", "DNE"),
)]  # fmt: skip
ENVIRONMENT = re.compile(r"\\begin\{(aligned|align\*?|gathered|cases)\}(.*?)\\end\{\1\}", re.DOTALL)
QUALIFIER = re.compile(  # says that a variable is arbitrary: "for all x", "k \\in \\mathbb{Z}", "where c is a constant"
    r"(?<=[\w})])[\s,;(\"]+(?:(?:for|where)\b(?:[\s\",]+|(?:all|any|every|each|some|is|are|an?|the|arbitrary|real|integers?"
    r"|constants?|numbers?|of)\b|[a-zA-Z](?![a-zA-Z])|\\in(?![a-z])|\\mathbb\s*\{?[RZ]\}?)+"
    r"|[a-z]\s*\\in\s*(?:\\mathbb\s*\{?\s*)?[RZ]\s*\}?)[\s)\"]*$"
)
VARIABLE_CONDITION = r"[a-z]\s*(?:[<>=]|\\(?:le|ge|ne|equiv)(?![a-z]))"
INTRODUCTIONS = [(re.compile(pattern, re.IGNORECASE), replacement) for pattern, replacement in (
    (r"^(?:(?:so|thus|hence),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answers?\s*(?:is|are|:)\s*:?\s*(?!not\b)", ""),
    (r"^(?:the\s+)?(?:line|curve|circle|parabola|function|points?|interval|plane)\s+(?=\S*[\d=\\(])", ""),
    (rf"^(?:for\s+)?(?:all|any|every|each)\s+(?:(?:positive\s+)?integers?\s+|real\s+(?:numbers?\s+)?)?"
     rf"(?={VARIABLE_CONDITION})", ""),
    (r'^(?:all|any|every)\s+(?:real\s+(?:numbers?\s+)?)?(?:[a-z]\s+)?[\s"]*except[\s"]+(?:for[\s"]+)?(?:[a-z]\s*=)?(.*)$',
     r"\\mathbb{R}\\setminus\\{\1\\}"),
    (rf'[\s,"]*\b(?:for|where|with)\b[\s"]+(?={VARIABLE_CONDITION})', ", "),
)]  # fmt: skip
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
    if words.casefold() in ORDINALS:
        return str(ORDINALS[words.casefold()])
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
    text = ELLIPSIS.sub(r"\\ldots", ascii_signs(text))
    text = trimmed(" ".join(text.split()))  # long spaces take the patterns quadratic time
    text = HAT.sub(r"\\mathbf", DOTLESS.sub(r" \1", text))
    text = QUOTIENT.sub(r"\\text{\1/\2}", text)
    for _ in range(2):
        text = TEXT.sub(_words, text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = trimmed(" ".join(_without_iso_brackets(ENVIRONMENT.sub(_rows_as_list, text)).split()))
    text = QUALIFIER.sub("", text)
    for pattern, replacement in INTRODUCTIONS:
        text = pattern.sub(replacement, text)
    if text[:1].isalpha() or text.startswith("\\mathbb"):
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
