"""Distillation: log-probabilities of a teacher on the responses of the student, and what training makes of them.

On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; Gu et al. 2023, arXiv 2306.08543): the student samples,
and the reverse KL to the teacher is measured on its own tokens. Self-distillation (arXiv 2601.19897, arXiv 2601.18734):
the teacher is the student itself with a prompt that tells more, such as a solution.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.algorithms.distillation.options import Distillation, DistillConfig, filled_template
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.losses.kl import kl_terms
from realhf.algorithms.policy_gradient.ppo_formulas import response_mask, wanted_tokens, with_response_mask
from realhf.api.config import KLEstimator, opt
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext, Outputs
from realhf.ops.rows import on_device

TEACHER = "teacher_logprobs"
TEACHER_TOP = "teacher_top_logprobs"
SMALLEST_REST = 1e-7
"""Smallest probability of all tokens but the top ones: float32 cannot tell smaller ones from 0."""


@dataclass
class TeacherConfig:
    distill: DistillConfig = opt(DistillConfig, "distillation")
    temperature: float = opt(1.0, "temperature of generation")


class Teacher:
    """Computes ``teacher_logprobs`` of tokens, or with ``forward_kl`` ``teacher_top_logprobs``.

    Reads ``tokens prompt_mask``; with a ``distill.prompt`` also ``row``. ``teacher_top_logprobs`` has ``2 top_k``
    numbers per token: the most probable tokens, then their log-probabilities. All are 0 on prompts.
    """

    config_type = TeacherConfig

    def __init__(self, config: TeacherConfig, context: InterfaceContext) -> None:
        self.config, self.context = config, context

    def inference(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        config, temperature = self.config.distill, self.config.temperature
        rows = with_response_mask(batch.only(("tokens",)), batch)
        if config.prompt:
            rows = with_teacher_prompts(batch, config.prompt, self.context.tokenizer)
        if longest := max((n for n in rows.lengths("tokens") if n > engine.config.max_row_len), default=0):
            limit = engine.config.max_row_len
            raise ValueError(f"a row of the teacher has {longest} tokens; its model has at most {limit} positions")
        if config.objective is not Distillation.forward_kl:
            found = engine.forward(rows, lambda outputs, part: outputs.logprobs(temperature, wanted_tokens(part)))
            return SequenceBatch(batch.ids, {TEACHER: last_tokens(found[:, None], rows, batch)}), {}
        vocab = len(self.context.tokenizer)
        if config.top_k > vocab:
            raise ValueError(f"ppo.distill.top_k={config.top_k} is larger than the vocabulary of {vocab} tokens")

        def score(outputs: Outputs, part: SequenceBatch) -> Tensor:
            return outputs.top_logprobs(config.top_k, vocab, temperature, wanted_tokens(part))

        found = engine.forward(rows, score)
        return SequenceBatch(batch.ids, {TEACHER_TOP: last_tokens(found, rows, batch)}), {}


def with_teacher_prompts(batch: SequenceBatch, template: str, tokenizer: Any) -> SequenceBatch:
    """Return the rows with the texts of ``template`` before and after ``{prompt}`` around the tokens of the prompt.

    Columns: ``tokens``, ``response_mask``. The texts may name fields of the dataset row, such as ``{solutions[0]}``;
    ValueError if a row lacks one.
    """
    columns = (batch.columns[key].rows() for key in ("tokens", "prompt_mask", "row"))
    rows, masks = list[Tensor](), list[Tensor]()
    for tokens, prompt_mask, row in zip(*columns, strict=True):
        n_prompt, start = int((prompt_mask == 1).sum()), int(len(tokens) > 0 and tokens[0] == tokenizer.bos_token_id)
        texts = filled_template(template, json.loads(bytes(row.tolist())))
        before, after = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        added = [on_device(torch.tensor(some, dtype=tokens.dtype), tokens.device) for some in (before, after)]
        rows.append(torch.cat((tokens[:start], added[0], tokens[start:n_prompt], added[1], tokens[n_prompt:])))
        responses = response_mask(prompt_mask, (len(tokens),))[n_prompt:]
        masks.append(torch.cat((responses.new_zeros(len(rows[-1]) - len(responses)), responses)))
    if not rows:
        return with_response_mask(batch.only(("tokens",)), batch)
    return SequenceBatch(batch.ids, {"tokens": Column.of(rows), "response_mask": Column.of(masks)})


def last_tokens(found: Tensor, rows: SequenceBatch, batch: SequenceBatch) -> Column:
    """Return the results ``found``, ``[sum of lengths, c]``, of the teacher's rows at the tokens of the batch.

    Rows end with the same response; tokens of the batch without a counterpart have 0.
    """
    width, parts = found.shape[1], []
    for part, n in zip(found.split(rows.lengths("tokens")), batch.lengths("tokens"), strict=True):
        missing = part.new_zeros(max(0, n - len(part)), width)
        parts.append(torch.cat((missing, part[max(0, len(part) - n) :])).flatten())
    data = torch.cat(parts) if parts else found.flatten()
    return Column(data, tuple(n * width for n in batch.lengths("tokens")))


def reverse_kl(logprobs: Tensor, batch: SequenceBatch, mask: Tensor) -> Tensor:
    """Return ``log p - log p_teacher`` on sampled tokens, ``[T]``, clamped to +-40; 0 elsewhere."""
    return kl_terms(KLEstimator.k1, logprobs, batch[TEACHER], logprobs).masked_fill(~mask, 0.0)


def teacher_rewards(logprobs: Tensor, batch: SequenceBatch, mask: Tensor, config: DistillConfig) -> Tensor:
    """Return ``coef * (log p_teacher - log p)``, ``[T]``, clipped to ``+-coef * clip``; 0 outside of ``mask``."""
    terms = -reverse_kl(logprobs, batch, mask)
    return config.coef * (terms if config.clip is None else terms.clamp(-config.clip, config.clip))


def split_top(batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Return the teacher's most probable tokens and their log-probabilities, ``[T, k]`` int64 and float32."""
    ids, logprobs = batch[TEACHER_TOP].view(len(batch["tokens"]), -1).chunk(2, 1)
    return ids.long(), logprobs


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student), ``[T]``, from log-probabilities of the teacher's top tokens, ``[T, k]`` each.

    All other tokens count as one, so the result is never negative and is at most the whole KL (data processing
    inequality).
    """
    sums = [x.logsumexp(1).clamp(max=0.0) for x in (teacher, student)]
    of_teacher, of_student = (-torch.expm1(x).clamp(max=-SMALLEST_REST) for x in sums)
    of_rest = of_teacher * (of_teacher.log() - of_student.log())
    return (teacher.exp() * (teacher - student)).sum(1) + of_rest


def uses_column(config: PPOConfig, batch: SequenceBatch, names: Sequence[str]) -> bool:
    return TEACHER in batch.columns and config.distill.objective.value in names
