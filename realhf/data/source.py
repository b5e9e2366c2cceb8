"""The stream of training rows as batches of tensors."""

import json
from collections.abc import Sequence
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
from realhf.data.order import resampled_at, rows_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = tuple[np.ndarray, np.ndarray]  # token ids of a prompt and of an answer
LOOKAHEAD = 16  # rows searched for a mismatched answer before the whole file is
NO_LABEL = -1.0  # in `step_labels` at tokens that end no step


class RowSource:
    """All rows of a data file, tokenised once; batches are pure functions of the seed and the positions.

    ``n_held_out`` rows are reserved for evaluation. With ``mismatched`` (pairs, outcome), rows also get their prompt
    with an answer to another one. Raises UserError for an invalid file, and for bad rows unless ``on_bad_row=skip``,
    which lists them in ``problems``.
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
        every = chain(self._rows, self._held_out)
        self._max_length = max(n for row in every for n in row.sequence_lengths) if mismatched else 0
        self._lookahead = LOOKAHEAD if mismatched else 0

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, start: int, stop: int, first: int | None = None) -> SequenceBatch:
        """Return positions ``start`` to ``stop`` of the infinite stream, numbered as prompts from ``first``.

        prompt, math, code, episode: per position one row with ``prompts`` (int64) and ``row`` (uint8, ``row_fields``).
        sft: per position one row with ``tokens`` (int64) and ``prompt_mask`` (uint8, 1 on the prompt).
        pairs: rows chosen, rejected, chosen, ... of up to ``max_pairs_per_prompt`` pairs; columns of sft.
        ranked: rows of up to ``max_responses`` answers from best to worst; columns of sft.
        answer: sft with ``row`` (uint8).
        outcome: sft with the scalar ``label`` (float32).
        process: sft with ``step_labels`` (float32): a label on the last token of every step, -1 elsewhere.
        ``mismatched`` adds ``kl_tokens`` and ``kl_prompt_mask``: the prompt with an answer of the next row that has
        another prompt, truncated to the longest sequence of the data.
        """
        first, stop_ahead = start if first is None else first, stop + self._lookahead
        rows = [self._rows[i] for i in rows_at(self._seed, len(self), start, stop_ahead, self._config.shuffle)]
        return self._assemble(range(first, first + stop - start), self._windows(rows))

    def chosen(self, rows: Sequence[int], first: int) -> SequenceBatch:
        """Return the given rows, numbered as prompts from ``first``; mismatched answers are those of the next rows."""
        windows = [[self._rows[(row + i) % len(self)] for i in range(1 + self._lookahead)] for row in rows]
        return self._assemble(range(first, first + len(rows)), windows)

    def resampled(self, step: int, own: range, start: int, stop: int, first: int) -> SequenceBatch:
        """Return replacement rows ``start`` to ``stop`` of a step with positions ``own``, numbered from ``first``."""
        taken = rows_at(self._seed, len(self), own.start, own.stop, self._config.shuffle)
        rows = [self._rows[i] for i in resampled_at(self._seed, len(self), step, taken, start, stop)]
        return self._assemble(range(first, first + stop - start), [[row] for row in rows])

    def held_out(self, start: int, stop: int, first: int) -> SequenceBatch:
        """Return held-out rows ``start`` to ``stop`` in file order, numbered as prompts from ``first``."""
        rows = [self._held_out[i % self.n_held_out] for i in range(start, stop + self._lookahead)]
        return self._assemble(range(first, first + stop - start), self._windows(rows))

    def _windows(self, rows: list[EncodedRow]) -> list[list[EncodedRow]]:
        """Return each row with the ``lookahead`` rows after it, which are given too."""
        return [rows[i : i + 1 + self._lookahead] for i in range(len(rows) - self._lookahead)]

    def _assemble(self, positions: range, windows: list[list[EncodedRow]]) -> SequenceBatch:
        """Return the batch of the first row of each window; the others are candidates for its mismatched answers."""
        rows = [window[0] for window in windows]
        if self._task in (Task.prompt, Task.math, Task.code, Task.episode):
            columns = {"prompts": column([row.prompt for row in rows], torch.int64)}
            columns["row"] = column([row.fields for row in rows], torch.uint8)
            return SequenceBatch(tuple(RowId(p, PROMPT) for p in positions), columns)
        ids: list[RowId] = []
        sequences, mismatched = list[Text](), list[Text]()
        for position, (row, *near) in zip(positions, windows, strict=True):
            answers = self._answers(position, row)
            ids += [RowId(position, sample) for sample in range(len(answers))]
            sequences += [(row.prompt, answer) for answer in answers]
            if self._max_length:
                mismatched += self._mismatched(row, len(answers), near)
        columns = text_columns(sequences, ("tokens", "prompt_mask"))
        if self._max_length:
            columns |= text_columns(mismatched, tuple(KTO_KL_KEYS))
        if self._task is Task.answer:
            columns["row"] = column([row.fields for row in rows], torch.uint8)
        elif self._task is Task.outcome:
            columns["label"] = column([row.labels for row in rows], torch.float32)
        elif self._task is Task.process:
            columns["step_labels"] = column([step_labels(row) for row in rows], torch.float32)
        return SequenceBatch(tuple(ids), columns)

    def _mismatched(self, row: EncodedRow, n: int, near: list[EncodedRow]) -> list[Text]:
        """Return the prompt ``n`` times, with answers of the first row in ``near`` or the file with another prompt."""
        other = next((r for r in chain(near, self._rows) if not np.array_equal(r.prompt, row.prompt)), None)
        if other is None:
            raise UserError(
                f"{', '.join(self._config.sources)}: all rows have the same prompt; mismatched answers need two prompts"
            )
        max_answer = self._max_length - len(row.prompt)
        return [(row.prompt, other.answers[k % len(other.answers)][:max_answer]) for k in range(n)]

    def _answers(self, position: int, row: EncodedRow) -> list[np.ndarray]:
        if self._task is Task.pairs:
            pairs = self._choose("pairs", position, len(row.answers) // 2, self._config.max_pairs_per_prompt)
            return [row.answers[2 * i + side] for i in pairs for side in (0, 1)]
        if self._task is Task.ranked:
            chosen = self._choose("ranked", position, len(row.answers), self._config.max_responses)
            return [row.answers[i] for i in chosen]
        return [np.concatenate(row.answers)]

    def _choose(self, name: str, position: int, n: int, most: int) -> list[int]:
        """Sample up to ``most`` of ``range(n)`` without replacement by (seed, position); return them sorted."""
        random = np.random.default_rng(stable_seed(name, self._seed, position))
        return sorted(random.choice(n, min(n, most), replace=False).tolist())


def step_labels(row: EncodedRow) -> np.ndarray:
    """Return ``[P + A]`` float32: the label on the last token of every step, -1 elsewhere."""
    ends = len(row.prompt) + np.cumsum([len(step) for step in row.answers])
    labels = np.full(ends[-1], NO_LABEL, np.float32)
    labels[ends - 1] = row.labels
    return labels


def text_columns(sequences: list[Text], names: tuple[str, ...]) -> dict[str, Column]:
    """Return the columns of tokens (int64) and prompt masks (uint8, 1 on the prompt) under ``names``."""
    masks = [np.repeat(np.array([1, 0], np.uint8), [len(prompt), len(answer)]) for prompt, answer in sequences]
    tokens = column([np.concatenate(pair) for pair in sequences], torch.int64)
    return dict(zip(names, (tokens, column(masks, torch.uint8)), strict=True))


def column(parts: list[np.ndarray], dtype: torch.dtype) -> Column:
    data = np.concatenate(parts) if parts else np.empty(0)
    return Column(torch.tensor(data, dtype=dtype), tuple(map(len, parts)))


def row_fields(data: Tensor) -> dict[str, Any]:
    """Decode one row of the column ``row``, ``[n]`` uint8."""
    return json.loads(data.cpu().numpy().tobytes())
