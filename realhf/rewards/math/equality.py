r"""Judges maths responses: extracts the answer and compares it with those of the solutions.

Comparisons run from cheapest to most expensive: text; numbers; tuples, intervals, lists, sets and matrices by element;
``x=5`` against ``5``; symbolic mathematics. The first applicable check decides.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from typing import TypeVar

from realhf.rewards.math.exact_integers import exact_value
from realhf.rewards.math.extract import after_thoughts, extract_answer, marked_answer
from realhf.rewards.math.normalize import ascii_signs, is_wrapped, normalize, split_outside, strip_spaces
from realhf.rewards.math.quantities import Form, Quantity, quantity, same_quantity
from realhf.rewards.math.real_sets import MEMBER, Interval, parse_real_set
from realhf.rewards.math.residues import PARAMETERS, common_modulus, integer_residues, parse_residues
from realhf.rewards.math.symbolic import TIME_LIMIT, same_mathematics, with_constant_of
from realhf.rewards.math.text_answers import as_date, as_digits, as_points, as_ratio, as_text
from realhf.rewards.math.vectors import Matrix, matrix_rows, parse_matrix, unit_vector_components

CHOICE = re.compile(r"(?:(?i:option|choice|answer)\s+)?\(?([A-J])\)?")
LABELLED_CHOICE = re.compile(r"(?:\(?(?=[A-J]\))|(?=[A-J][.:]\s))([A-J])[).:][\s:.]*([^\s:.].*)", re.DOTALL)
GIVEN_CHOICE = re.compile(
    r"(?i:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s+(?:is\s+)?)?\(?([A-Ja-j])(?:[).:].*)?", re.DOTALL
)
OTHER_CHOICE = re.compile(r"[\s,;]\(?([A-J])(?:[).:]|\s*[,;]|\s*$)")
EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
NAME = re.compile(
    r"\\?[A-Za-z]{1,2}|\\[a-z]+(?:_(?:\{\w+\}|\w))?|[A-Za-z]{3,}|\|[^|=]+\||\\\|[^|=]+\\\||\\(?:vec|overline|overrightarrow|bar|hat)\{?\w+\}?|"
    r"[A-Za-z](?:_\{?\w+\}?|'|(?:\^\{-1\})?\([a-z](?:,[a-z])*\)|\^\{-1\})|\([a-z](?:,[a-z])*\)"
)
COORDINATE = re.compile(r"(?<![A-Za-z\\])[xy](?![A-Za-z(])")
SUBSCRIPT = re.compile(r"_\{?\d+\}?$")
CLOSED_FORM = re.compile(r"\^|!|\\binom|^1\s*-\s*\\frac")
CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
OPERATOR = re.compile(r"[\w)}]\s*(?:[+*/-]|\\times|\\cdot|\\div)\s*[\w({\\-]|(?<!_)\d\s+[\d.]|\\[dtc]?frac")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in|cup)(?![a-z])")
EXPONENT = re.compile(r"\^\s*\{[^{}]*\}")
THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+")
FUNCTION = re.compile(r"([a-z])\(([a-z])\)")
BUILDER = re.compile(r"\\\{((?:(?!\\mid|[|:]).)+)(?:\\mid(?![a-z])|[|:])(.*)\\\}", re.DOTALL)
LETTER = re.compile(r"(?<![a-zA-Z\\])[a-z](?![a-zA-Z])")
MAX_CHARS = 2000  # of an answer that is parsed; longer ones are compared as text
MAX_SET_SIZE = 30
MAX_SIGNS = 3  # of one expression
T = TypeVar("T")


def judge_math(prompt: str, answer: str, row: Mapping[str, object], strict: bool = False) -> float:
    r"""Return 1.0 if the final answer of the response ``answer`` equals any of ``row['solutions']``, else 0.0.

    With ``strict`` only an answer in ``\boxed{}`` or after ``####`` counts. ValueError for a row without solutions; no
    response raises. There is no time limit here: run it in a child process.
    """
    solutions = row["solutions"]
    if not isinstance(solutions, list) or not solutions:
        raise ValueError(f"row['solutions'] is {solutions!r}, it must be a list of texts")
    given = marked_answer(after_thoughts(ascii_signs(answer))) if strict else extract_answer(answer)
    if not given:
        return 0.0
    golds = [marked_answer(solution) for solution in solutions]
    targets = [s if gold is None else gold for gold, s in zip(golds, solutions, strict=True)]
    with TIME_LIMIT.shared():
        return float(any(same_answer(given, target) for target in targets))


def same_answer(given: str, gold: str) -> bool:
    """Return True if two answers are equal as text, as numbers, element by element, or symbolically."""
    if max(len(given), len(gold)) > MAX_CHARS:
        return given.strip() == gold.strip()
    given, gold = normalize(given), normalize(gold)
    return bool(given and gold) and _same(given, gold)


def _same(given: str, gold: str) -> bool:
    if strip_spaces(given) == strip_spaces(gold):
        return True
    for check in CHECKS:
        if (is_same := check(given, gold)) is not None:
            return is_same
    return same_mathematics(given, gold)


def _as_values(given: str, gold: str) -> bool | None:
    """Decide if either answer gives values to several names: ``x=1, y=2`` equals ``(1,2)`` and ``(x,y)=(1,2)``."""
    points = _alternatives(given), _alternatives(gold)
    if any(points):
        return _same(points[0] or given, points[1] or gold)
    values, given_values = _assignments(gold), _assignments(given)
    if values is None and given_values is None:
        return None
    if values is not None and given_values is not None:
        return values.keys() == given_values.keys() and all(_same(given_values[name], values[name]) for name in values)
    named, (kind, elements) = (given_values, _elements(gold)) if values is None else (values, _elements(given))
    if named is None:
        return None
    other = _named(given if values is not None else gold)
    bases = {SUBSCRIPT.sub("", name) for name in named}
    if len(bases) == 1 and other[0] in bases | ({""} if kind != "()" else set()):
        listed = ", ".join(named.values())  # x_1=1, x_2=2 for x=1,2
        return _same(other[1], listed) if values is not None else _same(listed, other[1])
    if kind == "{}":
        return False  # a set has no order
    if kind not in ("()", "") or len(elements) != len(named):
        return None
    ordered = [named[name] for name in sorted(named)]
    pairs = zip(ordered, elements, strict=True) if values is None else zip(elements, ordered, strict=True)
    return all(_same(a, b) for a, b in pairs)


def _alternatives(text: str) -> str:
    """Return ``(1,2), (2,1)`` for ``x=1, y=2 or x=2, y=1``; empty for any other text."""
    found = [_assignments(part) for part in re.split(r'[\s,"]+or\b[\s"]+', text)] if " or" in text else []
    if not all(found) or len({frozenset(values or ()) for values in found}) != 1:
        return ""
    return ", ".join(f"({','.join(values[name] for name in sorted(values))})" for values in found if values)


def _assignments(text: str) -> dict[str, str] | None:
    """Return the values of at least two different names, or None."""
    sides = [side.strip() for side in EQUALS.split(text)]
    if len(sides) > 2 and all(NAME.fullmatch(name) for name in sides[:-1]) and not NAME.fullmatch(sides[-1]):
        return dict.fromkeys(sides[:-1], sides[-1])  # x=y=1
    if len(sides) == 2 and is_wrapped(sides[0], "(", ")") and is_wrapped(sides[1], "(", ")"):
        names, values = (split_outside(side[1:-1], ",") for side in sides)
    else:
        pairs = [_named(part) for part in split_outside(re.sub(r'\s*"?\s*\band\b\s*"?\s*|;', ",", text), ",") if part]
        names, values = [name for name, _ in pairs], [value for _, value in pairs]
    if len(names) != len(values) or len(names) < 2 or len(set(names)) < len(names):
        return None
    if not all(NAME.fullmatch(name) for name in names):
        return None
    return dict(zip(names, values, strict=True))


def _as_real_set(given: str, gold: str) -> bool | None:
    """Decide if both answers are sets of real numbers, and one is more than a pair in brackets."""
    a, b = parse_real_set(given), parse_real_set(gold)
    if a is None or b is None or (a.is_plain and b.is_plain):
        return None
    if a.variable and b.variable and a.variable != b.variable:
        return False

    def same(x: Interval, y: Interval) -> bool:
        closed = (x.low_closed, x.high_closed) == (y.low_closed, y.high_closed)
        return closed and _same(x.low, y.low) and _same(x.high, y.high)

    return _in_any_order(a.intervals, b.intervals, same)


def _as_cases(given: str, gold: str) -> bool | None:
    """Decide if the gold answer is a function by cases: the same values under the same conditions."""
    gold_match = CASES.fullmatch(gold.partition("=")[2].strip() if gold.startswith(("f", "g", "y")) else gold)
    if gold_match is None:
        return None
    given_match = CASES.search(given)
    if given_match is None:
        return False
    a, b = (
        [[cell.strip(' ,;"') for cell in row.split("&", 1)] for row in matrix_rows(match.group(1))]
        for match in (given_match, gold_match)
    )

    def same(x: list[str], y: list[str]) -> bool:
        conditions = _condition(x[-1]), _condition(y[-1])
        is_rest = conditions.count("else") == 1  # all rows but one have equal conditions
        return len(x) == len(y) and (is_rest or _same(*conditions)) and _same(x[0], y[0])

    return _in_any_order(a, b, same)


def _condition(text: str) -> str:
    text = re.sub(r'"|\b(?:if|for|when|is|are)\b', " ", text)
    return "else" if re.search(r"\b(?:otherwise|else)\b", text) else text.strip(" ,;.")


def _as_choice(given: str, gold: str) -> bool | None:
    """Decide if the gold answer is a letter: ``(C)`` and ``C. 42`` equal ``C``."""
    if (letters := _choices(gold)) and (letters != gold or letters == _choices(given)):
        return letters == _choices(given)
    given_labelled, labelled = LABELLED_CHOICE.fullmatch(given), LABELLED_CHOICE.fullmatch(gold)
    if labelled is not None:
        is_letter = _as_choice(given, labelled[1])
        return is_letter if is_letter or given_labelled else _same(given, labelled[2].strip())
    if (letter := CHOICE.fullmatch(gold)) is None:
        if given_labelled is not None and _same(given_labelled[2].strip(), gold):
            return True
        return None
    given_letter = GIVEN_CHOICE.fullmatch(given)
    if given_letter is None or given_letter.group(1).upper() != letter.group(1):
        return False
    return all(other == letter.group(1) for other in OTHER_CHOICE.findall(given[given_letter.end(1) :]))


def _choices(text: str) -> str:
    """Return the letters of several choices, ``ACD`` or ``A, C and D``; empty for any other text."""
    letters = re.sub(r"\band\b|[\s,;()]", "", text)
    in_order = "".join(sorted(set(letters)))
    is_list = re.fullmatch("[A-J]{2,}", letters) and len(in_order) == len(letters)
    return in_order if is_list and (letters == in_order or letters != text) else ""


def _as_residues(given: str, gold: str) -> bool | None:
    """Decide if an answer is a residue class: names and residues must be equal, and moduli unless all are integers."""
    a, b = parse_residues(given), parse_residues(gold)
    if a is None or b is None:
        return False if any(each and each.is_stated for each in (a, b)) else None
    if a.parameter and b.parameter and (a.parameter == b.parameter or not {a.parameter, b.parameter} <= PARAMETERS):
        return None
    if a.name and b.name and a.name != b.name:
        return False
    modulus = common_modulus(a, b)
    sets = integer_residues(a, modulus), integer_residues(b, modulus)
    if None not in sets:
        return sets[0] == sets[1]
    return _in_any_order(a.pairs, b.pairs, lambda x, y: x[1] == y[1] and _same(x[0], y[0]))


def _as_quantity(given: str, gold: str) -> bool | None:
    """Decide if the gold answer is a number, unless the given one must be evaluated first."""
    gold_value = quantity(gold)
    if gold_value is None:
        return THOUSANDS.fullmatch(given) and exact_value(gold) == exact_value(given.replace(",", "")) or None
    result = given
    if given.startswith("\\{") and len(members := _elements(given)[1]) == 1:
        result = given = members[0]
    if equals := EQUALS.split(given):
        result = equals[-1].strip()
        if len(equals) == 2 and NAME.fullmatch(strip_spaces(equals[1])):  # 5 = x
            result = equals[0].strip()
    given_value = quantity(result)
    if given_value is not None:
        if len(equals) == 2 and _is_curve(equals[0].strip(), gold_value.value == 0):
            return False
        return same_quantity(given_value, gold_value)
    if "degree" in gold_value.unit.words and "\\pi" in result:
        return None
    if CLOSED_FORM.search(result) and (value := exact_value(result)) is not None:
        return same_quantity(Quantity(value, Form.mixed), gold_value)
    if OPERATOR.search(EXPONENT.sub("", result)):
        return False
    return None if len(_elements(result)[1]) == 1 else False


def _is_curve(left: str, equals_zero: bool) -> bool:
    """Return True if ``left`` equals a number on a curve: ``3x-4y+5=0``, ``x^2+y^2=4``; ``x+y=4`` is a value."""
    is_equation = equals_zero or (len(set(COORDINATE.findall(left))) == 2 and re.search(r"\^|\\frac", left))
    return bool(is_equation and COORDINATE.search(left) and not NAME.fullmatch(left))


def _as_matrix(given: str, gold: str) -> bool | None:
    """Decide if either answer is a matrix or a sum of unit vectors."""
    a, b = parse_matrix(given), parse_matrix(gold)
    if a is not None and b is not None:
        same = same_mathematics if a.is_scaled or b.is_scaled else _same
        same_shape = [len(row) for row in a.rows] == [len(row) for row in b.rows]
        return a.is_determinant == b.is_determinant and same_shape and all(map(same, chain(*a.rows), chain(*b.rows)))
    sums = unit_vector_components(given), unit_vector_components(gold)
    if sums == (None, None) and not (a and a.is_column or b and b.is_column):
        return None if a is b or "\\begin" in (given if a is None else gold) else False
    x, y = (_components(text, matrix, terms) for text, matrix, terms in ((given, a, sums[0]), (gold, b, sums[1])))
    if x is None or y is None:
        return None
    x, y = (terms + ["0"] * (max(len(x), len(y)) - len(terms)) if len(terms) == 2 else terms for terms in (x, y))
    return len(x) == len(y) and all(map(_same, x, y))


def _components(text: str, matrix: Matrix | None, terms: list[str] | None) -> list[str] | None:
    """Return the components of a vector, or None for another answer."""
    if matrix is not None:
        return [row[0] for row in matrix.rows] if {len(row) for row in matrix.rows} == {1} else None
    kind, elements = _elements(text)
    return elements if terms is None and kind == "()" else terms


def _as_elements(given: str, gold: str) -> bool | None:
    """Decide if either answer is a tuple, interval, list or set: brackets and elements must be equal."""
    (kind, gold_elements), (given_kind, given_elements) = (_elements(MEMBER.sub("", text)) for text in (gold, given))
    if len(gold_elements) == len(given_elements) == 1 and kind == given_kind == "":
        return None
    if (len(gold_elements) == 1 or len(given_elements) == 1) and RELATION.search(gold + given):
        return None  # 1 < x < 2 for (1, 2)
    unordered = {kind, given_kind} <= {"", "{}"}
    if not (unordered or kind == given_kind) or len(gold_elements) != len(given_elements):
        return False
    if unordered:
        return _same_set(given_elements, gold_elements)
    return all(_same(a, b) for a, b in zip(given_elements, gold_elements, strict=True))


def _elements(text: str) -> tuple[str, list[str]]:
    r"""Return brackets and elements: ``("(]", [a, b])``, ``("{}", ...)`` for sets, ``("", ...)`` for lists and others.

    An element with ``\pm`` becomes two.
    """
    if (matrix := parse_matrix(text)) is not None and matrix.is_column:
        return "()", [row[0] for row in matrix.rows]
    plain = text.replace("\\{", "{").replace("\\}", "}")
    if not text.startswith(("\\{", "(", "[")) or not is_wrapped(plain, "([{", ")]}"):
        return "", _split(text)
    if text.startswith("\\{"):
        return "{}", _split(text[2:].removesuffix("\\}"))
    if "\\pm" in text and "," in text:
        return "", _split(text)  # several points
    elements = _split(text[1:-1])
    return text[0] + text[-1] if len(elements) > 1 else "", elements


def _split(text: str) -> list[str]:
    parts = split_outside(re.sub(r'\s+(?:and|or)\s+|\s*"\s*(?:and|or)\s*"\s*|;', ",", text), ",")
    return [normalize(element) for part in parts if part for element in _with_signs(part)] or [text]


def _with_signs(text: str) -> list[str]:
    r"""Return the values of an expression with ``\pm``, or of a point; ``\mp`` has the opposite sign."""
    if (n := text.count("\\pm")) == 0 or n > MAX_SIGNS:
        return [text]
    if "\\mp" in text:
        return [text.replace("\\pm", a).replace("\\mp", b) for a, b in ("+-", "-+")]
    start, *rest = text.split("\\pm")
    return [start + "".join(map("".join, zip(signs, rest, strict=True))) for signs in product("+-", repeat=n)]


def _same_set(given: Sequence[str], gold: Sequence[str]) -> bool:
    if len(gold) > MAX_SET_SIZE:
        return sorted(map(strip_spaces, given)) == sorted(map(strip_spaces, gold))

    def same(x: str, y: str) -> bool:
        return _elements(_named(x)[1])[0] == _elements(_named(y)[1])[0] and _same(
            x, y
        )  # {1} is not an element of {1, 2}

    return _in_any_order(given, gold, same)


def _in_any_order(given: Sequence[T], gold: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Return True if the elements can be paired so that each pair is the same."""
    rest = list(gold)
    for element in given:
        equal = next((i for i, other in enumerate(rest) if same(element, other)), None)
        if equal is None:
            return False
        del rest[equal]
    return not rest


