"""Judges a mathematical answer: finds it in the text, and lets the math-verify library compare it with the solutions.

Nothing here has a deadline: ``9^99999999`` keeps sympy busy for ever, which is why judges run in child processes.
"""

import re
from collections.abc import Mapping

NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
ANSWER_IS = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?[ \t]*([^\n]+)", re.IGNORECASE)
SENTENCE_END = re.compile(r"\.(?=\s|$)")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
PLAIN_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)")
OPERATOR = re.compile(r"[\w)}]\s*(?:[+*-]|\\times(?!\s*10\s*\^)|\\cdot(?!\s*10\s*\^))\s*[\w({\\-]")
FRACTION = re.compile(r"\d\s*/\s*\d|\\[dtc]?frac")


def judge_math(prompt: str, answer: str, row: Mapping[str, object]) -> float:
    """Return 1.0 when ``answer`` agrees with any of ``row['solutions']``, else 0.0; no text makes it raise."""
    solutions = row["solutions"]
    if not isinstance(solutions, list) or not solutions:
        raise ValueError(f"row['solutions'] is {solutions!r}, it must be a list of texts")
    given = extract_answer(answer)
    if not given:
        return 0.0
    golds = [marked_answer(s) for s in solutions]
    return float(any(same_answer(given, s if gold is None else gold) for gold, s in zip(golds, solutions, strict=True)))


def extract_answer(text: str) -> str | None:
    r"""Return the last ``\boxed{}``, else what follows the last ``####``, else X of "answer is X", or the last number.

    A marker with nothing behind it gives an empty text: the answer was announced and not given.
    """
    if (marked := marked_answer(text)) is not None:
        return marked
    if said := ANSWER_IS.findall(text):
        return SENTENCE_END.split(said[-1])[0].strip()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def marked_answer(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{}``, else the line after the last ``####``, else None."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        inside = start + len("\\boxed{")
        if (end := closing_brace(text, inside)) is not None:
            return text[inside:end].strip()
    if "####" in text:
        tail = text.rpartition("####")[2].strip()
        return tail.splitlines()[0].strip() if tail else ""
    return None


def closing_brace(text: str, start: int) -> int | None:
    """Return where the brace that is open at ``start`` closes, or None; escaped braces do not count."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None


def same_answer(given: str, gold: str) -> bool:
    """Say whether two answers mean the same: as texts, or as mathematics to six decimals."""
    from math_verify import parse, verify

    given, gold = bare(given), bare(gold)
    if given.casefold() == gold.casefold():
        return True
    if not worked_out(given, gold):
        return False
    wanted = parse(f"${gold}$", parsing_timeout=None)
    forms = [f"${given}$"]
    if len(NUMBER.findall(given)) == 1:  # "18 dollars"; two numbers in prose would leave a choice
        forms.append(given)
    return any(verify(wanted, parse(form, parsing_timeout=None), timeout_seconds=None) for form in forms)


def bare(text: str) -> str:
    """Return ``text`` without currency and math signs, emphasis, thousands separators and the final full stop."""
    text = text.replace("\\$", "").replace("$", "").replace("\\!", "").replace("\\%", "%")
    return THOUSANDS.sub("", text.strip(" \t\n*").rstrip(".").strip(" *"))


def worked_out(given: str, gold: str) -> bool:
    """Say whether ``given`` is a result and not the exercise again: ``27+58`` is no answer where 85 is wanted."""
    if not PLAIN_NUMBER.fullmatch(gold):
        return True
    result = given.rpartition("=")[2]
    return not OPERATOR.search(result) and ("." in gold or not FRACTION.search(result))
