r"""Extracts the final answer of a response: boxed, after ``####``, in answer tags, after "answer is", or a number.

A number that is not marked counts only in the last sentence, and if the sentence does not doubt it.

Every search takes linear time, since a response may be any text.
"""

import re

from realhf.rewards.math.normalize import ascii_signs

NUMBER = re.compile(r"(?<![\w.^])(?<!\^\{)-?\$?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?\\?%?")
ANSWER_IS = re.compile(r"\banswer\**(?:\s+is|\s*:)\**\s*:?\s*(?=\S)", re.IGNORECASE)
ANSWER_TAG = re.compile(r"</?answer>", re.IGNORECASE)
SENTENCE_END = re.compile(r"\.(?=\s|$)|,?\s+(?:because|since|so|which|where)\b")
DISPLAY = re.compile(r"\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\(?!\]))*)\\\]|\\\(((?:[^\\]|\\(?!\)))*)\\\)")
OTHER_NUMBER = re.compile(r"\d[^\d\n]{,12}\b(?:or|and)\b[^\d\n]{,9}$")
OPERAND = re.compile(r"[\d)]\s*[+*/]\s*$")
UNFINISHED = re.compile(r"[-+*/=:(]\s*$")
END_OF_SENTENCE = re.compile(r"[.!?]\s+|\n+")
UNCERTAIN = re.compile(
    r"\b(?:may|might|could|maybe|perhaps|possibly|probably|need\s+to|step|guess|suppose|assume|let|whether|if|either|not|cannot|can't|unsure)\b",
    re.IGNORECASE,
)
BARE_BOX = re.compile(r"\\boxed\s+(\w[\w.,]*)")
ALTERNATIVE = re.compile(r"[\s$]{,4}(?:,[\s$]{,4}(?:and|or)?|and|or)[\s$]{,4}(?:[a-z]\s{,2}=\s{,2})?")
BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""Return the last ``\boxed{}``, else what follows the last ``####``, else X of "answer is X", or the last number.

    If the text has ``<answer>`` tags, only their content is searched, and it is the answer if none of it is marked. A
    marker without content gives an empty text.
    """
    text = after_thoughts(ascii_signs(text))
    tagged = tagged_answer(text)
    text = text if tagged is None else tagged
    if (marked := marked_answer(text)) is not None:
        return marked
    if "\\boxed" in text:
        return ""  # the response ends within the box
    if statements := list(ANSWER_IS.finditer(text)):
        return stated_answer(text[statements[-1].end() :])
    if tagged is not None:
        return tagged
    return last_number(text)


def after_thoughts(text: str) -> str:
    """Return what follows the last ``</think>`` unless it is blank; empty if the thoughts do not end."""
    thoughts, end, answer = text.rpartition("</think>")
    if not end and "<think>" in text:
        return ""
    return answer if answer.strip() else thoughts


def last_number(text: str) -> str | None:
    """Return the last number of the last sentence unless the sentence doubts it, lists others or is incomplete."""
    sentence = END_OF_SENTENCE.split(text.rstrip())[-1]
    numbers = list(NUMBER.finditer(sentence))
    if not numbers or UNCERTAIN.search(sentence) or UNFINISHED.search(sentence):
        return None
    before, number = sentence[: numbers[-1].start()], numbers[-1].group()
    is_alternative = len(numbers) > 1 and numbers[-2].group() != number and OTHER_NUMBER.search(before[-40:])
    return None if is_alternative or OPERAND.search(before[-40:]) else number


def tagged_answer(text: str) -> str | None:
    """Return the content of the last complete pair of ``<answer>`` and ``</answer>``, or None."""
    content, start = None, None
    for tag in ANSWER_TAG.finditer(text):
        if not tag.group().startswith("</"):
            start = tag.end()
        elif start is not None:
            content, start = text[start : tag.start()].strip(), None
    return content


def marked_answer(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{}``, else the line after the last ``####``, else None."""
    if (boxed := last_box(text)) is not None:
        return boxed
    if "####" in text:
        tail = text.rpartition("####")[2].strip()
        return tail.splitlines()[0].strip() if tail else ""
    return None


def last_box(text: str) -> str | None:
    r"""Return the content of the complete ``\boxed{}`` that starts last; escaped braces are ignored.

    Boxes that "and", "or" or a comma joins are one answer: ``3, 5`` of ``\boxed{3} or \boxed{5}``.
    """
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    opened: list[tuple[int, int] | None] = []  # start of a box and of its content; None for an ordinary brace
    boxes: list[tuple[int, int, int]] = []
    for token in BOX_TOKEN.finditer(text):
        word = token.group()
        if len(word) > 2:
            opened.append(token.span())
        elif word == "{":
            opened.append(None)
        elif word == "}" and opened and (start := opened.pop()) is not None:
            boxes.append((*start, token.start()))
    answers: list[str] = []
    follows = None
    for start_of_box, content, end in sorted(boxes, reverse=True):
        if follows is not None and not ALTERNATIVE.fullmatch(text, end + 1, follows):
            break
        answers.append(text[content:end].strip())
        follows = start_of_box
    return ", ".join(reversed(answers)) if answers else None


def stated_answer(text: str) -> str:
    """Return the answer at the start of the text after "answer is": a formula, or the rest of the sentence."""
    if (display := DISPLAY.match(text)) is not None:
        return next(filter(None, display.groups()), "").strip()
    sentence = text.splitlines()[0]
    if re.match(r"\$[^$\d][^$]*\$|\$[^$ ]+\$", sentence):
        return sentence[1 : sentence.index("$", 1)].strip()
    return SENTENCE_END.split(sentence)[0].strip()
