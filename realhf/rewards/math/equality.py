r"""Whether two answers mean the same: a ladder from the cheapest question to the dearest.

Texts; numbers; tuples, intervals, lists, sets and matrices by their elements; ``x=5`` for ``5``; and at last symbolic
mathematics. The first rung that can decide does: a wrong number never reaches the rungs below it.
"""

import re
from collections.abc import Sequence

from realhf.rewards.math.normalize import is_wrapped, normalize, split_outside, strip_spaces
from realhf.rewards.math.quantities import quantity, same_quantity
from realhf.rewards.math.symbolic import same_mathematics

CHOICE = re.compile(r"\(?([A-J])\)?")
CHOSEN = re.compile(r"(?:(?i:option|choice|answer)\s+)?\(?([A-Ja-j])(?:[).:].*)?", re.DOTALL)
TEXT_ANSWER = re.compile(r"[^\W\d_]+(?:[\s,.'-]+[^\W\d_]+)*")
SHORT_TEXTS = frozenset(["yes", "no", "odd", "even", "all", "one", "two", "six", "ten", "red", "sun", "mon"])
EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
NAME = re.compile(r"\\?[A-Za-z]{1,2}|\\[a-z]+|[A-Za-z](?:_\{?\w+\}?|'|\([a-z](?:,[a-z])*\))|\([a-z](?:,[a-z])*\)")
MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![a-z])\s*")
MATRIX = re.compile(
    r"\\begin\{([pbvBV]?|small)(?:matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1(?:matrix|array)\}", re.DOTALL
)
DETERMINANTS = ("v", "V")
BASED = re.compile(r"([0-9A-Fa-f]+)_\{?(\d{1,2})\}?")
OPERATOR = re.compile(r"[\w)}]\s*(?:[+*/-]|\\times|\\cdot|\\div)\s*[\w({\\-]|(?<!_)\d\s+[\d.]|\\[dtc]?frac")
RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in|cup)(?![a-z])")
EXPONENT = re.compile(r"\^\s*\{[^{}]*\}")
LONGEST = 2000  # characters of an answer that is looked into
MOST_ELEMENTS = 30


def same_answer(given: str, gold: str) -> bool:
    """Say whether two answers mean the same: as texts, as numbers, element by element, or as mathematics."""
    if max(len(given), len(gold)) > LONGEST:
        return given.strip() == gold.strip()
    given, gold = normalize(given), normalize(gold)
    return bool(given and gold) and _same(given, gold)


def _same(given: str, gold: str) -> bool:
    if strip_spaces(given) == strip_spaces(gold):
        return True
    for rung in (_as_choice, _as_text, _as_digits, _as_quantity, _as_equation, _as_matrix, _as_elements):
        if (verdict := rung(given, gold)) is not None:
            return verdict
    return same_mathematics(given, gold)


def _as_choice(given: str, gold: str) -> bool | None:
    """Decide where a letter is wanted: ``(C)`` is ``C``, and so is ``C. 42``."""
    if (wanted := CHOICE.fullmatch(gold)) is None:
        return None
    chosen = CHOSEN.fullmatch(given)
    return chosen is not None and chosen.group(1).upper() == wanted.group(1)


