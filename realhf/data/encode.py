"""Tokenises a whole data file once and keeps it compact; finds the rows that are too long. Does not import torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from realhf.api.config import DatasetConfig
from realhf.api.experiment import Task
from realhf.data.rows import Row, read_rows, settle
from realhf.data.tokenizer import encode_answers, encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 2000  # rows tokenised at a time: lists of Python ints are big


class Ragged:
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
    """One row: prompt ids, the ids of its answers (pairs: chosen, rejected, chosen, ...), its fields as JSON."""

    prompt: np.ndarray  # [P] int32
    answers: tuple[np.ndarray, ...]  # [A] int32 each, EOS included unless cut off
    fields: np.ndarray  # uint8


class EncodedRows:
    """The usable rows of a data file as tokens, and a line of text for every row left out."""

    def __init__(self, rows: Sequence[EncodedRow], problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        self._prompts = Ragged([row.prompt for row in rows], np.int32)
        self._fields = Ragged([row.fields for row in rows], np.uint8)
        self._answers = Ragged([answer for row in rows for answer in row.answers], np.int32)
        self._first_answer = np.cumsum([0, *(len(row.answers) for row in rows)])

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: int) -> EncodedRow:
        answers = range(self._first_answer[i], self._first_answer[i + 1])
        return EncodedRow(self._prompts[i], tuple(self._answers[j] for j in answers), self._fields[i])


def encode_rows(config: DatasetConfig, task: Task, tokenizer: "PreTrainedTokenizerBase") -> EncodedRows:
    """Read and tokenise ``config.path``; rows that are too long are bad rows, as ``config.on_bad_row`` has it.

    With sft and pairs an answer that goes beyond ``max_seqlen`` is cut, and loses its EOS; a row of which no answer
    token would be left is a bad row.
    """
    read = read_rows(config, task)
    good: list[EncodedRow] = []
    problems: list[str] = []
    for start in range(0, len(read.rows), CHUNK):
        rows = read.rows[start : start + CHUNK]
        for row, encoded in zip(rows, encode_chunk(rows, task, tokenizer), strict=True):
            if problem := length_problem(len(encoded.prompt), bool(encoded.answers), config):
                problems.append(f"{config.path}:{row.line}: {problem}")
            else:
                room = config.max_seqlen - len(encoded.prompt)
                good.append(EncodedRow(encoded.prompt, tuple(a[:room] for a in encoded.answers), encoded.fields))
    settle(config, problems, n_good=len(good))
    return EncodedRows(good, [*read.problems, *problems])


def encode_chunk(rows: Sequence[Row], task: Task, tokenizer: "PreTrainedTokenizerBase") -> Iterator[EncodedRow]:
    prompts = encode_prompts(tokenizer, [row.fields["prompt"] for row in rows])
    texts = [answers_of(row, task) for row in rows]
    answers = iter(encode_answers(tokenizer, [text for per_row in texts for text in per_row]))
    for row, prompt, per_row in zip(rows, prompts, texts, strict=True):
        fields = b"" if per_row else json.dumps(row.fields).encode()
        yield EncodedRow(
            np.array(prompt, np.int32),
            tuple(np.array(next(answers), np.int32) for _ in per_row),
            np.frombuffer(fields, np.uint8),
        )


def answers_of(row: Row, task: Task) -> list[str]:
    """Return the texts that stand behind the prompt in the data: none, one, or chosen and rejected in turn."""
    match task:
        case Task.sft:
            return [row.fields["answer"]]
        case Task.pairs:
            pairs = zip(row.fields["pos_answers"], row.fields["neg_answers"], strict=True)
            return [answer for pair in pairs for answer in pair]
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
