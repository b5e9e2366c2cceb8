"""Reward model steps against plain loops, evaluation, and scoring."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import PPOConfig, PRMRewardConfig
from realhf.algorithms.policy_gradient.prm_rewards import shape_step_rewards
from realhf.algorithms.reward_model.reward_model import LabelledReward, LabelledRewardConfig, PairedReward, RewardModel
from realhf.api.batch_meta import RowId
from realhf.api.config.preference import Aggregate, RewardModelType, RWConfig, ScoreConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext
from tests.scaling import examples

CONTEXT = InterfaceContext(seed=1, tokenizer=None, run_root=Path("."))
LAST = {(5, 0): 1, (5, 1): 2, (5, 2): 3, (5, 3): 4, (9, 0): 6, (9, 1): 6}  # the last token of every row


class Letters:
    """A tokenizer of seven tokens; token 5 is a line break."""

    def decode(self, ids):
        return "".join("abcde\n."[i] for i in ids)

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


def pairs_batch():
    ids = tuple(RowId(*key) for key in LAST)
    return SequenceBatch(ids, {"tokens": Column.of([torch.tensor([0, 5, last]) for last in LAST.values()])})


def steps_batch():
    """Responses of two steps and of one step, prompts of one token; hard and soft labels."""
    tokens = [torch.tensor([0, 1, 5, 2, 6]), torch.tensor([0, 3, 6])]
    labels = [torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.0]), torch.tensor([-1.0, -1.0, 0.25])]
    masks = [torch.tensor([1] + [0] * (len(t) - 1), dtype=torch.uint8) for t in tokens]
    columns = {"tokens": Column.of(tokens), "step_labels": Column.of(labels), "prompt_mask": Column.of(masks)}
    return SequenceBatch((RowId(3, 0), RowId(4, 0)), columns)


def merged(results, name):
    return [sum(part[name][i] for part in results if name in part) for i in range(2)]


def test_training_step_on_pairs(ranks, table_engine):
    batch, interface = pairs_batch(), RewardModel(RWConfig(), CONTEXT)
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
        stats = [part for part, _ in results]
        assert merged(stats, "loss") == pytest.approx([2 * loss.item(), 2])
        assert merged(stats, "accuracy") == [sum(m.item() > 0 for m in margins), 3]  # a tie is wrong
        assert merged(stats, "margin") == pytest.approx([sum(margins).item(), 3])


def test_training_step_on_ranked_lists(ranks, table_engine):
    """The first prompt's four rows are one list of six pairs."""
    interface = RewardModel(RWConfig(type=RewardModelType.ranked, score_l2_reg=0.1), CONTEXT)
    scores = table_engine().scores

    def term(i, j):
        return torch.log(1 + torch.exp(scores[j] - scores[i])) + 0.05 * (scores[i] ** 2 + scores[j] ** 2)

    lists = [[term(i, j) for i in range(1, 5) for j in range(i + 1, 5)], [term(6, 6)]]
    loss = sum(sum(terms) / len(terms) for terms in lists) / 2
    want = scores - torch.autograd.grad(loss, scores)[0]
    (engine,), _ = ranks([lambda engine: interface.train_step(engine, pairs_batch(), {})])
    assert torch.allclose(engine.scores, want)


@pytest.mark.parametrize("parts", [[[0, 1]], [[1], [0], []]])
def test_training_step_on_labelled_steps(ranks, table_engine, parts):
    batch, interface = steps_batch(), RewardModel(RWConfig(type=RewardModelType.process), CONTEXT)
    scores = table_engine().scores
    probability = torch.sigmoid(scores)
    terms = [-probability[1].log(), -(1 - probability[6]).log(),
             -0.25 * probability[6].log() - 0.75 * (1 - probability[6]).log()]  # fmt: skip
    want = scores - torch.autograd.grad(sum(terms) / 3, scores)[0]
    engines, results = ranks(
        [lambda engine, part=part: interface.train_step(engine, batch.select(part), {}) for part in parts]
    )
    assert all(torch.allclose(engine.scores, want, atol=1e-7) for engine in engines)
    assert merged([stats for stats, _ in results], "loss") == pytest.approx([sum(terms).item(), 3])


