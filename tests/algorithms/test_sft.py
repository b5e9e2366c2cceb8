"""SFT steps against plain loops."""

from pathlib import Path

import pytest
import torch

from realhf.algorithms.sft import SFT, SFTConfig
from realhf.data.protocols import InterfaceContext

CONTEXT = InterfaceContext(seed=1, tokenizer=None, run_root=Path("."))


@pytest.mark.parametrize("seq_mean", [False, True])
def test_step_over_two_ranks(ranks, table_engine, make_rollouts, seq_mean):
    batch = make_rollouts().only(("tokens", "prompt_mask", "minibatch"))
    mask = batch["prompt_mask"].clone()
    mask[: batch.lengths("tokens")[0]] = 1  # a row without a response
    batch = batch.with_tokenwise("prompt_mask", mask)
    interface = SFT(SFTConfig(seq_mean=seq_mean), CONTEXT)
    parts = ([0, 1, 2, 4, 5], [], [3, 6, 7])
    engines, results = ranks(
        [lambda engine, part=part: interface.train_step(engine, batch.select(part), {}) for part in parts]
    )

    logits = table_engine().logits
    rows = []
    for tokens, prompt in zip(batch.columns["tokens"].rows(), batch.columns["prompt_mask"].rows(), strict=True):
        response = [t for t in range(1, len(tokens)) if not prompt[t]]
        rows.append([-torch.log_softmax(logits[tokens[t - 1]], 0)[tokens[t]] for t in response])
    rows = [row for row in rows if row]
    n_tokens = sum(len(row) for row in rows)
    loss = sum(sum(row) / len(row) for row in rows) / 7 if seq_mean else sum(sum(row) for row in rows) / n_tokens
    want = logits - torch.autograd.grad(loss, logits)[0]
    for engine in engines:
        assert torch.allclose(engine.logits, want, atol=1e-7)
        assert [together for _, _, together in engine.calls] == [False]

    def total(name, i):
        return sum(stats[name][i] for stats, _ in results if name in stats)

    assert total("loss", 0) / total("loss", 1) == pytest.approx(loss.item(), rel=1e-6)
    assert total("nll", 0) == pytest.approx(sum(sum(row).item() for row in rows)) and total("nll", 1) == n_tokens
    assert (total("n_tokens", 0), total("n_tokens", 1)) == (n_tokens, 8)
    assert all(state == {} for _, state in results)
    engine = table_engine()
    outputs, evaluation = interface.inference(engine, batch, {})
    assert outputs.ids == batch.ids and not outputs.columns and torch.equal(engine.logits, logits)
    assert {name: pytest.approx((total(name, 0), total(name, 1)), rel=1e-6) for name in ("loss", "nll")} == evaluation
