"""Selection of tokens by covariance, against sorting, alone and over ranks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import PolicyLoss, PolicyLossOptions, PPOConfig
from realhf.algorithms.policy_gradient.losses.covariances import covariances_of, kth_largest, select_tokens
from realhf.algorithms.policy_gradient.losses.policy_losses import ClipCovOptions, KLCovOptions
from tests.algorithms.conftest import TableEngine, rollouts
from tests.scaling import examples

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(finite | st.sampled_from([0.0, -0.0, 1.0]), st.booleans()), max_size=40), st.integers(-1, 45))
def test_the_kth_largest_of_the_masked_values(rows: list[tuple[float, bool]], k: int) -> None:
    values, mask = (torch.tensor([row[i] for row in rows]) for i in range(2))
    kept = sorted((value for value, is_kept in rows if is_kept), reverse=True)
    expected = math.inf if k <= 0 else -math.inf if k > len(kept) else kept[k - 1]
    assert kth_largest(TableEngine(), values.float(), mask.bool(), k) == expected


def test_covariances_by_hand() -> None:
    logprobs, advantages = torch.tensor([-1.0, -3.0, 9.0, -2.0]), torch.tensor([2.0, -1.0, 9.0, -1.0])
    mask = torch.tensor([True, True, False, True])
    found = covariances_of(TableEngine(), logprobs, advantages, mask)[mask]
    assert found.tolist() == pytest.approx([1.0 * 2.0, -1.0 * -1.0, 0.0])


def selected(name: str, options: ClipCovOptions | KLCovOptions, version: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the selected tokens of many responses, and the mask."""
    batch = rollouts(n_prompts=400)
    engine = TableEngine()
    engine.version = version
    mask = batch["prompt_mask"] == 0
    config = PPOConfig(policy_loss=PolicyLoss[name], losses=replace(PolicyLossOptions(), **{name: options}))
    advantages = torch.randn(len(mask), generator=torch.Generator().manual_seed(1))
    found = select_tokens(engine, batch, batch["logprobs"], advantages, mask, config)
    assert found is not None
    return found, mask


def test_kl_cov_selects_the_share_of_the_highest() -> None:
    found, mask = selected("kl_cov", KLCovOptions(share=0.1))
    assert int(found.sum()) == int(0.1 * mask.sum()) and not bool((found & ~mask).any())


def test_clip_cov_selects_the_share_at_random_within_the_bounds() -> None:
    some, mask = selected("clip_cov", ClipCovOptions(share=0.1, low=-0.5, high=0.5))
    again, _ = selected("clip_cov", ClipCovOptions(share=0.1, low=-0.5, high=0.5))
    later, _ = selected("clip_cov", ClipCovOptions(share=0.1, low=-0.5, high=0.5), version=1)
    assert torch.equal(some, again) and not torch.equal(some, later) and not bool((some & ~mask).any())
    n, sigma = 0.1 * float(mask.sum()), (0.1 * float(mask.sum())) ** 0.5
    assert abs(float(some.sum()) - n) < 4 * sigma
    every, _ = selected("clip_cov", ClipCovOptions(share=1.0, low=-1e9, high=1e9))
    assert torch.equal(every, mask)


def test_other_losses_select_nothing() -> None:
    batch = rollouts()
    mask = batch["prompt_mask"] == 0
    assert select_tokens(TableEngine(), batch, batch["logprobs"], batch["values"], mask, PPOConfig()) is None
