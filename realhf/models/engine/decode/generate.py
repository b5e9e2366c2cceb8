"""Sampling with a key/value cache in slots: finished rows leave at once, live rows stay dense, free slots are refilled.

A group's prompt is computed once; its cache is lent, or copied to the group's other slots. What is drawn depends on
(seed, prompt, sample, position) alone, so neither slots nor placement change a row. Over a pipeline the slots are dealt
into as many groups as there are stages, which follow one another through them.
"""

from collections import deque

import torch
from torch import Tensor

from realhf.api.batch_meta import RowId
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.decode.group import DecodeGroup
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.pipeline_runner import Pipeline

COLUMNS = {
    "tokens": torch.int64,
    "prompt_mask": torch.uint8,
    "logprobs": torch.float32,
    "sampling_logprobs": torch.float32,
    "truncated": torch.uint8,
}


def generate(pipeline: Pipeline, request: Request) -> SequenceBatch:
    """Sample answers to every prompt; see ``Engine.generate`` for the columns. No prompts give no rows."""
    if not request.n_rows:
        return no_rows(request.prompts["prompts"].device)
    model = pipeline.model
    if request.longest > (reach := model.config.max_positions):
        raise ValueError(f"prompt and answer may reach {request.longest} tokens, the model has {reach}"
                         " positions; lower max_new_tokens or max_prompt_len")  # fmt: skip
    n_slots, queue = min(request.config.max_num_seqs, request.n_rows), deque(range(request.n_rows))
    n_groups = min(pipeline.n_stages, n_slots)
    shares = [n_slots // n_groups + (i < n_slots % n_groups) for i in range(n_groups)]
    decodings = [DecodeGroup(model, request, queue, share) for share in shares]
    with model.decoding():
        pipeline.generate(decodings)
    return _assemble(pipeline, request, decodings)


def no_rows(device: torch.device) -> SequenceBatch:
    """Return what no prompts give."""
    return SequenceBatch((), {k: Column(torch.empty(0, dtype=t, device=device), ()) for k, t in COLUMNS.items()})


def _assemble(pipeline: Pipeline, request: Request, decodings: list[DecodeGroup]) -> SequenceBatch:
    """Put what was drawn in the order of rows, behind the prompts."""
    drawn = [draw for decoding in decodings for draw in decoding.slots.drawn]
    tokens = torch.cat([tokens for _, tokens in drawn])
    of_row = torch.cat([rows for rows, _ in drawn]).to(tokens.device)
    order = of_row.argsort(stable=True)
    tokens = tokens[order]
    logprobs = torch.empty(2, len(order), device=tokens.device)
    if pipeline.is_last:
        pairs = [pair for decoding in decodings for pair in decoding.logprobs]
        logprobs = torch.stack([torch.cat(parts) for parts in zip(*pairs, strict=True)])[:, order]
    return rows_of(request, of_row.bincount(minlength=request.n_rows), tokens, pipeline.from_last(logprobs))


def rows_of(request: Request, counts: Tensor, tokens: Tensor, logprobs: Tensor) -> SequenceBatch:
    """Return the columns of what was drawn, row after row: ``counts`` [rows], ``tokens`` [n], ``logprobs`` [2, n]."""
    n_drawn = tuple(counts.tolist())
    prompt_of = [row // request.n for row in range(request.n_rows)]
    lengths = tuple(request.lengths[p] + count for p, count in zip(prompt_of, n_drawn, strict=True))
    zeros = [torch.zeros_like(text, dtype=torch.float32) for text in request.texts]
    ones = [torch.ones_like(text, dtype=torch.uint8) for text in request.texts]

    def behind(prompts: list[Tensor] | tuple[Tensor, ...], answers: Tensor) -> Column:
        pairs = zip(prompt_of, answers.split(n_drawn), strict=True)
        return Column(torch.cat([part for prompt, answer in pairs for part in (prompts[prompt], answer)]), lengths)

    stopped = torch.isin(tokens[counts.cumsum(0) - 1], request.stop_tokens)
    columns = {
        "tokens": behind(request.texts, tokens),
        "prompt_mask": behind(ones, torch.zeros_like(tokens, dtype=torch.uint8)),
        "logprobs": behind(zeros, logprobs[0]),
        "sampling_logprobs": behind(zeros, logprobs[1]),
        "truncated": Column.scalars((~stopped).to(torch.uint8)),
    }
    ids = tuple(RowId(i.prompt, sample) for i in request.prompts.ids for sample in range(request.n))
    return SequenceBatch(ids, columns)
