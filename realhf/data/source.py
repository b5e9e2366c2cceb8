"""The stream of training rows: what stands at every position, as tensors."""

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import DatasetConfig
from realhf.api.config.preference import KTO_KL_KEYS
from realhf.api.experiment import Task
from realhf.base.errors import UserError
from realhf.base.seeds import stable_seed
from realhf.data.batch import Column, SequenceBatch
from realhf.data.encode import EncodedRow, encode_split
from realhf.data.order import redrawn_at, rows_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = tuple[np.ndarray, np.ndarray]
"""Tokens of a prompt and of an answer."""
NEAR = 16
"""How many rows onwards another prompt is looked for before the whole file is."""
NO_LABEL = -1.0
"""What stands in ``step_labels`` where no step ends."""


class RowSource:
    """All rows of a data file, tokenised once; ``batch`` is a pure function of the seed and the positions.

    ``n_held_out`` rows are kept apart for evaluation. UserError for an unusable file, and for bad rows unless
    ``on_bad_row=skip``; then ``problems`` names them. With ``mismatched``, sequences also come with an answer of
    another prompt behind theirs (pairs, outcome).
    """

    def __init__(
        self,
        config: DatasetConfig,
        task: Task,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        mismatched: bool = False,
    ) -> None:
        self._config = config
        self._task = task
        self._seed = seed
        self._rows, self._held_out = encode_split(config, task, tokenizer)
        self.problems = self._rows.problems + self._held_out.problems
        self.n_held_out = len(self._held_out)
        self._longest = 0
        if mismatched:
            self._longest = max(n for row in chain(self._rows, self._held_out) for n in row.sequence_lengths)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def batch(self, start: int, stop: int, first: int | None = None) -> SequenceBatch:
        """Return positions ``start`` to ``stop`` of the endless stream of epochs, as prompts from ``first`` on.

        prompt, math, code: one row a position, ``prompts`` (int64 ids) and ``row`` (uint8, see ``row_fields``).
        sft: one row a position, ``tokens`` (int64) and ``prompt_mask`` (uint8, 1 on the prompt).
        pairs: rows chosen, rejected, chosen, ... of up to ``max_pairs_per_prompt`` pairs, with the same columns.
        ranked: rows of up to ``max_responses`` answers, the best one first, with the same columns.
        answer: as sft, and ``row`` (uint8).
        outcome: as sft, and the scalar ``label`` (float32).
        process: as sft, and ``step_labels`` (float32): a label on the last token of every step, -1 elsewhere.
        With ``mismatched`` also ``kl_tokens`` and ``kl_prompt_mask``: a row's prompt, and an answer of the next row
        that has another prompt, cut where it would be longer than any row.
        """
        first, ahead = start if first is None else first, NEAR if self._longest else 0
        rows = [self._rows[i] for i in rows_at(self._seed, len(self), start, stop + ahead, self._config.shuffle)]
        return self._assembled(range(first, first + stop - start), rows)

    def redrawn(self, step: int, own: range, start: int, stop: int, first: int) -> SequenceBatch:
        """Return places ``start`` to ``stop`` of what a step draws beyond its ``own`` positions, from ``first`` on."""
        taken = rows_at(self._seed, len(self), own.start, own.stop, self._config.shuffle)
        rows = [self._rows[i] for i in redrawn_at(self._seed, len(self), step, taken, start, stop)]
        return self._assembled(range(first, first + stop - start), rows)

    def held_out(self, start: int, stop: int, first: int) -> SequenceBatch:
        """Return held-out rows ``start`` to ``stop`` in the order of their file, as prompts from ``first`` on."""
        rows = [self._held_out[i % self.n_held_out] for i in range(start, stop + (NEAR if self._longest else 0))]
        return self._assembled(range(first, first + stop - start), rows)

    def _assembled(self, positions: range, ahead: list[EncodedRow]) -> SequenceBatch:
        """Return the first rows of ``ahead`` as prompts ``positions``."""
        rows = ahead[: len(positions)]
        if self._task in (Task.prompt, Task.math, Task.code):
            columns = {
                "prompts": column([row.prompt for row in rows], torch.int64),
                "row": column([row.fields for row in rows], torch.uint8),
            }
            return SequenceBatch(tuple(RowId(p, PROMPT) for p in positions), columns)
        ids: list[RowId] = []
        sequences, strange = list[Text](), list[Text]()
        for i, (position, row) in enumerate(zip(positions, rows, strict=True)):
            answers = self._answers(position, row)
            ids += [RowId(position, sample) for sample in range(len(answers))]
            sequences += [(row.prompt, answer) for answer in answers]
            if self._longest:
                strange += self._mismatched(row, len(answers), ahead[i + 1 : i + 1 + NEAR])
        columns = text_columns(sequences, ("tokens", "prompt_mask"))
        if self._longest:
            columns |= text_columns(strange, tuple(KTO_KL_KEYS))
        if self._task is Task.answer:
            columns["row"] = column([row.fields for row in rows], torch.uint8)
        elif self._task is Task.outcome:
            columns["label"] = column([row.labels for row in rows], torch.float32)
        elif self._task is Task.process:
            columns["step_labels"] = column([labels_at_ends(row) for row in rows], torch.float32)
        return SequenceBatch(tuple(ids), columns)

    def _mismatched(self, row: EncodedRow, n: int, near: list[EncodedRow]) -> list[Text]:
        """Return a row's prompt ``n`` times with answers of the first row of ``near`` that has another prompt.

        Where none has, the first of the file is taken that does; ``UserError`` if there is none either.
        """
        other = next((r for r in chain(near, self._rows) if not np.array_equal(r.prompt, row.prompt)), None)
        if other is None:
            raise UserError(f"{self._config.path}: all rows have the same prompt, so no answer is to another one")
        room = self._longest - len(row.prompt)
        return [(row.prompt, other.answers[k % len(other.answers)][:room]) for k in range(n)]

    def _answers(self, position: int, row: EncodedRow) -> list[np.ndarray]:
        """Return what stands behind the prompt in each of a row's sequences."""
        match self._task:
            case Task.pairs:
                pairs = self._drawn("pairs", position, len(row.answers) // 2, self._config.max_pairs_per_prompt)
                return [row.answers[2 * i + side] for i in pairs for side in (0, 1)]
            case Task.ranked:
                return [
                    row.answers[i]
                    for i in self._drawn("ranked", position, len(row.answers), self._config.max_responses)
                ]
            case _:
                return [np.concatenate(row.answers)]

    def _drawn(self, what: str, position: int, n: int, most: int) -> list[int]:
        """Return up to ``most`` of ``n`` numbers in order, drawn without replacement by (seed, position)."""
        random = np.random.default_rng(stable_seed(what, self._seed, position))
        return sorted(random.choice(n, min(n, most), replace=False).tolist())


def labels_at_ends(row: EncodedRow) -> np.ndarray:
    """Return the labels of a row's steps on the steps' last tokens, ``[P + A]`` float32, and -1 elsewhere."""
    ends = len(row.prompt) + np.cumsum([len(step) for step in row.answers])
    labels = np.full(ends[-1], NO_LABEL, np.float32)
    labels[ends - 1] = row.labels
    return labels


def text_columns(sequences: list[Text], names: tuple[str, ...]) -> dict[str, Column]:
    """Return the tokens (int64) and the prompt mask (uint8, 1 on the prompt) of prompts with answers behind them."""
    masks = [np.repeat(np.array([1, 0], np.uint8), [len(prompt), len(answer)]) for prompt, answer in sequences]
    tokens = column([np.concatenate(pair) for pair in sequences], torch.int64)
    return dict(zip(names, (tokens, column(masks, torch.uint8)), strict=True))


def column(parts: list[np.ndarray], dtype: torch.dtype) -> Column:
    """Return the arrays as rows of a new column."""
    data = np.concatenate(parts) if parts else np.empty(0)
    return Column(torch.tensor(data, dtype=dtype), tuple(map(len, parts)))


def row_fields(data: Tensor) -> dict[str, Any]:
    """Return the fields of one row from its entry in the column ``row``, ``[n]`` uint8."""
    return json.loads(data.cpu().numpy().tobytes())
