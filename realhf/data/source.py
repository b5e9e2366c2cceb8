"""The stream of training rows: what stands at every position, as tensors."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from realhf.api.batch import PROMPT, RowId
from realhf.api.config import DatasetConfig
from realhf.api.experiment import Task
from realhf.base.seeding import stable_seed
from realhf.data.batch import Column, SequenceBatch
from realhf.data.encode import EncodedRow, encode_split
from realhf.data.order import rows_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LABEL = -1.0
"""What stands in ``step_labels`` where no step ends."""


class RowSource:
    """All rows of a data file, tokenised once; ``batch`` is a pure function of the seed and the positions.

    ``n_held_out`` rows are kept apart for evaluation. UserError for an unusable file, and for bad rows unless
    ``on_bad_row=skip``; then ``problems`` names them.
    """

    def __init__(self, config: DatasetConfig, task: Task, tokenizer: "PreTrainedTokenizerBase", seed: int) -> None:
        self._config = config
        self._task = task
        self._seed = seed
        self._rows, self._held_out = encode_split(config, task, tokenizer)
        self.problems = self._rows.problems + self._held_out.problems
        self.n_held_out = len(self._held_out)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def batch(self, start: int, stop: int) -> SequenceBatch:
        """Return positions ``start`` to ``stop`` of the endless stream of epochs.

        prompt, math, code: one row a position, ``prompts`` (int64 ids) and ``row`` (uint8, see ``row_fields``).
        sft: one row a position, ``tokens`` (int64) and ``prompt_mask`` (uint8, 1 on the prompt).
        pairs: rows chosen, rejected, chosen, ... of up to ``max_pairs_per_prompt`` pairs, with the same columns.
        ranked: rows of up to ``max_replies`` answers, the best one first, with the same columns.
        answer: as sft, and ``row`` (uint8).
        outcome: as sft, and the scalar ``label`` (float32).
        process: as sft, and ``step_labels`` (float32): a label on the last token of every step, -1 elsewhere.
        """
        rows = [self._rows[i] for i in rows_at(self._seed, len(self), start, stop, self._config.shuffle)]
        return self._assembled(range(start, stop), rows)

    def held_out(self, start: int, stop: int, first: int) -> SequenceBatch:
        """Return held-out rows ``start`` to ``stop`` in the order of their file, as prompts from ``first`` on."""
        rows = [self._held_out[i] for i in range(start, stop)]
        return self._assembled(range(first, first + stop - start), rows)

    def _assembled(self, positions: range, rows: list[EncodedRow]) -> SequenceBatch:
        if self._task in (Task.prompt, Task.math, Task.code):
            columns = {
                "prompts": column([row.prompt for row in rows], torch.int64),
                "row": column([row.fields for row in rows], torch.uint8),
            }
            return SequenceBatch(tuple(RowId(p, PROMPT) for p in positions), columns)
        ids: list[RowId] = []
        sequences: list[tuple[np.ndarray, np.ndarray]] = []
        for position, row in zip(positions, rows, strict=True):
            answers = self._answers(position, row)
            ids += [RowId(position, sample) for sample in range(len(answers))]
            sequences += [(row.prompt, answer) for answer in answers]
        masks = [np.repeat(np.array([1, 0], np.uint8), [len(p), len(a)]) for p, a in sequences]
        columns = {
            "tokens": column([np.concatenate(pair) for pair in sequences], torch.int64),
            "prompt_mask": column(masks, torch.uint8),
        }
        if self._task is Task.answer:
            columns["row"] = column([row.fields for row in rows], torch.uint8)
        elif self._task is Task.outcome:
            columns["label"] = column([row.labels for row in rows], torch.float32)
        elif self._task is Task.process:
            columns["step_labels"] = column([labels_at_ends(row) for row in rows], torch.float32)
        return SequenceBatch(tuple(ids), columns)

    def _answers(self, position: int, row: EncodedRow) -> list[np.ndarray]:
        """Return what stands behind the prompt in each of a row's sequences."""
        match self._task:
            case Task.pairs:
                pairs = self._drawn("pairs", position, len(row.answers) // 2, self._config.max_pairs_per_prompt)
                return [row.answers[2 * i + side] for i in pairs for side in (0, 1)]
            case Task.ranked:
                return [
                    row.answers[i] for i in self._drawn("ranked", position, len(row.answers), self._config.max_replies)
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


def column(parts: list[np.ndarray], dtype: torch.dtype) -> Column:
    """Return the arrays as rows of a new column."""
    data = np.concatenate(parts) if parts else np.empty(0)
    return Column(torch.tensor(data, dtype=dtype), tuple(map(len, parts)))


def row_fields(data: Tensor) -> dict[str, Any]:
    """Return the fields of one row from its entry in the column ``row``, ``[n]`` uint8."""
    return json.loads(data.cpu().numpy().tobytes())