def _as_text(given: str, gold: str) -> bool | None:
    """Decide where words are wanted or given, without regard to case, marks, articles and order of a list."""
    wanted, said = (is_text(text) for text in (gold, given))
    if not (wanted or said):
        return None
    if _words(given) == _words(gold):
        return True
    lists = [re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+|\s+or\s+", text) for text in (given, gold)]
    first, second = (sorted(map(_words, parts)) for parts in lists)
    return len(first) > 1 and first == second


def is_text(text: str) -> bool:
    """Say whether an answer is words and not mathematics."""
    if not TEXT_ANSWER.fullmatch(text):
        return False
    words = re.findall(r"[^\W\d_]+", text)
    return max(map(len, words)) > 3 or any(word.lower() in SHORT_TEXTS for word in words)


def _words(text: str) -> list[str]:
    words = re.findall(r"\w+", text.casefold())
    return words[1:] if len(words) > 1 and words[0] in ("the", "a", "an") else words


def _as_digits(given: str, gold: str) -> bool | None:
    """Decide where a number with its base is wanted: ``101_2`` is ``101_{2}`` or ``101``."""
    if (wanted := BASED.fullmatch(strip_spaces(gold))) is None:
        return None
    found = BASED.fullmatch(strip_spaces(given))
    return found.groups() == wanted.groups() if found else strip_spaces(given) == wanted.group(1)


def _as_quantity(given: str, gold: str) -> bool | None:
    """Decide where a number is wanted, unless the other side has to be worked out first."""
    wanted = quantity(gold)
    if wanted is None:
        return None
    result = given
    if equals := EQUALS.split(given):
        result = equals[-1].strip()
        if len(equals) == 2 and NAME.fullmatch(strip_spaces(equals[1])):  # 5 = x
            result = equals[0].strip()
    found = quantity(result)
    if found is not None:
        return same_quantity(found, wanted)
    if OPERATOR.search(EXPONENT.sub("", result)):
        return False
    return None if len(_elements(result)[1]) == 1 else False


def _as_matrix(given: str, gold: str) -> bool | None:
    wanted = MATRIX.fullmatch(_unbracketed(gold))
    if wanted is None:
        return None
    found = MATRIX.fullmatch(_unbracketed(given))
    if found is None or (wanted.group(1) in DETERMINANTS) != (found.group(1) in DETERMINANTS):
        return False
    a, b = ([split_outside(row, "&") for row in _rows(m.group(2))] for m in (found, wanted))
    return [len(row) for row in a] == [len(row) for row in b] and all(
        _same(x, y) for row_a, row_b in zip(a, b, strict=True) for x, y in zip(row_a, row_b, strict=True)
    )


def _unbracketed(text: str) -> str:
    inner = text[1:-1].strip() if is_wrapped(text, "([", ")]") else text
    return inner if inner.startswith("\\begin") else text


def _rows(body: str) -> list[str]:
    rows = [re.sub(r"^\[[^\]]*\]", "", row).strip() for row in body.split("\\\\")]
    return [row for row in rows if row]


def _as_elements(given: str, gold: str) -> bool | None:
    """Decide where one side is a tuple, an interval, a list or a set: same brackets, and every element has its like."""
    (kind, wanted), (given_kind, found) = (_elements(MEMBER.sub("", text)) for text in (gold, given))
    if len(wanted) == len(found) == 1 and kind == given_kind == "":
        return None
    if (len(wanted) == 1 or len(found) == 1) and RELATION.search(gold + given):
        return None  # 1 < x < 2 for (1, 2)
    unordered = kind in ("", "{}")
    if (kind != given_kind and not (unordered and given_kind in ("", "{}"))) or len(wanted) != len(found):
        return False
    if unordered:
        return _same_set(found, wanted)
    return all(_same(a, b) for a, b in zip(found, wanted, strict=True))


def _elements(text: str) -> tuple[str, list[str]]:
    r"""Return brackets and elements: ``("(]", [a, b])``, ``("{}", ...)`` for sets, ``("", ...)`` for lists and others.

    ``\pm`` makes two elements of one.
    """
    plain = text.replace("\\{", "{").replace("\\}", "}")
    if not text.startswith(("\\{", "(", "[")) or not is_wrapped(plain, "([{", ")]}"):
        return "", _split(text)
    if text.startswith("\\{"):
        return "{}", _split(text[2:].removesuffix("\\}"))
    elements = _split(text[1:-1])
    return text[0] + text[-1] if len(elements) > 1 else "", elements


def _split(text: str) -> list[str]:
    parts = split_outside(re.sub(r'\s+(?:and|or)\s+|\s*"\s*(?:and|or)\s*"\s*|;', ",", text), ",")
    parts = [part for part in parts if part]
    signed = [(p.replace("\\pm", sign, 1) for sign in "+-") if p.count("\\pm") == 1 else (p,) for p in parts]
    return [normalize(element) for pair in signed for element in pair] or [text]


def _same_set(found: Sequence[str], wanted: Sequence[str]) -> bool:
    if len(wanted) > MOST_ELEMENTS:
        return sorted(map(strip_spaces, found)) == sorted(map(strip_spaces, wanted))
    rest = list(wanted)
    for element in found:
        kind = _elements(element)[0]  # {1} is no element of {1, 2}
        like = next((other for other in rest if _elements(other)[0] == kind and _same(element, other)), None)
        if like is None:
            return False
        rest.remove(like)
    return True


def _as_equation(given: str, gold: str) -> bool | None:
    """Decide by what stands behind ``x =``, where one side or both have it; the names of both must agree."""
    (name, value), (given_name, given_value) = (_named(text) for text in (gold, given))
    if not name and not given_name:
        return None
    if name and given_name and name != given_name:
        return False
    if EQUALS.search(value) or EQUALS.search(given_value):
        return None
    return _same(given_value, value)


def _named(text: str) -> tuple[str, str]:
    """Return name and value of ``x = 5``; the name is empty where there is none."""
    sides = EQUALS.split(text)
    if len(sides) == 2 and NAME.fullmatch(strip_spaces(sides[0])):
        return strip_spaces(sides[0]), sides[1].strip()
    if len(sides) == 2 and NAME.fullmatch(strip_spaces(sides[1])) and quantity(sides[0].strip()):
        return strip_spaces(sides[1]), sides[0].strip()
    return "", text
