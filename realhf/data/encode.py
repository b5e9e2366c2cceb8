"""Tokenises a whole data file once and keeps it compact; finds the rows that are too long. Does not import torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from realhf.api.config import DatasetConfig
from realhf.api.experiment import Task
from realhf.base.seeds import stable_seed
from realhf.data.rows import Row, read_rows, settle
from realhf.data.tokenizer import encode_answers, encode_pieces, encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 2000  # rows tokenised at a time: lists of Python ints are big


class RaggedList:
    """Many short arrays in one."""

    def __init__(self, parts: Sequence[np.ndarray], dtype: type[np.generic]) -> None:
        self._offsets = np.cumsum([0, *map(len, parts)])
        self._data = np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self._data[self._offsets[i] : self._offsets[i + 1]]


@dataclass(frozen=True)
class EncodedRow:
    """One row: prompt ids, the ids of its answers, its fields as JSON, labels.

    Answers are one (sft, outcome), chosen, rejected, chosen, ... (pairs), the best one first (ranked), or the steps of
    one (process). Labels are those of the answer (outcome) or of every step (process).
    """

    prompt: np.ndarray  # [P] int32
    answers: tuple[np.ndarray, ...]  # [A] int32 each, EOS included unless cut off
    fields: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))  # uint8
    labels: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))  # float32

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of every sequence that the row stands for: the prompt and an answer, or the prompt and all steps."""
        answers = [len(answer) for answer in self.answers]
        return tuple(len(self.prompt) + n for n in ([sum(answers)] if len(self.labels) else answers))


