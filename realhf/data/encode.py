"""Tokenises a data file into compact arrays and rejects rows that are too long. Does not import torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from realhf.api.config import CurriculumConfig, DatasetConfig
from realhf.api.experiment import Task
from realhf.base.seeds import stable_seed
from realhf.data.rows import Row, check_problems, parse_rows
from realhf.data.tokenizer import encode_answers, encode_prompts, encode_segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 2000  # rows tokenised at a time, since lists of Python ints are large


class RaggedList:
    """Variable-length arrays stored in one array."""

    def __init__(self, parts: Sequence[np.ndarray], dtype: type[np.generic]) -> None:
        self._offsets = np.cumsum([0, *map(len, parts)])
        self._data = np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self._data[self._offsets[i] : self._offsets[i + 1]]


@dataclass(frozen=True)
class EncodedRow:
    """Token ids of a prompt and its answers, the row's fields as JSON, and labels.

    ``answers`` is one answer (sft, outcome, answer), chosen, rejected, chosen, ... (pairs), answers from best to worst
    (ranked), or the steps of one answer (process). ``labels`` has one entry per answer (outcome) or step (process).
    """

    prompt: np.ndarray  # [P] int32
    answers: tuple[np.ndarray, ...]  # [A] int32 each, with EOS unless truncated
    fields: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))  # uint8
    labels: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))  # float32

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Lengths of the row's sequences: the prompt with each answer, or with all steps."""
        answers = [len(answer) for answer in self.answers]
        return tuple(len(self.prompt) + n for n in ([sum(answers)] if len(self.labels) else answers))


class EncodedRows:
    """The encoded rows of a data file, and one message per bad row."""

    def __init__(self, rows: Sequence[EncodedRow], problems: Sequence[str], sizes: Sequence[int] = ()) -> None:
        self.problems = tuple(problems)
        self.sizes = tuple(sizes or (len(rows),))  # numbers of rows of the sources
        self._prompts = RaggedList([row.prompt for row in rows], np.int32)
        self._fields = RaggedList([row.fields for row in rows], np.uint8)
        self._labels = RaggedList([row.labels for row in rows], np.float32)
        self._answers = RaggedList([answer for row in rows for answer in row.answers], np.int32)
        self._first_answer = np.cumsum([0, *(len(row.answers) for row in rows)])

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: int) -> EncodedRow:
        answers = range(self._first_answer[i], self._first_answer[i + 1])
        return EncodedRow(self._prompts[i], tuple(self._answers[j] for j in answers), self._fields[i], self._labels[i])

    def __iter__(self) -> Iterator[EncodedRow]:
        return map(self.__getitem__, range(len(self)))


