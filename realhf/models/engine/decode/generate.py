"""Continuous batching: finished rows are evicted at once, live rows stay contiguous, free slots are refilled.

In a pipeline the slots form as many groups as there are stages, which pass through them one after the other.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from realhf.api.batch_meta import RowId
from realhf.arch.param_specs import stage_layers
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.decode.group import DecodeGroup
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.pipeline_runner import Pipeline
from realhf.ops.rows import on_device

COLUMNS = {
    "tokens": torch.int64,
    "prompt_mask": torch.uint8,
    "logprobs": torch.float32,
    "sampling_logprobs": torch.float32,
    "truncated": torch.uint8,
}


def generate(pipeline: Pipeline, request: Request) -> SequenceBatch:
    """Sample responses to every prompt; see ``Engine.generate`` for the columns. No prompts give no rows."""
    if not request.n_rows:
        return empty_result(request.prompts["prompts"].device)
    model = pipeline.model
    if request.max_row_len > (n_positions := model.config.max_row_len):
        raise ValueError(f"prompt and response may have {request.max_row_len} tokens, the model has {n_positions}"
                         " positions; lower max_new_tokens or max_prompt_len")  # fmt: skip
    n_slots, queue = min(request.config.max_num_seqs, request.n_rows), deque(range(request.n_rows))
    n_groups = min(pipeline.n_stages, n_slots)
    shares = [n_slots // n_groups + (i < n_slots % n_groups) for i in range(n_groups)]
    groups = [DecodeGroup(model, request, queue, share, pipeline.kept_decoder) for share in shares]
    with model.decoding(request.config.weight_dtype):
        pipeline.generate(groups)
    for group in groups:
        group.close()
    result = _assemble(pipeline, request, groups)
    return first_responses(result, request, [row for group in groups for row in group.slots.cancelled])


def first_responses(result: SequenceBatch, request: Request, cancelled: Sequence[int] = ()) -> SequenceBatch:
    """Return the ``n_kept`` responses of every prompt that end first: the shortest, then the first.

    Cancelled rows are as long as the last of these, and had not ended.
    """
    if request.n_kept == request.n:
        return result
    lengths = result.lengths("tokens")
    ranking = [(lengths[row], row) for row in range(len(lengths))]
    for row in cancelled:
        ranking[row] = lengths[row] + 1, row
    by_prompt = (ranking[start : start + request.n] for start in range(0, len(ranking), request.n))
    return result.select(sorted(row for group in by_prompt for _, row in sorted(group)[: request.n_kept]))


def empty_result(device: torch.device) -> SequenceBatch:
    return SequenceBatch((), {k: Column(torch.empty(0, dtype=t, device=device), ()) for k, t in COLUMNS.items()})


def _assemble(pipeline: Pipeline, request: Request, groups: list[DecodeGroup]) -> SequenceBatch:
    sampled = [turn for group in groups for turn in group.slots.sampled]
    row_of, tokens = (torch.cat(parts) for parts in zip(*sampled, strict=True))  # in host memory
    order, device = row_of.argsort(stable=True), pipeline.context.device
    counts, tokens = row_of.bincount(minlength=request.n_rows), on_device(tokens[order], device)
    order = on_device(order, device)
    logprobs = torch.empty(2, len(order), device=device)
    if pipeline.is_last:
        pairs = [pair for group in groups for pair in group.logprobs]
        logprobs = torch.stack([_joined(parts, device) for parts in zip(*pairs, strict=True)])[:, order]
    result = build_result(request, counts, tokens, pipeline.from_last(logprobs))
    return with_experts(result, pipeline, groups) if request.records_experts else result


def with_experts(result: SequenceBatch, pipeline: Pipeline, groups: Sequence[DecodeGroup]) -> SequenceBatch:
    """Add the column ``routed_experts``, ``[T * L * k]``; the last token of a row has none. Collective over stages."""
    config, lengths = pipeline.model.config, result.lengths("tokens")
    rows, counts, experts = zip(*(turn for group in groups for turn in group.experts), strict=True)
    row_of, n_computed = np.concatenate(rows), np.concatenate(counts)
    starts = np.array(result.columns["tokens"].offsets)[row_of] - (n_computed.cumsum() - n_computed)
    index = np.arange(n_computed.sum()) + starts.repeat(n_computed)
    computed = torch.cat(experts).flatten(1)
    own = computed.new_full((sum(lengths), computed.shape[1]), config.n_experts)
    own[on_device(torch.from_numpy(index), own.device)] = computed
    stages, k = stage_layers(config, pipeline.n_stages), config.experts_per_token
    # layer 0 is the embedding
    data = pipeline.from_stages(own, [k * len({*config.routed_layers} & {i - 1 for i in stage}) for stage in stages])
    width = data.shape[1]
    return result.with_columns(routed_experts=Column(data.flatten(), tuple(width * n for n in lengths)))


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate tensors of which some are on the device and some in host memory, with one copy per run of these."""
    runs = [torch.cat(list(run)) for _, run in groupby(parts, key=lambda part: part.device.type)]
    return torch.cat([run if run.device == device else on_device(run, device) for run in runs])


def build_result(request: Request, counts: Tensor, tokens: Tensor, logprobs: Tensor) -> SequenceBatch:
    """Return the columns of all rows: token ``counts`` [rows], ``tokens`` [n] in row order, ``logprobs`` [2, n]."""
    n_sampled = tuple(counts.tolist())
    prompt_of = [row // request.n for row in range(request.n_rows)]
    lengths = tuple(request.lengths[p] + count for p, count in zip(prompt_of, n_sampled, strict=True))
    zeros = [torch.zeros_like(prompt, dtype=torch.float32) for prompt in request.prompt_tensors]
    ones = [torch.ones_like(prompt, dtype=torch.uint8) for prompt in request.prompt_tensors]

    def joined(prompts: Sequence[Tensor], responses: Tensor) -> Column:
        pairs = zip(prompt_of, responses.split(n_sampled), strict=True)
        return Column(torch.cat([part for prompt, response in pairs for part in (prompts[prompt], response)]), lengths)

    last = on_device(torch.tensor(n_sampled).cumsum(0) - 1, tokens.device)
    stopped = torch.isin(tokens[last], request.stop_tokens)
    columns = {
        "tokens": joined(request.prompt_tensors, tokens),
        "prompt_mask": joined(ones, torch.zeros_like(tokens, dtype=torch.uint8)),
        "logprobs": joined(zeros, logprobs[0]),
        "sampling_logprobs": joined(zeros, logprobs[1]),
        "truncated": Column.scalars((~stopped).to(torch.uint8)),
    }
    ids = tuple(RowId(i.prompt, sample) for i in request.prompts.ids for sample in range(request.n))
    return SequenceBatch(ids, columns)
