"""Log-probabilities of a teacher, by prompts of its own too, and the losses of distillation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.distillation.options import Distillation, DistillConfig, template_problems
from realhf.algorithms.distillation.teacher import (
    TEACHER,
    TEACHER_TOP,
    Teacher,
    TeacherConfig,
    forward_kl,
    split_top,
    teacher_rewards,
    with_teacher_prompts,
)
from realhf.api.batch_meta import RowId
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext
from realhf.experiments.ppo import PPOExperiment
from realhf.system.profiler.algorithm_probes import byte_tokenizer
from tests.algorithms.conftest import Table, TableEngine
from tests.scaling import examples

PROMPTS, RESPONSES = ("1+2=", "10+5="), ("3", "15.")
LOGITS = torch.randn(7, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def engine(limit: int = 20) -> SimpleNamespace:
    config = SimpleNamespace(max_row_len=limit)
    return SimpleNamespace(config=config, forward=lambda rows, fn: fn(Table(LOGITS, torch.zeros(7), rows), rows))


def rows_of(texts: tuple[tuple[str, str], ...], tokenizer: object, bos: list[int]) -> SequenceBatch:
    encoded = [[tokenizer.encode(text, add_special_tokens=False) for text in pair] for pair in texts]
    fields = [torch.tensor(list(json.dumps({"prompt": p, "solutions": [r]}).encode())) for p, r in texts]
    columns = {
        "tokens": Column.of([torch.tensor([*bos, *p, *r]) for p, r in encoded]),
        "prompt_mask": Column.of([torch.tensor([1] * (len(bos) + len(p)) + [0] * len(r)) for p, r in encoded]),
        "row": Column.of(fields),
    }
    return SequenceBatch(tuple(RowId(i, 0) for i in range(len(texts))), columns)


@pytest.mark.parametrize("bos", [[], [1]])
def test_the_teacher_reads_its_own_prompt(bos: list[int]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(1)
    batch = rows_of(tuple(zip(PROMPTS, RESPONSES, strict=True)), tokenizer, bos)
    rows = (
        with_teacher_prompts(batch, "It is {solutions[0]}.\n{prompt} (hint: {{}})", tokenizer).columns["tokens"].rows()
    )
    for row, prompt, response in zip(rows, PROMPTS, RESPONSES, strict=True):
        assert row[: len(bos)].tolist() == bos
        assert tokenizer.decode(row[len(bos) :]) == f"It is {response}.\n{prompt} (hint: {{}}){response}"


def test_results_are_those_of_the_response_in_the_teachers_row() -> None:
    tokens = [torch.tensor(row) for row in ([1, 2, 3, 4, 5], [6, 0, 2])]
    batch = SequenceBatch((RowId(0, 0), RowId(1, 0)), {"tokens": Column.of(tokens)})
    longer = [torch.tensor(row) for row in ([6, 6, 1, 2, 3, 4, 5], [0, 2])]  # the second is shorter than its row
    rows = SequenceBatch(batch.ids, {"tokens": Column.of(longer)})
    log_p = LOGITS.log_softmax(-1)
    for objective, key in ((Distillation.reverse_kl, TEACHER), (Distillation.forward_kl, TEACHER_TOP)):
        config = TeacherConfig(DistillConfig(objective, top_k=2, prompt="{prompt}"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("realhf.algorithms.distillation.teacher.with_teacher_prompts", lambda *_: rows)
            teacher = Teacher(config, InterfaceContext(0, range(6), Path(".")))
            found, _ = teacher.inference(engine(), batch, {})
        first, second = found.columns[key].rows()
        if key == TEACHER:
            assert first[1:].tolist() == pytest.approx(
                [float(log_p[a, b]) for a, b in ((1, 2), (2, 3), (3, 4), (4, 5))]
            )
            assert second.tolist() == pytest.approx([0.0, 0.0, float(log_p[0, 2])])
        else:
            ids, top = split_top(found.with_columns(tokens=batch.columns["tokens"]))
            assert ids.shape == top.shape == (8, 2)
            assert torch.allclose(top[4], log_p[4, :6].topk(2).values) and torch.equal(
                ids[7], log_p[0, :6].topk(2).indices
            )


def test_a_row_that_is_too_long_is_named() -> None:
    batch = SequenceBatch((RowId(0, 0),), {"tokens": Column.of([torch.arange(5)])})
    with pytest.raises(ValueError, match="a row of the teacher has 5 tokens; its model has at most 4 positions"):
        Teacher(TeacherConfig(), InterfaceContext(0, None, Path("."))).inference(engine(4), batch, {})


def test_more_candidates_than_tokens_are_refused() -> None:
    batch = SequenceBatch((RowId(0, 0),), {"tokens": Column.of([torch.arange(5)])})
    config = TeacherConfig(DistillConfig(Distillation.forward_kl, top_k=7))
    with pytest.raises(ValueError, match="ppo.distill.top_k=7 is larger than the vocabulary of 6 tokens"):
        Teacher(config, InterfaceContext(0, range(6), Path("."))).inference(engine(), batch, {})
    experiment = PPOExperiment()
    experiment.ppo.distill = config.distill
    problem = "ppo.distill.top_k=7 is larger than the tokenizer's 6 tokens"
    assert experiment.tokenizer_problems(6) == [problem] and experiment.tokenizer_problems(7) == []


@pytest.mark.parametrize(
    ("template", "problem"),
    [("{missing} {prompt}", "no 'missing' in a row with the fields prompt, solutions"),
     ("{solutions[3]} {prompt}", "no list index out of range"), ("{solutions.x} {prompt}", "no 'list' object has no"),
     ("{ {prompt}", "ppo.distill.prompt='{ {prompt}': expected"), ("{solutions[0]} {prompt}", None)],
)  # fmt: skip
def test_fields_of_the_template(template: str, problem: str | None) -> None:
    found = template_problems(template, {"prompt": "1+1=", "solutions": ["2"]})
    assert found == [] if problem is None else problem in found[0]


@settings(max_examples=examples(60))
@given(st.integers(1, 6), st.integers(0, 1000), st.sampled_from([0.1, 1.0, 30.0]))
def test_forward_kl_is_that_of_the_top_tokens_and_the_rest(k: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(5, 6, generator=generator, dtype=torch.float64) * scale for _ in range(2))
    student.requires_grad_()
    log_t, log_s = teacher.log_softmax(-1), student.log_softmax(-1)
    top, ids = log_t.topk(k)
    ours = forward_kl(log_s.gather(1, ids), top)

    def coarse(log_p: torch.Tensor) -> torch.Tensor:
        rest = log_p.exp().scatter(1, ids, 0.0).sum(1, keepdim=True)
        return torch.cat((log_p.gather(1, ids), rest.clamp(min=1e-300).log()), 1)

    a, b = coarse(log_t), coarse(log_s)
    theirs, whole = ((x.exp() * (x - y)).sum(1) for x, y in ((a, b), (log_t, log_s)))
    if scale < 30 and k < 6:
        assert torch.allclose(ours, theirs, atol=1e-9)
    assert bool((ours >= -2e-7).all()) and bool((ours <= whole + 1e-6).all())
    assert torch.isfinite(torch.autograd.grad(ours.sum(), student)[0]).all()


def test_rewards_are_clipped_and_scaled() -> None:
    batch = SequenceBatch((RowId(0, 0),), {TEACHER: Column(torch.tensor([0.0, -1.0, -9.0, -1.0]), (4,))})
    logprobs, mask = torch.tensor([0.0, -2.0, -1.0, -3.0]), torch.tensor([False, True, True, False])
    config = DistillConfig(coef=0.5)
    assert teacher_rewards(logprobs, batch, mask, config).tolist() == [0.0, 0.5, -4.0, 0.0]
    assert teacher_rewards(logprobs, batch, mask, replace(config, clip=2.0)).tolist() == [0.0, 0.5, -1.0, 0.0]


def test_the_bigram_engine_agrees_with_its_own_log_probabilities() -> None:
    batch = SequenceBatch((RowId(0, 0),), {"tokens": Column.of([torch.tensor([1, 4, 2])])})
    table = Table(TableEngine().logits, torch.zeros(7), batch)
    assert torch.allclose(table.distribution(batch["tokens"][:, None])[0][:, 0], table.logprobs())
