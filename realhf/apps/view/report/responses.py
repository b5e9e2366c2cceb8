"""The responses on the page: a selection of steps and rows, in a limited number of characters."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.apps.view.report.metrics_file import FileIdentity, GrowingFile, file_identity, read_object
from realhf.apps.view.report.text import shortened

MAX_STEPS, MAX_ROWS, MAX_READ = 40, 32, 256  # steps of a run, rows of a step; rows of a step that are read
MAX_PROMPT, MAX_RESPONSE = 4_000, 12_000  # characters
MAX_TOTAL = 1_500_000  # characters of all runs
COLUMNS = ("prompt_id", "sample", "prompt", "response", "answer_tokens", "rewards", "truncated", "fields",
           "turns")  # fmt: skip


@dataclass(frozen=True)
class ResponseRow:
    prompt: str
    response: str
    sample: int
    reward: float | None
    n_tokens: float | None
    is_truncated: bool
    n_omitted: int  # characters
    turns: tuple[tuple[bool, str, float | None], ...] = ()  # of an episode: of the environment, text, reward

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class StepResponses:
    """Rows of a step; ``n_omitted`` are further rows of the file that the page does not contain."""

    step: int
    rows: tuple[ResponseRow, ...]
    n_omitted: int


RowCache = dict[int, tuple[FileIdentity | None, list[ResponseRow], int]]
"""The rows of steps that have been read, and the identities of their files."""


@dataclass
class Responses:
    """The selected steps of a run, in order, and the number of steps in its folder."""

    steps: list[StepResponses] = field(default_factory=list)
    n_steps: int = 0

    def note(self, folder: Path) -> str:
        """Return what the page does not contain, and where it is; empty if it contains all responses."""
        parts = []
        if n := self.n_steps - len(self.steps):
            parts.append(f"{n} of {self.n_steps} steps")
        if n := sum(step.n_omitted for step in self.steps):
            parts.append(f"{n} further rows of the steps shown")
        if n := sum(row.n_omitted for step in self.steps for row in step.rows):
            parts.append(f"{n:,} characters of long texts")
        return f"Left out: {', '.join(parts)}. All responses are in {folder}." if parts else ""


def step_files(folder: Path) -> dict[int, Path]:
    """Return the file of every step, in order of the steps."""
    found = {}
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isascii() and number.isdigit() and len(number) < 16:
            found[int(number)] = path
    return dict(sorted(found.items()))


def spread(values: Sequence[int], limit: int) -> list[int]:
    """Return at most ``limit`` values at equal distances, with the first and the last."""
    if len(values) <= limit or limit < 2:
        return list(values[-limit:])
    return [values[i * (len(values) - 1) // (limit - 1)] for i in range(limit)]


def read_responses(folder: Path, budget: int = MAX_TOTAL, cache: RowCache | None = None) -> Responses:
    """Read a selection of the responses; ``budget`` limits their characters. Damaged rows are skipped.

    Files that have not changed since they were put into ``cache`` are not read again.
    """
    files, before, cache = step_files(folder), dict(cache or {}), {} if cache is None else cache
    cache.clear()
    for step in spread(list(files), MAX_STEPS):
        identity = file_identity(files[step])
        known = before.get(step)
        cache[step] = known if known and known[0] == identity else (identity, *read_rows(files[step]))
    chosen = {step: (rows, n_rows) for step, (_, rows, n_rows) in cache.items()}
    prompts = Counter(prompt for rows, _ in chosen.values() for prompt in {row.prompt for row in rows})
    share = budget // max(1, len(chosen))
    selected = []
    for step, (rows, n_rows) in chosen.items():
        kept = select_rows(rows, prompts, share)
        selected.append(StepResponses(step, tuple(kept), n_rows - len(kept)))
    return Responses(selected, len(files))


def select_rows(rows: Sequence[ResponseRow], n_steps_of: Mapping[str, int], budget: int) -> list[ResponseRow]:
    """Return the rows that fit, in their order; prompts of several steps first, because they can be compared."""
    by_value = sorted(range(len(rows)), key=lambda i: (-n_steps_of.get(rows[i].prompt, 0), i))
    kept, size = list[int](), 0
    for i in by_value[:MAX_ROWS]:
        size += rows[i].size
        if size > budget and kept:
            break
        kept.append(i)
    return [rows[i] for i in sorted(kept)]


def read_rows(path: Path) -> tuple[list[ResponseRow], int]:
    """Return the first rows of a file with texts of limited length, and the number of rows read and skipped."""
    rows: list[ResponseRow] = []
    file, n = GrowingFile(path), 0
    for line in _lines(file):
        n += 1
        if len(rows) < MAX_READ and (record := read_object(line)) and (row := response_row(record)):
            rows.append(row)
    return rows, n + file.n_long


def _lines(file: GrowingFile) -> Iterator[bytes]:
    try:
        yield from file.lines()
    except OSError:
        return


def response_row(record: Mapping[str, Any]) -> ResponseRow | None:
    """Return a row of a generations file; None if it has no response."""
    prompt, response = record.get("prompt"), record.get("response")
    if not isinstance(response, str):
        return None
    prompt = prompt if isinstance(prompt, str) else ""
    prompt, n_prompt = shortened(prompt, MAX_PROMPT)
    response, n_response = shortened(response, MAX_RESPONSE)
    sample, truncated = record.get("sample"), record.get("truncated")
    turns = episode_turns(record.get("turns"))
    if turns:
        response = "".join(text for _, text, _ in turns)
    reward, n_tokens = _number(record.get("rewards")), _number(record.get("answer_tokens"))
    sample = sample if type(sample) is int else 0
    return ResponseRow(prompt, response, sample, reward, n_tokens, truncated in (1, True), n_prompt + n_response, turns)


def episode_turns(value: object) -> tuple[tuple[bool, str, float | None], ...]:
    """Return the turns of an episode, up to ``MAX_RESPONSE`` characters."""
    turns, left = list[tuple[bool, str, float | None]](), MAX_RESPONSE
    for turn in value if isinstance(value, list) else ():
        text = turn.get("text") if isinstance(turn, dict) else None
        if isinstance(text, str) and left > 0:
            turns.append((turn.get("role") == "environment", text[:left], _number(turn.get("reward"))))
            left -= len(text)
    return tuple(turns)


def _number(value: object) -> float | None:
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 2**53) else None