def _as_builder(given: str, gold: str) -> bool | None:
    r"""Decide if both answers are sets by a condition; the letter is bound: ``\{2^n : n\ge 1\}``."""
    first, second = BUILDER.fullmatch(given), BUILDER.fullmatch(gold)
    if first is None or second is None:
        return None
    letters = [LETTER.findall(match[2]) for match in (first, second)]
    if not all(letters):
        return None
    old, new = letters[0][0], letters[1][0]
    if old != new and new in LETTER.findall(given):
        return False
    a, b = (re.sub(rf"(?<![a-zA-Z\\]){old}(?![a-zA-Z])", new, part).strip() for part in first.groups())
    return _same(a, second[1].strip()) and _same(b, second[2].strip())


def _as_equation(given: str, gold: str) -> bool | None:
    """Decide by the value after ``x =`` if either answer has a name; if both do, the names must be equal."""
    (name, value), (given_name, given_value) = (_named(text) for text in (gold, given))
    if not name and not given_name:
        return None
    function, given_function = FUNCTION.fullmatch(name), FUNCTION.fullmatch(given_name)
    if name != given_name and function and given_function and function.group(1) == given_function.group(1):
        if re.search(rf"(?<![a-zA-Z\\]){function.group(2)}(?![a-zA-Z])", given_value):
            return False  # f(t) = 2x
        given_value = re.sub(rf"(?<![a-zA-Z\\]){given_function.group(2)}(?![a-zA-Z])", function.group(2), given_value)
    elif name and given_name and name != given_name:
        is_curve = re.search(r"(?<![a-zA-Z\\])[a-z]", value + given_value) or sorted(name) == sorted(given_name)
        return None if is_curve else False  # y = x is x = y, xy = 1 is y = 1/x
    if function and given_function and function.group(1) == given_function.group(1):
        given_value = with_constant_of(value, given_value)
    if EQUALS.search(value) or EQUALS.search(given_value):
        return None
    if not (name and given_name) and {name or given_name, value, given_value} <= {"x", "y", "z"}:
        return False  # the line x=y
    return _same(given_value, value)


def _named(text: str) -> tuple[str, str]:
    """Return name and value of ``x = 5``; the name is empty if there is none."""
    sides = EQUALS.split(text)
    if len(sides) == 2 and NAME.fullmatch(strip_spaces(sides[0])):
        return strip_spaces(sides[0]), sides[1].strip()
    if len(sides) == 2 and NAME.fullmatch(strip_spaces(sides[1])) and quantity(sides[0].strip()):
        return strip_spaces(sides[1]), sides[0].strip()
    return "", text


CHECKS = (  # from cheapest to most expensive; each decides or returns None
    _as_choice, as_points, _as_cases, _as_residues, _as_values, _as_real_set, as_date, as_text, as_digits,
    as_ratio, _as_quantity, _as_equation, _as_matrix, _as_builder, _as_elements,
)  # fmt: skip
