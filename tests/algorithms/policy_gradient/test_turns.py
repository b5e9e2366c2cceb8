"""Rewards, advantages and masks of rows in which the tokens of environments stand between replies."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.advantages import GROUP_EPS
from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig
from realhf.algorithms.policy_gradient.ppo_formulas import token_rewards
from realhf.algorithms.policy_gradient.signals import TrainingSignals, compute_signals, with_turn_rewards
from realhf.api.batch_meta import RowId
from realhf.api.config import KLPlace
from realhf.data.batch import Column, SequenceBatch
from realhf.ops.rows import PackedRows

SINGLE = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4)
"""Rows: lengths of the prompt and of the response."""
MULTI = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4), min_size=1, max_size=4
)
"""Rows: turns, each with the lengths of the environment's message and of the reply."""


def batch_of(masks: list[list[int]], seed: int, turns: bool) -> SequenceBatch:
    """Return a training batch; ``masks`` are 1 on sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(map(len, masks))
    n = sum(lengths)

    def numbers(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    sampled = torch.tensor([value for mask in masks for value in mask])
    columns = {
        "tokens": Column(torch.randint(0, 9, (n,), generator=generator), lengths),
        "prompt_mask": Column((1 - sampled).to(torch.uint8), lengths),
        **{key: Column(numbers(n) * sampled, lengths) for key in ("logprobs", "ref_logprobs")},
        "values": Column(numbers(n), lengths),
        "rewards": Column.scalars(numbers(len(masks))),
        "truncated": Column.scalars(torch.randint(0, 2, (len(masks),), generator=generator).to(torch.uint8)),
    }
    if turns:
        columns["turn_rewards"] = Column(numbers(n) * sampled, lengths)
    return SequenceBatch(tuple(RowId(i // 2, i % 2) for i in range(len(masks))), columns)


def signals(batch: SequenceBatch, config: PPOConfig, kl_coef: float = 0.3) -> TrainingSignals:
    return compute_signals(None, batch, config, kl_coef)  # type: ignore[arg-type]


def row_of(turns: list[tuple[int, int]]) -> list[int]:
    return [0] + [v for before, own in turns for v in (*[0] * before, *[1] * own)]


@given(SINGLE, st.integers(0, 99), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.5]))
def test_an_episode_of_one_turn_is_a_response(rows: list, seed: int, discount: float, lam: float) -> None:
    masks = [[0] * prompt + [1] * response for prompt, response in rows]
    config = PPOConfig(discount=discount, gae_lambda=lam)
    batch = batch_of(masks, seed, turns=False)
    last = PackedRows(batch["prompt_mask"] == 0, batch.lengths("tokens")).last
    on_last = torch.zeros(len(batch["tokens"])).index_copy(0, last, batch["rewards"])
    episode = batch.with_tokenwise("turn_rewards", on_last)
    expected, found = signals(batch, config), signals(episode, config)
    mask = expected.response_mask
    for name in ("advantages", "returns"):
        torch.testing.assert_close(getattr(found, name)[mask], getattr(expected, name)[mask], atol=1e-5, rtol=1e-5)


@given(MULTI, st.integers(0, 99), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.0, 0.5]))
def test_advantages_walk_over_sampled_tokens(rows: list, seed: int, gamma: float, lam: float) -> None:
    """A plain loop over the actions of each row."""
    masks = [row_of(turns) for turns in rows]
    batch, config = batch_of(masks, seed, turns=True), PPOConfig(discount=gamma, gae_lambda=lam, kl_in=KLPlace.none)
    found = signals(batch, config)
    parts = zip(
        masks,
        *(batch.columns[key].rows() for key in ("values", "turn_rewards")),
        batch["rewards"].clamp(-20, 20).tolist(),
        batch["truncated"].tolist(),
        found.advantages.split(batch.lengths("tokens")),
        found.returns.split(batch.lengths("tokens")),
        strict=True,
    )
    for mask, values, turns, reward, truncated, advantages, returns in parts:
        actions = [t for t, sampled in enumerate(mask) if sampled]
        own = {t: float(turns[t]) for t in actions}
        own[actions[-1]] += reward - sum(own.values())
        after = float(values[actions[-1]]) if truncated else 0.0
        later = 0.0
        for t in reversed(actions):
            before = float(values[t - 1])
            later = own[t] + gamma * after - before + gamma * lam * later
            assert float(advantages[t]) == pytest.approx(later, abs=1e-4)
            assert float(returns[t]) == pytest.approx(later + before, abs=1e-4)
            after = before
        assert all(advantages[t] == 0 == returns[t] for t, sampled in enumerate(mask) if not sampled)


@given(MULTI, st.integers(0, 99))
def test_scores_of_groups_do_not_depend_on_the_turns(rows: list, seed: int) -> None:
    masks = [row_of(turns) for turns in rows for _ in range(2)]
    config = PPOConfig(group_size=2, disable_value=True, advantage=Advantage["group"], kl_in=KLPlace.none)
    batch = batch_of(masks, seed, turns=True)
    found = signals(batch, config)
    firsts = [
        row[mask.index(1)] for row, mask in zip(found.advantages.split(batch.lengths("tokens")), masks, strict=True)
    ]
    for i, (a, b) in enumerate(zip(*(batch["rewards"].tolist()[k::2] for k in (0, 1)), strict=True)):
        spread = abs(a - b) / 2 + GROUP_EPS
        assert float(firsts[2 * i]) == pytest.approx((a - b) / 2 / spread, abs=1e-3)


def test_a_row_that_ends_with_a_message_of_the_environment_keeps_its_reward() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0])
    rewards = token_rewards(torch.zeros(8), torch.tensor([1.0, 2.0]), PackedRows(mask.bool(), (5, 3)), 0.1)
    assert rewards.tolist() == [0, 0, 1, 0, 0, 0, 2, 0]


def test_a_row_without_sampled_tokens_has_no_reward() -> None:
    rows = PackedRows(torch.tensor([0, 0, 0, 1]).bool(), (2, 2))
    rewards = token_rewards(torch.zeros(4), torch.tensor([5.0, 1.0]), rows, 0.1)
    assert rewards.tolist() == [0, 0, 0, 1]
    assert with_turn_rewards(rewards, torch.tensor([3.0, 4.0, 5.0, 0.25]), rows).tolist() == [0, 0, 0, 1]


def test_kl_and_lengths_count_sampled_tokens_only() -> None:
    masks = [[0, 1, 1, 0, 0, 1, 0], [0, 0, 1]]
    batch = batch_of(masks, 1, turns=True)
    batch = batch.with_tokenwise("ref_logprobs", torch.randn(10))
    found = signals(batch, replace(PPOConfig(), disable_value=True))
    sampled = torch.tensor([value for mask in masks for value in mask]).bool()
    assert torch.equal(found.loss_mask, sampled) and (found.kl[~sampled] == 0).all()


@given(MULTI, st.integers(0, 99), st.sampled_from([1.0, 0.5]))
def test_turns_are_compared_with_those_of_the_same_number(rows: list, seed: int, discount: float) -> None:
    """A plain loop over the turns of each group of two rows."""
    masks = [row_of([(max(1, before), own) for before, own in turns]) for turns in (*rows, *rows[::-1])]
    masks = masks[: len(masks) // 2 * 2]
    config = PPOConfig(group_size=2, disable_value=True, advantage=Advantage["turn"], kl_in=KLPlace.none)
    config.advantages.turn.discount = discount
    batch = batch_of(masks, seed, turns=True)
    found = signals(batch, config)
    spans: list[list[list[int]]] = []
    returns: list[list[float]] = []
    start = 0
    for mask, reward in zip(masks, batch["rewards"].clamp(-20, 20).tolist(), strict=True):
        runs: list[list[int]] = []
        for t, sampled in enumerate(mask):
            if sampled and not mask[t - 1]:
                runs.append([])
            if sampled:
                runs[-1].append(start + t)
        own = [float(batch["turn_rewards"][run].sum()) for run in runs]
        own[-1] += reward - sum(own)
        spans.append(runs)
        returns.append([sum(r * discount**j for j, r in enumerate(own[k:])) for k in range(len(own))])
        start += len(mask)
    for row, runs in enumerate(spans):
        for k, run in enumerate(runs):
            pair = [some[k] for some in returns[row // 2 * 2 :][:2] if k < len(some)]
            mean = sum(pair) / len(pair)
            std = (sum((r - mean) ** 2 for r in pair) / len(pair)) ** 0.5
            expected = (returns[row][k] - mean) / (std + GROUP_EPS) if len(set(pair)) > 1 else 0.0
            assert found.advantages[run].tolist() == pytest.approx([expected] * len(run), abs=2e-3)
            assert found.returns[run].tolist() == pytest.approx([returns[row][k]] * len(run), abs=1e-4)
