"""Rewards of ensembles."""

from pathlib import Path

import pytest
import torch

from realhf.algorithms import build_interface
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.batch_meta import RowId
from realhf.api.codec import to_plain
from realhf.api.config.preference import EnsembleConfig, Objective
from realhf.api.graph import InterfaceSpec
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext

MEMBERS = [[1.0, 2.0, -1.0, 0.0], [3.0, 2.0, 0.0, -1.0]]


def scored(ensemble: EnsembleConfig, ppo: PPOConfig, members: list[list[float]]) -> tuple[SequenceBatch, dict]:
    interface = build_interface(
        InterfaceSpec("ensemble", {"ensemble": to_plain(ensemble), "ppo": to_plain(ppo)}),
        InterfaceContext(seed=1, tokenizer=None, run_root=Path(".")),
    )
    ids = tuple(RowId(p, s) for p in (4, 7) for s in (0, 1))[: len(members[0])]
    masks = [torch.tensor([1, 0], dtype=torch.uint8)] * len(ids)
    batch = SequenceBatch(ids, {"prompt_mask": Column(torch.cat([*masks, torch.empty(0)]), (2,) * len(ids))})
    for i, scores in enumerate(members):
        batch = batch.with_scalars(f"score_{i}", torch.tensor(scores))
    return interface.inference(None, batch, {})


def test_rewards_and_statistics() -> None:
    ppo = PPOConfig(reward_output_bias=1.0, reward_output_scaling=2.0)
    rows, stats = scored(EnsembleConfig(["a", "b"], Objective.WCO), ppo, MEMBERS)
    assert rows["rewards"].tolist() == [0.0, 2.0, -4.0, -4.0] and rows["rewards"].dtype == torch.float32
    assert stats == {"reward": (-6.0, 4.0), "reward_sq": (36.0, 4.0), "failed": (0.0, 4.0), "variance": (1.5, 4.0),
                     "lowest_0": (3.0, 4.0), "lowest_1": (1.0, 4.0)}  # fmt: skip
    unbiased, stats = scored(EnsembleConfig(["a", "b"], Objective.UWO, 1.0, True), PPOConfig(), MEMBERS)
    assert unbiased["rewards"].tolist() == [0.0, 2.0, -1.0, -1.0] and stats["variance"] == (3.0, 4.0)


def test_the_best_of_each_prompt_is_selected() -> None:
    ppo = PPOConfig(group_size=1, generation_size=2)
    rows, stats = scored(EnsembleConfig(["a", "b"]), ppo, MEMBERS)
    assert rows.ids == (RowId(4, 0), RowId(7, 0)) and rows["rewards"].tolist() == [2.0, -0.5]
    assert stats["reward"] == (3.0, 4.0)


def test_empty_batch_and_scores_that_are_not_finite() -> None:
    rows, stats = scored(EnsembleConfig(["a", "b"]), PPOConfig(), [[], []])
    assert len(rows) == 0 and stats["variance"] == (0.0, 0.0)
    with pytest.raises(ValueError, match=r"reward model 1 \(b\) scores RowId\(prompt=7, sample=0\) with nan"):
        scored(EnsembleConfig(["a", "b"]), PPOConfig(), [MEMBERS[0], [1.0, 2.0, float("nan"), 0.0]])
