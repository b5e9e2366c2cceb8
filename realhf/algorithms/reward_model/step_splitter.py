"""Where the steps of a reasoned answer begin, as character offsets: pieces between them add up to the text exactly.

A delimiter belongs to the step that follows it. After VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679, and its code).
"""

import re
from collections.abc import Callable

from realhf.api.config import StepSplitter

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
SHORTEST, LONGEST, HALF_OF_TEXT, HALF_OF_MATHS = 20, 100, 40, 20


def line_steps(text: str) -> list[int]:
    """Return the offsets at which steps begin, 0 first: a step is a line, as GSM8K has it.

    Blank lines go with the line after them; those before the first line, and ``#### N`` at the end, begin no step.
    """
    starts = [0]
    for gap in NEW_LINE.finditer(text):
        if text[: gap.start()].strip() and not text.startswith("####", gap.end()):
            starts.append(gap.start())
    return starts


def latex_steps(text: str) -> list[int]:
    """Return the offsets at which steps begin, 0 first: lines and sentences, as MATH's solutions have them.

    Formulas, figures and environments stay whole unless a step has more than 100 characters: that is broken at a comma,
    ``and``, ``:`` or ``to``, and within formulas at a relation, as near to its middle as both halves stay long enough.
    """
    protected = [match.span() for match in PROTECTED.finditer(text)]
    cuts = {gap.start() for gap in NEW_LINE.finditer(text) if text[: gap.start()].strip()}
    cuts |= {gap.start() for gap in SENTENCE.finditer(text) if not INITIAL.search(text[: gap.start()])}
    outside = [cut for cut in sorted(cuts) if not any(start < cut < stop for start, stop in protected)]
    starts = _without_short_steps(text, [0, *outside])
    found = []
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        found += _broken(text, start, stop, protected)
    return found


SPLITTERS: dict[StepSplitter, Callable[[str], list[int]]] = {
    StepSplitter.line: line_steps,
    StepSplitter.latex: latex_steps,
}


def _without_short_steps(text: str, starts: list[int]) -> list[int]:
    """Join steps of fewer than 20 characters that end no sentence with what follows; the last with what precedes."""
    kept = [0]
    for start in starts[1:]:
        step = text[kept[-1] : start].strip()
        if len(step) >= SHORTEST or step.endswith(SENTENCE_ENDS):
            kept.append(start)
    last = text[kept[-1] :].strip()
    return kept[:-1] if len(kept) > 1 and len(last) < SHORTEST and not last.endswith(SENTENCE_ENDS) else kept


def _broken(text: str, start: int, stop: int, protected: list[tuple[int, int]]) -> list[int]:
    """Return the starts of the parts of ``text[start:stop]``, none of them needlessly longer than 100 characters."""
    if stop - start <= LONGEST:
        return [start]
    spans = [span for span in protected if span[0] < stop and span[1] > start]

    def within(cut: int) -> bool:
        return any(a < cut < b for a, b in spans)

    def legal(pattern: re.Pattern[str], half: int, in_maths: bool) -> list[int]:
        cuts = (match.start() for match in pattern.finditer(text, start, stop))
        return [cut for cut in cuts if within(cut) is in_maths and start + half <= cut <= stop - half]

    cuts = legal(BREAKS_IN_TEXT, HALF_OF_TEXT, False) or legal(BREAKS_IN_MATHS, HALF_OF_MATHS, True)
    if not cuts:
        return [start]
    cut = min(cuts, key=lambda c: abs(2 * c - start - stop))
    return _broken(text, start, cut, protected) + _broken(text, cut, stop, protected)
