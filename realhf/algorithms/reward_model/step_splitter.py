"""Splits a response into reasoning steps, given as the characters or tokens at which they begin.

A delimiter belongs to the following step. After VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679, and its code).
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from realhf.api.config import StepSplitter
from realhf.data.batch import SequenceBatch

NEW_LINE = re.compile(r"(?:\n[^\S\n]*)+(?=\S)")
PROTECTED = re.compile(
    r"\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)|\$[^$]*\$|\[asy\].*?\[/asy\]|\\begin\{(?P<env>[^}]*)\}.*?\\end\{(?P=env)\}",
    re.DOTALL,
)
SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z\\$])|(?<=\.\$)\s+(?=[A-Z\\$])|(?<=\.\\\])\s+(?=\S)")
SENTENCE_ENDS = (".", ".$", ".$$", ".\\]")
INITIAL = re.compile(r"(?:^|\W)[A-Z]\.$")
BREAKS_IN_TEXT = re.compile(r"(?<=[,:])\s|\s(?=and\s|to\s)")
BREAKS_IN_MATHS = re.compile(r"=|\+|\\equiv|\\le(?![a-z])|\\leq|\\ge(?![a-z])|\\geq|<|>")
MIN_STEP, MAX_STEP, MIN_TEXT_PART, MIN_MATHS_PART = 20, 100, 40, 20


def line_steps(text: str) -> list[int]:
    """Return the offsets of lines (GSM8K); blank lines belong to the next line, ``#### N`` to the line before it."""
    starts = [0]
    for gap in NEW_LINE.finditer(text):
        if text[: gap.start()].strip() and not text.startswith("####", gap.end()):
            starts.append(gap.start())
    return starts


def latex_steps(text: str) -> list[int]:
    """Return the offsets of lines and sentences (MATH).

    Formulas, figures and environments are not split, except in steps of more than 100 characters. These are split at a
    comma, colon, ``and`` or ``to``, or inside a formula at a relation, as close to the middle as possible.
    """
    protected = [match.span() for match in PROTECTED.finditer(text)]
    cuts = {gap.start() for gap in NEW_LINE.finditer(text) if text[: gap.start()].strip()}
    cuts |= {gap.start() for gap in SENTENCE.finditer(text) if not INITIAL.search(text[: gap.start()])}
    outside = [cut for cut in sorted(cuts) if not _is_inside(cut, protected)]
    starts = _without_short_steps(text, [0, *outside])
    steps = pairwise([*starts, len(text)])
    return [offset for start, stop in steps for offset in _split_long(text, start, stop, protected)]


Splitter = Callable[[str], list[int]]
SPLITTERS: dict[StepSplitter, Splitter] = {StepSplitter.line: line_steps, StepSplitter.latex: latex_steps}


def step_starts(batch: SequenceBatch, tokenizer: Any, split: Splitter) -> list[list[int]]:
    """Return the positions in each row at which the steps of its response begin; reads ``tokens prompt_mask``."""
    rows = zip(batch.columns["tokens"].rows(), batch.columns["prompt_mask"].rows(), strict=True)
    firsts = [(tokens, int(prompt_mask.sum())) for tokens, prompt_mask in rows]
    return [[n + start for start in _starts_in_response(tokenizer, row[n:].tolist(), split)] for row, n in firsts]


def _starts_in_response(tokenizer: Any, ids: Sequence[int], split: Splitter) -> list[int]:
    texts = tokenizer.batch_decode([[token] for token in ids])
    if "".join(texts) != tokenizer.decode(ids):  # a character can consist of several tokens
        prefixes = [tokenizer.decode(ids[:i]) for i in range(len(ids) + 1)]
        texts = [after[len(before) :] for before, after in pairwise(prefixes)]
    return token_starts(texts, split("".join(texts)))


def token_starts(texts: Sequence[str], starts: Sequence[int]) -> list[int]:
    """Return the first token of each step, ascending: the first token whose first character is in the step.

    ``texts`` are the texts of the tokens, ``starts`` the character offsets of steps. Steps in which no token begins are
    dropped.
    """
    offsets = [0, *accumulate(map(len, texts))][:-1]
    return sorted({bisect_left(offsets, start) for start in starts} - {len(offsets)})


def _without_short_steps(text: str, starts: list[int]) -> list[int]:
    """Join steps of fewer than 20 characters that end no sentence with the next step, the last with the previous."""
    kept = [0]
    for start in starts[1:]:
        step = text[kept[-1] : start].strip()
        if len(step) >= MIN_STEP or step.endswith(SENTENCE_ENDS):
            kept.append(start)
    last = text[kept[-1] :].strip()
    return kept[:-1] if len(kept) > 1 and len(last) < MIN_STEP and not last.endswith(SENTENCE_ENDS) else kept


def _is_inside(cut: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start < cut < stop for start, stop in spans)


def _split_long(text: str, start: int, stop: int, protected: list[tuple[int, int]]) -> list[int]:
    """Return the offsets of the parts of ``text[start:stop]``, which have at most 100 characters if possible."""
    if stop - start <= MAX_STEP:
        return [start]

    def legal(pattern: re.Pattern[str], half: int, in_maths: bool) -> list[int]:
        cuts = (match.start() for match in pattern.finditer(text, start, stop))
        return [cut for cut in cuts if start + half <= cut <= stop - half and _is_inside(cut, protected) is in_maths]

    cuts = legal(BREAKS_IN_TEXT, MIN_TEXT_PART, False) or legal(BREAKS_IN_MATHS, MIN_MATHS_PART, True)
    if not cuts:
        return [start]
    cut = min(cuts, key=lambda c: abs(2 * c - start - stop))
    return _split_long(text, start, cut, protected) + _split_long(text, cut, stop, protected)
