"""Reward model steps against plain loops, and scoring."""

import math
from pathlib import Path

import pytest
import torch

from realhf.algorithms.rw import PairedReward, pairs_of
from realhf.api.batch import RowId
from realhf.api.config import PPOConfig
from realhf.api.engine import InterfaceContext
from realhf.data.batch import Column, SequenceBatch

CONTEXT = InterfaceContext(seed=1, tokenizer=None, run_root=Path("."))
LAST = {(5, 0): 1, (5, 1): 2, (5, 2): 3, (5, 3): 4, (9, 0): 6, (9, 1): 6}  # the last token of every row


def pairs_batch():
    ids = tuple(RowId(*key) for key in LAST)
    return SequenceBatch(ids, {"tokens": Column.of([torch.tensor([0, 5, last]) for last in LAST.values()])})


def test_step(ranks, table_engine):
    batch, interface = pairs_batch(), PairedReward(PPOConfig(), CONTEXT)
    scores = table_engine().scores
    s = [scores[i] for i in range(7)]
    margins = [s[1] - s[2], s[3] - s[4], s[6] - s[6]]
    losses = [torch.log(1 + torch.exp(-m)) for m in margins]
    loss = ((losses[0] + losses[1]) / 2 + losses[2]) / 2
    want = scores - torch.autograd.grad(loss, scores)[0]
    for parts in ([[2, 0, 5, 3, 4, 1]], [[3, 2, 1, 0], [], [5, 4]]):
        engines, results = ranks(
            [lambda engine, part=part: interface.train_step(engine, batch.select(part), {}) for part in parts]
        )
        assert all(torch.allclose(engine.scores, want) and engine.calls[0][2] for engine in engines)
        stats = {
            name: [sum(part[name][i] for part, _ in results if name in part) for i in range(2)]
            for name in results[0][0]
        }
        assert stats["loss"] == pytest.approx([2 * loss.item(), 2])
        assert stats["accuracy"] == [sum(m.item() > 0 for m in margins), 3]  # the tie is wrong
        assert stats["margin"] == pytest.approx([sum(margins).item(), 3])
        assert stats["chosen_score"][0] - stats["rejected_score"][0] == pytest.approx(stats["margin"][0])


def test_equal_scores_lose_log_two_and_count_as_wrong(table_engine):
    batch = pairs_batch().select([4, 5])
    stats, state = PairedReward(PPOConfig(), CONTEXT).train_step(table_engine(), batch, {"x": 1})
    assert stats["loss"] == pytest.approx((math.log(2), 1)) and stats["accuracy"] == (0, 1) and state == {"x": 1}


def test_pairs_are_found_by_their_ids():
    ids = tuple(RowId(1, s) for s in (3, 0, 2, 1)) + (RowId(0, 1), RowId(0, 0))
    assert pairs_of(ids) == ([1, 2, 5], [3, 0, 4], [0.5, 0.5, 1.0])
    with pytest.raises(ValueError, match="sample 0 of prompt 3 has no partner"):
        pairs_of((RowId(3, 0), RowId(4, 1)))


def test_inference_scales_and_keeps_the_best(table_engine):
    engine, batch = table_engine(), pairs_batch()
    config = PPOConfig(reward_output_bias=0.5, reward_output_scaling=2.0)
    out, stats = PairedReward(config, CONTEXT).inference(engine, batch, {})
    want = [(engine.scores[last].item() - 0.5) * 2 for last in LAST.values()]
    assert out["rewards"].tolist() == pytest.approx(want) and out.ids == batch.ids
    assert stats["reward"] == pytest.approx((sum(want), 6))
    masked = batch.with_tokenwise("prompt_mask", torch.tensor([1, 0, 0] * 6, dtype=torch.uint8))
    best, _ = PairedReward(PPOConfig(generation_size=4, group_size=1), CONTEXT).inference(engine, masked, {})
    top = max(range(4), key=lambda i: want[i])
    assert best.ids == (RowId(5, top), RowId(9, 0)) and best["rewards"][0].item() == pytest.approx(want[top] / 2 + 0.5)
    none, stats = PairedReward(config, CONTEXT).inference(engine, batch.select([]), {})
    assert len(none) == 0 and stats["reward"] == (0, 0)