class EncodedRows:
    """The usable rows of a data file as tokens, and a line of text for every row left out."""

    def __init__(self, rows: Sequence[EncodedRow], problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
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
    """Read and tokenise the training rows, in the order of the file, and the rows that are held out from training.

    Held-out rows are those of ``eval_path``, or a share ``eval_fraction`` of ``path`` (at least one row and not all) that
    ``split_seed`` draws, or none. ``label_noise`` acts on training rows alone. UserError as in ``encode_rows``.
    """
    rows = encode_rows(config, task, tokenizer)
    held_out: set[int] = set()
    if config.eval_fraction:
        n = min(max(1, round(config.eval_fraction * len(rows))), len(rows) - 1)
        random = np.random.default_rng(stable_seed("held out", config.split_seed))
        held_out = set(random.permutation(len(rows))[:n].tolist())
    trained = [noisy(row, i, config) for i, row in enumerate(rows) if i not in held_out]
    if config.eval_path:
        return EncodedRows(trained, rows.problems), encode_rows(replace(config, path=config.eval_path), task, tokenizer)
    return EncodedRows(trained, rows.problems), EncodedRows([rows[i] for i in sorted(held_out)], ())


def noisy(row: EncodedRow, number: int, config: DatasetConfig) -> EncodedRow:
    """Return a row of pairs of which a share ``label_noise`` has changed sides: a function of split_seed and place."""
    if not config.label_noise:
        return row
    answers = list(row.answers)
    for i in range(0, len(answers), 2):
        if stable_seed("label noise", config.split_seed, number, i) / 2.0**63 < config.label_noise:
            answers[i : i + 2] = answers[i + 1], answers[i]
    return replace(row, answers=tuple(answers))


def encode_rows(config: DatasetConfig, task: Task, tokenizer: "PreTrainedTokenizerBase") -> EncodedRows:
    """Read and tokenise ``config.path``; rows that are too long are bad rows, as ``config.on_bad_row`` has it.

    With sft, pairs and ranked an answer that goes beyond ``max_seqlen`` is cut, and loses its EOS; a row of which no
    answer token would be left is a bad row. A label stands at the end of what it judges: a step that ends beyond is
    left out with its label and with all that follow; a row without a label is a bad row.
    """
    read = read_rows(config, task)
    good: list[EncodedRow] = []
    problems: list[str] = []
    for start in range(0, len(read.rows), CHUNK):
        rows = read.rows[start : start + CHUNK]
        for row, encoded in zip(rows, encode_chunk(rows, task, tokenizer), strict=True):
            fitting = encoded
            problem = length_problem(len(encoded.prompt), bool(encoded.answers), config)
            if not problem:
                fitting = fitted(encoded, config.max_seqlen - len(encoded.prompt))
                if len(encoded.labels) and not len(fitting.labels):
                    what = "the answer ends" if task is Task.outcome else "the first step ends"
                    problem = f"{what} beyond dataset.max_seqlen={config.max_seqlen}, and its label with it"
            if problem:
                problems.append(f"{config.path}:{row.line}: {problem}")
            else:
                good.append(fitting)
    settle(config, problems, n_good=len(good))
    return EncodedRows(good, [*read.problems, *problems])


def fitted(row: EncodedRow, room: int) -> EncodedRow:
    """Return a row whose answers have at most ``room`` tokens; of labelled parts those that end within them."""
    if not len(row.labels):
        return replace(row, answers=tuple(answer[:room] for answer in row.answers))
    n = int(np.searchsorted(np.cumsum([len(part) for part in row.answers]), room, side="right"))
    return replace(row, answers=row.answers[:n], labels=row.labels[:n])


def encode_chunk(rows: Sequence[Row], task: Task, tokenizer: "PreTrainedTokenizerBase") -> Iterator[EncodedRow]:
    prompts = encode_prompts(tokenizer, [row.fields["prompt"] for row in rows])
    texts = [answers_of(row, task) for row in rows]
    if task is Task.process:
        answers = encode_pieces(tokenizer, texts)
    else:
        flat = iter(encode_answers(tokenizer, [text for per_row in texts for text in per_row]))
        answers = [[next(flat) for _ in per_row] for per_row in texts]
    for row, prompt, per_row in zip(rows, prompts, answers, strict=True):
        fields = json.dumps(row.fields).encode() if task is Task.answer or not per_row else b""
        if row.fields.get("truncated") and task is Task.answer:
            per_row = [ids[:-1] for ids in per_row]  # it was broken off, and had no EOS
        labels = np.array(labels_of(row, task), np.float32)
        if task is Task.process:  # a step without a token of its own is none
            labels, per_row = labels[[len(ids) > 0 for ids in per_row]], [ids for ids in per_row if ids]
        yield EncodedRow(
            np.array(prompt, np.int32),
            tuple(np.array(ids, np.int32) for ids in per_row),
            np.frombuffer(fields, np.uint8),
            labels,
        )


def answers_of(row: Row, task: Task) -> list[str]:
    """Return the texts that stand behind the prompt in the data: see ``EncodedRow``."""
    match task:
        case Task.sft | Task.outcome | Task.answer:
            return [row.fields["answer"]]
        case Task.pairs:
            pairs = zip(row.fields["pos_answers"], row.fields["neg_answers"], strict=True)
            return [answer for pair in pairs for answer in pair]
        case Task.ranked:
            return row.fields["answers"]
        case Task.process:
            return row.fields["steps"]
        case _:
            return []


def labels_of(row: Row, task: Task) -> list[float]:
    """Return what is said of the texts, each within [0, 1]; nothing for most tasks."""
    match task:
        case Task.outcome:
            return [row.fields["label"]]
        case Task.process:
            return row.fields["labels"]
        case _:
            return []


def length_problem(prompt: int, has_answer: bool, config: DatasetConfig) -> str:
    """Return what is wrong with a prompt of ``prompt`` tokens, or an empty text."""
    if prompt == 0:
        return "the prompt has no tokens"
    if prompt > config.max_prompt_len:
        return f"the prompt has {prompt} tokens, more than dataset.max_prompt_len={config.max_prompt_len}"
    if has_answer and prompt >= config.max_seqlen:
        return (
            f"the prompt has {prompt} tokens and leaves no room for an answer in dataset.max_seqlen={config.max_seqlen}"
        )
    return ""
