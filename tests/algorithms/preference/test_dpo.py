"""Steps of DPO and related algorithms against plain loops."""

import math
from pathlib import Path

import pytest
import torch

from realhf.algorithms.preference.dpo import DPO, DPOEvaluation
from realhf.algorithms.stats import add_stats
from realhf.api.batch_meta import RowId
from realhf.api.config.preference import DPOConfig, PreferenceLoss
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext

CONTEXT = InterfaceContext(seed=1, tokenizer=None, run_root=Path("."))


def interface(loss="sigmoid", cls=DPO, **options):
    return cls(DPOConfig(loss=PreferenceLoss[loss], **options), CONTEXT)


@pytest.fixture
def batch(make_rollouts):
    """Four prompts with a pair each."""
    return make_rollouts().only(("tokens", "prompt_mask"))


def with_ref(batch, seed=5):
    noise = torch.randn(len(batch), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return batch.with_scalars("ref_logprob_sums", noise - 6.0)


def with_mismatched(batch, seed=6):
    """Add the response of row i + 2, which belongs to another prompt, to every row i."""
    n, keys = len(batch), ("tokens", "prompt_mask")
    texts = [list(zip(*(batch.columns[k].rows()[i] for k in keys), strict=True)) for i in range(n)]
    mixed = [[t for t in texts[i] if t[1]] + [t for t in texts[(i + 2) % n] if not t[1]] for i in range(n)]
    columns = {f"kl_{k}": Column.of([torch.stack([t[j] for t in row]) for row in mixed]) for j, k in enumerate(keys)}
    ref = with_ref(batch, seed)["ref_logprob_sums"] - 1.0
    return batch.with_columns(**columns).with_scalars("kl_ref_logprob_sums", ref)


def mismatched_of(batch):
    """Return the mismatched rows under the keys of the interface."""
    return SequenceBatch(batch.ids, {k: batch.columns[f"kl_{k}"] for k in ("tokens", "prompt_mask")})


def row_sums(logits, batch):
    """Return the log-probability of each response, token by token."""
    sums = []
    for tokens, prompt in zip(batch.columns["tokens"].rows(), batch.columns["prompt_mask"].rows(), strict=True):
        response = [t for t in range(1, len(tokens)) if not prompt[t]]
        sums.append(sum(torch.log_softmax(logits[tokens[t - 1]], 0)[tokens[t]] for t in response))
    return sums


def test_reference_logprobs_are_summed_over_responses(batch, table_engine):
    engine = table_engine()
    outputs, stats = interface().inference(engine, batch, {})
    want = [float(x) for x in row_sums(engine.logits.detach(), batch)]
    assert outputs.ids == batch.ids and outputs["ref_logprob_sums"].tolist() == pytest.approx(want) and stats == {}


@pytest.mark.parametrize("parts", [[list(range(8))], [[5, 0, 1, 4], [], [7, 3, 2, 6]]])
def test_dpo_step(batch, ranks, table_engine, parts):
    batch = with_ref(batch)
    logits, ref = table_engine().logits, batch["ref_logprob_sums"]
    sums = row_sums(logits, batch)
    h = [(sums[i] - ref[i]) - (sums[i + 1] - ref[i + 1]) for i in range(0, 8, 2)]
    loss = sum(torch.log(1 + torch.exp(-0.5 * x)) for x in h) / 4
    want = logits - torch.autograd.grad(loss, logits)[0]
    engines, results = ranks(
        [lambda engine, p=p: interface(beta=0.5).train_step(engine, batch.select(p), {"x": 1}) for p in parts]
    )
    assert all(torch.allclose(engine.logits, want) and engine.calls[0][2] for engine in engines)
    stats = {}
    for part, state in results:
        stats = add_stats(stats, part)
        assert state == {"x": 1}
    assert stats["loss"] == pytest.approx((4 * loss.item(), 4))
    assert stats["accuracy"] == (sum(x.item() > 0 for x in h), 4)


@pytest.mark.parametrize("loss", ["sigmoid", "positive", "ipo", "kto"])
def test_loss_if_policy_and_reference_are_equal(batch, table_engine, loss):
    engine, algorithm = table_engine(), interface(loss, beta=0.5)
    ready = batch.with_scalars("ref_logprob_sums", algorithm.inference(engine, batch, {})[0]["ref_logprob_sums"])
    if loss == "kto":
        ready = with_mismatched(ready)
        mismatched_ref = algorithm.inference(engine, mismatched_of(ready), {})[0]["ref_logprob_sums"]
        ready = ready.with_scalars("kl_ref_logprob_sums", mismatched_ref)
    stats, _ = algorithm.train_step(engine, ready, {})
    want = {"sigmoid": math.log(2), "positive": math.log(2), "ipo": 1.0, "kto": 0.5}[loss]
    assert stats["loss"][0] / stats["loss"][1] == pytest.approx(want)
    assert stats["accuracy"] == (0, 4) and stats["kl"] == pytest.approx((0, 8))


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_losses_without_reference(batch, table_engine, loss):
    engine = table_engine()
    before = engine.logits.detach().clone()
    stats, _ = interface(loss).train_step(engine, batch, {})
    assert not torch.equal(engine.logits, before) and stats["loss"][1] == 4 and "kl" not in stats


@pytest.mark.parametrize("unpaired", [False, True])
@pytest.mark.parametrize("parts", [[list(range(8))], [[5, 4, 0, 1], [], [3, 2, 6, 7]]])
def test_kto_step(batch, ranks, table_engine, parts, unpaired):
    batch = with_mismatched(with_ref(batch, seed=8))
    labels = torch.tensor([1.0, 0.0] * 4)
    if unpaired:
        batch = batch.with_scalars("label", labels)
        batch = type(batch)(tuple(RowId(i, 0) for i in range(8)), batch.columns)
    logits, ref = table_engine().logits, batch["ref_logprob_sums"]
    ratios = [x - r for x, r in zip(row_sums(logits, batch), ref, strict=True)]
    mismatched_ref = torch.stack(row_sums(logits, mismatched_of(batch))).detach() - torch.linspace(-0.5, 1.5, 8)
    batch = batch.with_scalars("kl_ref_logprob_sums", mismatched_ref)
    z = 0.5  # the mean of the offsets above
    terms = [torch.sigmoid(-0.5 * (r - z)) * 2 if good else torch.sigmoid(0.5 * (r - z)) * 3
             for r, good in zip(ratios, labels, strict=True)]  # fmt: skip
    want = logits - torch.autograd.grad(sum(terms) / 8, logits)[0]
    algorithm = interface("kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0, unpaired=unpaired)
    engines, results = ranks([lambda engine, p=p: algorithm.train_step(engine, batch.select(p), {}) for p in parts])
    assert all(torch.allclose(engine.logits, want, atol=1e-7) for engine in engines)
    count = sum(stats["accuracy"][1] for stats, _ in results if "accuracy" in stats)
    assert count == (8 if unpaired else 4)  # responses or pairs


@pytest.mark.parametrize("loss", list(PreferenceLoss))
def test_evaluation_returns_the_statistics_of_training_without_a_step(batch, table_engine, loss):
    engine, ready = table_engine(), with_mismatched(with_ref(batch)) if loss.needs_ref else batch
    before = engine.logits.detach().clone()
    outputs, evaluation = interface(loss.name, DPOEvaluation).inference(engine, ready, {})
    assert outputs.ids == batch.ids and not outputs.columns and torch.equal(engine.logits, before)
    stats, _ = interface(loss.name).train_step(engine, ready, {})
    assert evaluation == {name: pytest.approx(stats[name]) for name in evaluation} and "accuracy" in evaluation
    assert interface(loss.name, DPOEvaluation).inference(engine, ready.select([]), {})[1]["loss"] == (0, 0)
