"""Packing with shared prefixes gives the same results as without; outputs are those of transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from realhf.api.batch_meta import RowId
from realhf.api.execution_plan import MicroBatching
from realhf.base import native
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.native import NativeEngine
from realhf.models.engine.packing import ForwardOutputs, pack
from realhf.ops import extension
from realhf.ops.attention import supports_shared_prefixes
from realhf.plan.compile.micro_batch import micro_batches
from realhf.plan.cost.cost import works_of
from tests.models.engine.tiny_engine import FAMILIES, VOCAB, counted, engine_on, nll, rows_of
from tests.scaling import examples

ROWS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=8)


def batch_of(rows: list[tuple[int, list[int]]]) -> SequenceBatch:
    ids = tuple(RowId(prompt, sample) for sample, (prompt, _) in enumerate(rows))
    tokens = [torch.tensor(row, dtype=torch.int64) for _, row in rows]
    return SequenceBatch(ids, {"tokens": Column.of(tokens) if rows else Column(torch.empty(0, dtype=torch.int64), ())})


@given(ROWS)
@settings(max_examples=examples(200))
def test_packed_tokens_keep_their_predecessors(rows: list[tuple[int, list[int]]]) -> None:
    batch = batch_of(rows)
    packing = pack(batch, share=True)
    assert sum(packing.lengths) == len(packing.tokens) <= batch["tokens"].numel()
    assert torch.equal(packing.unpack(packing.tokens), batch["tokens"])
    if packing.gather_index is None or packing.prev_index is None:
        prompts = [prompt for prompt, _ in rows]
        single = {prompt for prompt in prompts if prompts.count(prompt) == 1}
        assert packing.prefixes == () and packing.lengths == batch.lengths("tokens")
        assert all(p in single or len({row[0] for q, row in rows if q == p}) > 1 for p in prompts)
        return
    ends = torch.tensor(packing.lengths).cumsum(0).tolist()
    segment = [next(i for i, end in enumerate(ends) if place < end) for place in range(len(packing.tokens))]
    at = 0
    for _, row in rows:
        places = packing.gather_index[at : at + len(row)].tolist()
        at += len(row)
        assert packing.prev_index[places].tolist() == [-1, *places[:-1]]
        own = segment[places[-1]]
        assert all(segment[place] in (own, packing.prefixes[own]) for place in places)


PROMPTS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), max_size=6)


@given(PROMPTS, st.integers(1, 4), st.integers(8, 80))
@settings(max_examples=examples(100))
def test_the_planner_counts_the_computed_tokens(prompts: list[tuple[int, list[int]]], n_mbs: int, cap: int) -> None:
    """The responses of a prompt differ in their first token, so that only the prompt is shared."""
    ids, tokens, shared = [], [], []
    for prompt, (length, responses) in enumerate(prompts):
        for sample, response in enumerate(responses):
            ids.append(RowId(prompt, sample))
            tokens.append(torch.cat([torch.full((length,), 99), torch.full((response,), sample)]))
            shared.append(length)
    lengths, limits = tuple(map(len, tokens)), MicroBatching(n_mbs, cap)
    works = works_of(tuple(ids), lengths, limits, tuple(shared), share_prompts=True)
    parts = micro_batches(ids, lengths, limits, prefer_prompts_together=True)
    assert len(works) == len(parts)
    for work, part in zip(works, parts, strict=True):
        some = SequenceBatch(tuple(ids[i] for i in part), {"tokens": Column.of([tokens[i] for i in part])})
        packing = pack(some, share=True)
        rows = zip(packing.lengths, packing.prefixes or (-1,) * len(packing.lengths), strict=True)
        pairs = sum(n * (n + 1) // 2 + (n * packing.lengths[p] if p >= 0 else 0) for n, p in rows)
        assert (work.tokens, work.rows, work.pairs) == (len(packing.tokens), len(packing.lengths), pairs)
        assert work.predicted == sum(lengths[i] - shared[i] for i in part)


def groups(n: int, vocab: int = 37) -> SequenceBatch:
    """Return three prompts with ``n`` responses each and one single row; masks select responses."""
    generator = torch.Generator().manual_seed(5)
    rows, ids, masks = [], [], []
    for prompt, length in enumerate((9, 1, 17)):
        shared = torch.randint(2, vocab, (length,), generator=generator)
        for sample in range(n):
            response = torch.randint(2, vocab, (1 + 3 * sample + prompt,), generator=generator)
            rows.append(torch.cat([shared, response]))
            masks.append(torch.cat([torch.zeros_like(shared), torch.ones_like(response)]).byte())
            ids.append(RowId(prompt, sample))
    rows.append(torch.randint(2, vocab, (11,), generator=generator))
    masks.append(torch.ones(11, dtype=torch.uint8))
    ids.append(RowId(7, 0))
    return SequenceBatch(tuple(ids), {"tokens": Column.of(rows), "mask": Column.of(masks)})


def both(engine: NativeEngine) -> tuple[NativeEngine, NativeEngine]:
    return replace(engine, share_prompts=True), replace(engine, share_prompts=False)


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if not supports_shared_prefixes(torch.device("cpu"), torch.float32, 8):
        pytest.skip("NATIVE KERNELS NOT BUILT, prefixes are not shared: python setup.py build_ext --inplace")


@pytest.mark.parametrize("limits", [MicroBatching(), MicroBatching(3, 70), MicroBatching(1, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_inference_is_the_same(family: str, limits: MicroBatching, hf_models: dict) -> None:
    engine = replace(engine_on(hf_models[family][0], trained=False), micro_batching=limits)
    batch = groups(4)
    for fn in (lambda outputs, _: outputs.logprobs(0.7), lambda outputs, _: outputs.logprobs()):
        shared, separate = (one.forward(batch, fn) for one in both(engine))
        torch.testing.assert_close(shared, separate, atol=1e-5, rtol=1e-5)


def test_values_are_the_same(llama: Path) -> None:
    engine = engine_on(llama, trained=False, scalar=True)
    for fn in (lambda outputs, _: outputs.values(), lambda outputs, _: outputs.last_values()):
        shared, separate = (one.forward(groups(3), fn) for one in both(engine))
        torch.testing.assert_close(shared, separate, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_a_training_step_is_the_same(family: str, options: dict, hf_models: dict) -> None:
    batch, results = groups(4), []
    for number in range(2):
        engine = both(engine_on(hf_models[family][0], **options))[number]
        stats = engine.train(batch, nll, counted(batch))
        results.append((engine.params.grad.clone(), engine.params.data.clone(), stats))
    (shared_grad, shared, stats), (grad, separate, other_stats) = results
    assert (shared_grad - grad).norm() < 1e-5 * grad.norm()
    assert (shared - separate).norm() < 1e-5 * separate.norm()
    assert stats["nll"] == pytest.approx(other_stats["nll"], rel=1e-5)


def test_a_loss_on_shared_tokens_counts_every_row(llama: Path) -> None:
    batch, gradients = groups(4), []
    batch = batch.with_tokenwise("mask", torch.ones_like(batch["mask"]))
    for number in range(2):
        engine = both(engine_on(llama))[number]
        engine.train(batch, nll, counted(batch))
        gradients.append(engine.params.grad.clone())
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


MASKS = {
    "loss": lambda batch: batch["mask"],
    "some": lambda batch: batch["tokens"] % 3 == 0,
    "none": lambda batch: torch.zeros_like(batch["tokens"]),
    "one of each shared token": lambda batch: torch.tensor([row.sample == 1 for row in batch.ids]).repeat_interleave(
        torch.tensor(batch.lengths("tokens"))
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_leaves_out_tokens(family: str, share: bool, mask: str, hf_models: dict) -> None:
    """Results, and gradients of a loss on the tokens of the mask, are those without it."""
    engine = both(engine_on(hf_models[family][0]))[not share]
    batch = groups(4)
    wanted = MASKS[mask](batch)
    ids = torch.stack((batch["tokens"], batch["tokens"] + 1), 1) % VOCAB
    heads = {
        "logprobs": lambda outputs, mask: outputs.logprobs(0.7, mask)[:, None],
        "distribution": lambda outputs, mask: torch.cat([some.view(len(ids), -1) for some in outputs.distribution(
            ids, 0.7, mask)], 1),
        "top_logprobs": lambda outputs, mask: outputs.top_logprobs(3, VOCAB, 0.7, mask),
    }  # fmt: skip
    for name, head in heads.items():
        found = []
        for mask_of in (None, wanted):
            engine.params.grad.zero_()
            packing = pack(batch, share)
            states = engine.model.states(packing.tokens, packing.lengths, prefixes=packing.prefixes)
            result = head(ForwardOutputs(engine.model, states, batch, packing), mask_of)
            result = result * (wanted != 0)[:, None]
            if name != "top_logprobs":
                (result * torch.arange(result.numel()).view(result.shape).cos()).sum().backward()
            found.append((result.detach(), engine.params.grad.clone()))
        (expected, grad), (masked, masked_grad) = found
        torch.testing.assert_close(masked, expected, atol=1e-5, rtol=1e-5)
        assert (masked_grad - grad).norm() <= 1e-5 * grad.norm()
        assert bool(grad.any()) == (mask != "none" and name != "top_logprobs")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.sampled_from((0.5, 1.0, 3.0)))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_masks_against_transformers(hf_models: dict, lengths: list[int], seed: int, temperature: float) -> None:
    """Rows of one prompt or of several, with any tokens masked, also the first of a row and all of them."""
    folder, theirs = hf_models["llama"]
    batch = rows_of(lengths, per_prompt=1 + seed % 3, seed=seed)
    wanted = batch["mask"]
    engine = replace(engine_on(folder, trained=False), share_prompts=bool(seed % 2))
    found = engine.forward(batch, lambda outputs, part: outputs.logprobs(temperature, part["mask"]))
    rows = batch.columns["tokens"].rows(), wanted.split(lengths), found.split(lengths)
    for row, mask, ours in zip(*rows, strict=True):
        table = (theirs(row[None]).logits[0] / temperature).log_softmax(-1).detach()
        expected = torch.cat([torch.zeros(1), table[:-1].gather(1, row[1:, None])[:, 0]]) * mask
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_mask_of_another_size_is_refused(llama: Path) -> None:
    engine, batch = replace(engine_on(llama, trained=False), share_prompts=False), rows_of(LENGTHS)
    for mask in (torch.ones(1), torch.ones(17), torch.ones(18, 1)):
        with pytest.raises(ValueError, match=r"the mask has the shape .*, the tokens have \[18\]"):
            engine.forward(batch, lambda outputs, _, mask=mask: outputs.logprobs(1.0, mask))


def test_fewer_tokens_are_computed() -> None:
    batch = groups(4)
    packing = pack(batch, share=True)
    assert len(packing.tokens) == batch["tokens"].numel() - 3 * (9 + 1 + 17)
    assert pack(batch).tokens is batch["tokens"]


def test_the_planner_and_engines_find_the_same_library() -> None:
    assert (native.found(native.KERNELS) is not None) == extension.available()


LENGTHS = (4, 1, 9, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(family: str, hf_models: dict[str, tuple[Path, nn.Module]]) -> None:
    folder, theirs = hf_models[family]
    engine, batch = engine_on(folder, trained=False), rows_of(LENGTHS)
    with torch.no_grad():
        outputs = ForwardOutputs(engine.model, engine.model.states(batch["tokens"], LENGTHS), batch, pack(batch))
        for temperature in (1.0, 0.6):
            found = outputs.logprobs(temperature).split(LENGTHS)
            for row, logprobs in zip(batch.columns["tokens"].rows(), found, strict=True):
                table = (theirs(row[None]).logits[0] / temperature).log_softmax(-1)
                expected = table[:-1].gather(1, row[1:, None])[:, 0]
                torch.testing.assert_close(logprobs, torch.cat([torch.zeros(1), expected]), atol=1e-5, rtol=1e-5)


def test_values_have_one_number_per_token(llama: Path) -> None:
    engine, batch = engine_on(llama, trained=False, scalar=True), rows_of(LENGTHS)
    with torch.no_grad():
        outputs = ForwardOutputs(engine.model, engine.model.states(batch["tokens"], LENGTHS), batch, pack(batch))
        values, last = outputs.values(), outputs.last_values()
    assert values.shape == (18,) and last.shape == (4,) and values.dtype == last.dtype == torch.float32
    assert torch.equal(last, torch.stack([row[-1] for row in values.split(LENGTHS)]))
    torch.testing.assert_close(values, (outputs.states.all() @ engine.params.view("head.weight").t())[:, 0])
