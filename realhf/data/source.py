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
from realhf.data.encode import EncodedRow, encode_rows
from realhf.data.order import rows_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowSource:
    """All rows of a data file, tokenised once; ``batch`` is a pure function of the seed and the positions.

    UserError for an unusable file, and for bad rows unless ``on_bad_row=skip``; then ``problems`` names them.
    """

    def __init__(self, config: DatasetConfig, task: Task, tokenizer: "PreTrainedTokenizerBase", seed: int) -> None:
        self._config = config
        self._task = task
        self._seed = seed
        self._rows = encode_rows(config, task, tokenizer)
        self.problems = self._rows.problems

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def batch(self, start: int, stop: int) -> SequenceBatch:
        """Return positions ``start`` to ``stop`` of the endless stream of epochs.

        prompt, math: one row a position, ``prompts`` (int64 ids) and ``row`` (uint8, see ``row_fields``).
        sft: one row a position, ``tokens`` (int64) and ``prompt_mask`` (uint8, 1 on the prompt).
        pairs: rows chosen, rejected, chosen, ... of up to ``max_pairs_per_prompt`` pairs, with the same columns.
        """
        rows = [self._rows[i] for i in rows_at(self._seed, len(self), start, stop, self._config.shuffle)]
        positions = range(start, stop)
        if self._task in (Task.prompt, Task.math):
            columns = {
                "prompts": column([row.prompt for row in rows], torch.int64),
                "row": column([row.fields for row in rows], torch.uint8),
            }
            return SequenceBatch(tuple(RowId(p, PROMPT) for p in positions), columns)
        ids: list[RowId] = []
        sequences: list[tuple[np.ndarray, np.ndarray]] = []
        for position, row in zip(positions, rows, strict=True):
            answers = row.answers if self._task is Task.sft else self._pairs(position, row)
            ids += [RowId(position, sample) for sample in range(len(answers))]
            sequences += [(row.prompt, answer) for answer in answers]
        masks = [np.repeat(np.array([1, 0], np.uint8), [len(p), len(a)]) for p, a in sequences]
        columns = {
            "tokens": column([np.concatenate(pair) for pair in sequences], torch.int64),
            "prompt_mask": column(masks, torch.uint8),
        }
        return SequenceBatch(tuple(ids), columns)

    def _pairs(self, position: int, row: EncodedRow) -> list[np.ndarray]:
        """Return the answers of some of a row's pairs, drawn without replacement by (seed, position)."""
        n = len(row.answers) // 2
        random = np.random.default_rng(stable_seed("pairs", self._seed, position))
        drawn = random.choice(n, min(n, self._config.max_pairs_per_prompt), replace=False)
        return [row.answers[2 * i + side] for i in sorted(drawn) for side in (0, 1)]


def column(parts: list[np.ndarray], dtype: torch.dtype) -> Column:
    """Return the arrays as rows of a new column."""
    data = np.concatenate(parts) if parts else np.empty(0)
    return Column(torch.tensor(data, dtype=dtype), tuple(map(len, parts)))


def row_fields(data: Tensor) -> dict[str, Any]:
    """Return the fields of one row from its entry in the column ``row``, ``[n]`` uint8."""
    return json.loads(data.cpu().numpy().tobytes())