def encode_split(
    config: DatasetConfig, task: Task, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[EncodedRows, EncodedRows]:
    """Return the training rows and the held-out rows, both in file order, or sorted by ``curriculum.sort_by``.

    The rows of several sources follow one another. Held-out rows come from ``eval_path``, or are a random
    ``eval_fraction`` of the others (by ``split_seed``, at least one row and not all), or none. ``label_noise`` applies
    to training rows only. UserError as in ``encode_rows``.
    """
    parts = [encode_rows(replace(config, path=path, paths=[]), task, tokenizer) for path in config.sources]
    n_rows, problems = sum(map(len, parts)), [problem for part in parts for problem in part.problems]
    held_out: set[int] = set()
    if config.eval_fraction:
        n = min(max(1, round(config.eval_fraction * n_rows)), n_rows - 1)
        random = np.random.default_rng(stable_seed("held out", config.split_seed))
        held_out = set(random.permutation(n_rows)[:n].tolist())
    noisy = [with_label_noise(row, i, config) for i, row in enumerate(chain(*parts)) if i not in held_out]
    ends = [0, *accumulate(map(len, parts))]
    sizes = [sum(i not in held_out for i in range(*part)) for part in pairwise(ends)]
    if config.curriculum.sort_by:
        ends = [0, *accumulate(sizes)]
        noisy = [row for start, stop in pairwise(ends) for row in by_column(noisy[start:stop], config)]
    train = EncodedRows(noisy, problems, sizes)
    if config.eval_path:
        plain = replace(config, path=config.eval_path, paths=[], curriculum=CurriculumConfig())
        return train, encode_rows(plain, task, tokenizer)
    return train, EncodedRows([row for i, row in enumerate(chain(*parts)) if i in held_out], ())


def by_column(rows: list[EncodedRow], config: DatasetConfig) -> list[EncodedRow]:
    """Return the rows sorted by ``curriculum.sort_by``, equal ones in random order by ``split_seed``."""
    keys = np.array([float(json.loads(row.fields.tobytes())[config.curriculum.sort_by]) for row in rows])
    ties = np.random.default_rng(stable_seed("sorted rows", config.split_seed)).permutation(len(rows))
    return [rows[i] for i in np.lexsort((ties, keys)).tolist()]


def with_label_noise(row: EncodedRow, number: int, config: DatasetConfig) -> EncodedRow:
    """Swap each pair of the row with probability ``label_noise``, by ``split_seed`` and row number."""
    if not config.label_noise:
        return row
    answers = list(row.answers)
    for i in range(0, len(answers), 2):
        if stable_seed("label noise", config.split_seed, number, i) / 2.0**63 < config.label_noise:
            answers[i : i + 2] = answers[i + 1], answers[i]
    return replace(row, answers=tuple(answers))


def encode_rows(config: DatasetConfig, task: Task, tokenizer: "PreTrainedTokenizerBase") -> EncodedRows:
    """Read and tokenise ``config.path``; rows with too many tokens are bad rows. UserError as in ``read_rows``.

    Unlabelled answers are truncated to ``max_seqlen`` and lose their EOS; a row without space for an answer token is a
    bad row. Labels belong to the last token: steps that end beyond ``max_seqlen`` are dropped with their labels, and a
    row without remaining labels is a bad row.
    """
    parsed = parse_rows(config, task)
    valid: list[EncodedRow] = []
    problems: list[str] = []
    while chunk := list(islice(parsed, CHUNK)):
        rows = [row for row in chunk if isinstance(row, Row)]
        problems += (problem for problem in chunk if isinstance(problem, str))
        for row, encoded in zip(rows, encode_chunk(rows, task, tokenizer), strict=True):
            problem = length_problem(len(encoded.prompt), bool(encoded.answers), config)
            problem = problem or sort_problem(row.fields, config.curriculum.sort_by)
            truncated = truncate(encoded, max(0, config.max_seqlen - len(encoded.prompt)))
            if not problem and len(encoded.labels) and not len(truncated.labels):
                unit = "answer" if task is Task.outcome else "first step"
                problem = f"the {unit} and its label end beyond dataset.max_seqlen={config.max_seqlen}"
            if problem:
                problems.append(f"{config.path}:{row.line}: {problem}")
            else:
                valid.append(truncated)
    check_problems(config, problems, n_valid=len(valid))
    return EncodedRows(valid, problems)


def truncate(row: EncodedRow, limit: int) -> EncodedRow:
    """Truncate answers to ``limit`` tokens; keep the labelled parts that end within them."""
    if not len(row.labels):
        return replace(row, answers=tuple(answer[:limit] for answer in row.answers))
    n = int(np.searchsorted(np.cumsum([len(part) for part in row.answers]), limit, side="right"))
    return replace(row, answers=row.answers[:n], labels=row.labels[:n])


def encode_chunk(rows: Sequence[Row], task: Task, tokenizer: "PreTrainedTokenizerBase") -> Iterator[EncodedRow]:
    prompts = encode_prompts(tokenizer, [row.fields.get("prompt", "") for row in rows])
    if task is Task.episode:  # the environment may begin
        prompts = [prompt or [tokenizer.eos_token_id] for prompt in prompts]
    texts = [answers_of(row, task) for row in rows]
    if task is Task.process:
        answers = encode_segments(tokenizer, texts)
    else:
        flat = iter(encode_answers(tokenizer, [text for per_row in texts for text in per_row]))
        answers = [[next(flat) for _ in per_row] for per_row in texts]
    for row, prompt, per_row in zip(rows, prompts, answers, strict=True):
        fields = json.dumps(row.fields).encode() if task is Task.answer or not per_row else b""
        if row.fields.get("truncated") and task is Task.answer:
            per_row = [ids[:-1] for ids in per_row]  # no EOS was generated
        labels = np.array([row.fields["label"]] if task is Task.outcome else [], np.float32)
        if task is Task.process:  # steps without tokens are dropped
            labels = np.array(row.fields["labels"], np.float32)[[len(ids) > 0 for ids in per_row]]
            per_row = [ids for ids in per_row if ids]
        answer_ids = tuple(np.array(ids, np.int32) for ids in per_row)
        yield EncodedRow(np.array(prompt, np.int32), answer_ids, np.frombuffer(fields, np.uint8), labels)


def answers_of(row: Row, task: Task) -> list[str]:
    """Return the texts of ``EncodedRow.answers``."""
    match task:
        case Task.sft | Task.outcome | Task.answer:
            return [row.fields["answer"]]
        case Task.pairs:
            return list(chain(*zip(row.fields["pos_answers"], row.fields["neg_answers"], strict=True)))
        case Task.ranked | Task.process:
            return row.fields["answers" if task is Task.ranked else "steps"]
    return []


def sort_problem(fields: dict[str, Any], column: str) -> str:
    """Return the problem if rows are sorted by a column which has no number in this one, or an empty text."""
    try:
        is_number = not column or isfinite(float(fields[column]))
    except (KeyError, TypeError, ValueError, OverflowError):
        is_number = False
    return "" if is_number else f"no number in column '{column}' (dataset.curriculum.sort_by)"


def length_problem(prompt: int, has_answer: bool, config: DatasetConfig) -> str:
    """Return the problem with a prompt of ``prompt`` tokens, or an empty text."""
    if prompt == 0:
        return "the prompt has no tokens"
    if prompt > config.max_prompt_len:
        return f"the prompt has {prompt} tokens, more than dataset.max_prompt_len={config.max_prompt_len}"
    if has_answer and prompt >= config.max_seqlen:
        return f"the prompt has {prompt} tokens, no space for an answer in dataset.max_seqlen={config.max_seqlen}"
    return ""
