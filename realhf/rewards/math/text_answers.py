r"""Compares answers that are not expressions: words, names of points, dates, times, ratios, digits of a base.

Each check decides, or returns None if it does not apply.
"""

import calendar
import re

from realhf.rewards.math.normalize import strip_spaces

TEXT_ANSWER = re.compile(r"[^\W\d_]+(?:[\s,.'-]+[^\W\d_]+)*")
SHORT_TEXTS = frozenset(["yes", "no", "odd", "even", "all", "one", "two", "six", "ten", "red", "sun", "mon"])
ARTICLES = frozenset(["the", "a", "an", "on"])
WORDS = {"every": "all", "each": "all", "any": "all", "convergent": "converge", "divergent": "diverge", "won": "win"}
IMPLIED = frozenset(["exist", "win", "series", "sequence", "integral", "function", "number", "player"])
SUBJECT = re.compile(r"^(?:the\s+\w+|it|they|he|she)\s+(?:is|are|was|will\s+be)\s+(?!not\b)")
STRATEGY = re.compile(r"\bhas\s+(?:a|the)\s+winning\s+strategy$")
PLURAL = re.compile(r"(?<=\w{3})(?<!s|e)s$|(?<=\w{2}[^i]e)s$")
VERDICTS = frozenset(["yes", "no", "true", "false"])
RATIO = re.compile(r'(\d+(?:\s*:\s*\d+)*)\s*(?:"?([ap]m|noon|midnight)"?)?')
HALVES = {"noon": "pm", "midnight": "am"}
MONTH = "|".join([*calendar.month_name[1:], *calendar.month_abbr[1:], "Sept"])
DATE = re.compile(rf"(?i)(?:\d+[\s,.]+)*(?:{MONTH})(?:[\s,.]+\d+)+|(?:\d+[\s,.]+)+(?:{MONTH})")
POINTS = re.compile(r"(\\(?:overline|angle))?\s*\{?\s*([A-Z]{2,})\s*\}?")
FRACTION = re.compile(r"(\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\}")
BASED = re.compile(r"([0-9A-Fa-f]+)_\{?(\d{1,2})\}?")


def as_text(given: str, gold: str) -> bool | None:
    """Decide if either answer is words; case, punctuation, articles and the order of a list do not matter."""
    if not (is_text(gold) or is_text(given)):
        return None
    words, gold_words = _words(given), _words(gold)
    if gold_words in (words, _core(words)) or words == _core(gold_words):
        return True
    for verdict, sentence in ((gold, given), (given, gold)):
        if verdict.casefold() in VERDICTS and re.match(rf"{verdict}\s*[,.;:]", sentence, re.IGNORECASE):
            return set(_words(sentence)) & VERDICTS == {verdict.casefold()}
    lists = [re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+|\s+or\s+", text) for text in (given, gold)]
    first, second = (sorted(map(_words, parts)) for parts in lists)
    return len(first) > 1 and first == second


def is_text(text: str) -> bool:
    """Return True if an answer is words rather than mathematics."""
    if not TEXT_ANSWER.fullmatch(text):
        return False
    words = re.findall(r"[^\W\d_]+", text)
    return max(map(len, words)) > 3 or any(word.lower() in SHORT_TEXTS for word in words)


def _words(text: str) -> list[str]:
    text = SUBJECT.sub("", STRATEGY.sub("wins", text.casefold()))
    words = [WORDS.get(word, word) for word in re.findall(r"\w+", text)]
    words = [PLURAL.sub("", word) for word in words]
    return [word for word in words if word not in ARTICLES] or words


def _core(words: list[str]) -> list[str]:
    """Return the words without those that the question implies, as in ``Alice wins`` for the winner."""
    return [word for word in words if word not in IMPLIED]


def as_digits(given: str, gold: str) -> bool | None:
    """Decide if the gold answer is a number with a base: ``101_{2}`` and ``101`` equal ``101_2``."""
    if (gold_match := BASED.fullmatch(strip_spaces(gold))) is None:
        return None
    given_match = BASED.fullmatch(strip_spaces(given))
    if given_match is None:
        return strip_spaces(given) == gold_match.group(1)
    return [part.upper() for part in given_match.groups()] == [part.upper() for part in gold_match.groups()]


def as_ratio(given: str, gold: str) -> bool | None:
    """Decide if either answer is a ratio or a time of day; a ratio of two numbers also equals their fraction."""
    gold_match, given_match = (
        match if match and (match[2] or ":" in text) else None
        for text in (gold, given)
        for match in [RATIO.fullmatch(text)]
    )
    if gold_match is given_match or ":" not in (gold if gold_match else "") + (given if given_match else ""):
        return None
    if gold_match is None or given_match is None:
        ratio, other = (gold_match or given_match), (given if gold_match else gold)
        assert ratio is not None
        fraction = FRACTION.fullmatch(strip_spaces(other))
        return fraction is not None and ratio.group(1).replace(" ", "") == ":".join(filter(None, fraction.groups()))
    (parts, half), (given_parts, given_half) = gold_match.groups(), given_match.groups()
    if half and given_half and HALVES.get(half, half) != HALVES.get(given_half, given_half):
        return False
    a, b = (
        [int(part) for part in (text if ":" in text or not at else f"{text}:0").split(":")]
        for text, at in ((parts, half), (given_parts, given_half))
    )
    is_time = half or given_half or re.search(r":\s*0", parts + given_parts)
    if a == b or is_time or len(a) != len(b):
        return a == b
    return all(x * b[0] == y * a[0] for x, y in zip(a, b, strict=True))


def as_date(given: str, gold: str) -> bool | None:
    """Decide if both answers are dates: ``4 July`` equals ``July 4``."""
    first, second = (
        sorted(word[:3] if word.isalpha() else word for word in _words(text))
        if DATE.fullmatch(text.replace('"', " ").strip())
        else None
        for text in (given, gold)
    )
    return None if first is None or second is None else first == second


def as_points(given: str, gold: str) -> bool | None:
    r"""Decide if both answers are names of points: ``\overline{AB}`` equals ``BA``, but ``ABC`` is not ``BAC``."""
    a, b = POINTS.fullmatch(given), POINTS.fullmatch(gold)
    if a is None or b is None or (a[1] and b[1] and a[1] != b[1]):
        return None if a is None or b is None else False
    return a[2] == b[2] or (bool(a[1] or b[1]) and a[2] == b[2][::-1])