def test_evaluation_returns_the_statistics_of_training_without_a_step(table_engine):
    outcomes = pairs_batch().with_scalars("label", torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]))
    kinds = {RewardModelType.pairs: pairs_batch(), RewardModelType.ranked: pairs_batch(),
             RewardModelType.outcome: outcomes, RewardModelType.process: steps_batch()}  # fmt: skip
    for kind, batch in kinds.items():
        engine, interface = table_engine(), RewardModel(RWConfig(type=kind), CONTEXT)
        before = engine.scores.detach().clone()
        outputs, stats = interface.inference(engine, batch, {"x": 1})
        assert outputs.ids == batch.ids and not outputs.columns and torch.equal(engine.scores, before)
        assert merged([interface.train_step(engine, batch, {})[0]], "loss") == pytest.approx(list(stats["loss"]))
        scored = [1, 6, 6] if kind is RewardModelType.process else list(LAST.values())
        assert stats["score"] == pytest.approx((before[scored].sum().item(), len(scored)))
        assert stats["score_sq"] == pytest.approx((before[scored].square().sum().item(), len(scored)))
        empty = interface.inference(engine, batch.select([]), {})[1]
        assert empty["loss"] == (0, 0) and empty["score"] == (0, 0)


def test_equal_scores_have_loss_log_2_and_count_as_wrong(table_engine):
    batch = pairs_batch().select([4, 5])
    stats, state = RewardModel(RWConfig(), CONTEXT).train_step(table_engine(), batch, {"x": 1})
    assert stats["loss"] == pytest.approx((math.log(2), 1)) and stats["accuracy"] == (0, 1) and state == {"x": 1}


def test_scores_are_scaled_and_the_best_selected(table_engine):
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


def labelled(kind, how=Aggregate.prod, **options):
    config = LabelledRewardConfig(PPOConfig(**options), ScoreConfig(type=kind, aggregate=how))
    return LabelledReward(config, InterfaceContext(seed=1, tokenizer=Letters(), run_root=Path(".")))


def test_labelled_models_return_probabilities(table_engine):
    engine, batch = table_engine(), steps_batch()
    p = engine.scores.detach().sigmoid().tolist()
    outcome, _ = labelled(RewardModelType.outcome).inference(engine, batch, {})
    assert outcome["rewards"].tolist() == pytest.approx([p[6], p[6]])
    process, stats = labelled(RewardModelType.process, reward_output_scaling=2.0).inference(engine, batch, {})
    assert process["rewards"].tolist() == pytest.approx([2 * p[1] * p[6], 2 * p[6]])
    assert process["step_rewards"].tolist() == pytest.approx([-1, p[1], -1, -1, p[6], -1, -1, p[6]])
    assert stats["reward"] == pytest.approx((2 * p[1] * p[6] + 2 * p[6], 2))
    none, _ = labelled(RewardModelType.process).inference(engine, batch.select([]), {})
    assert len(none) == 0 and none["step_rewards"].numel() == none["rewards"].numel() == 0


def test_labelled_reward_needs_a_model_of_labels():
    with pytest.raises(ValueError, match="a model of pairs returns scores, not probabilities"):
        labelled(RewardModelType.pairs)


def test_step_rewards_of_selected_responses(table_engine):
    engine, batch = table_engine(), steps_batch()
    batch = SequenceBatch((RowId(3, 0), RowId(3, 1)), batch.columns)
    p = engine.scores.detach().sigmoid().tolist()
    kept, _ = labelled(RewardModelType.process, generation_size=2, group_size=1).inference(engine, batch, {})
    assert kept.ids == (RowId(3, 1),) and kept["step_rewards"].tolist() == pytest.approx([-1, -1, p[6]])


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([0.3, -2.0, -1000.0, 1000.0, math.nan]), min_size=7, max_size=7),
    st.sampled_from(Aggregate),
)
def test_a_probability_that_underflows_is_a_step_reward_and_nan_is_a_failure(table_engine, scores, how):
    """Scores of tokens, of which -1e3 has probability 0; the rows end at the tokens 1, 6 and 6."""
    engine, batch = table_engine(), steps_batch()
    with torch.no_grad():
        engine.scores[:] = torch.tensor(scores)
    result, stats = labelled(RewardModelType.process, how=how).inference(engine, batch, {})
    p = engine.scores.sigmoid().tolist()
    steps = [[p[1], p[6]], [p[6]]]
    valid = [i for i, row in enumerate(steps) if not any(map(math.isnan, row))]
    assert result.ids == tuple(batch.ids[i] for i in valid) and stats["failed"] == (2.0 - len(valid), 2.0)
    assert [row[row >= 0].tolist() for row in result.columns["step_rewards"].rows()] == [
        pytest.approx(steps[i]) for i in valid
    ]
    dense = result.columns["step_rewards"]
    shaped = Column(shape_step_rewards(dense, PRMRewardConfig(clip=True), 1.0), dense.lengths)
    assert [row[row < 0].tolist() for row in shaped.rows()] == [
        pytest.approx([q - 1 for q in steps[i] if q < 1]) for i in valid
    ]
