"""Algorithms without a critic that differ from PPO only in their options: GRPO, RLOO, REINFORCE++."""

from dataclasses import dataclass

from realhf.algorithms.policy_gradient.config import Advantage, PolicyLoss, PPOConfig
from realhf.api.config import KLEstimator, KLPlace, LossAggregation, opt
from realhf.experiments.ppo_math import PPOMathExperiment


def grpo() -> PPOConfig:
    """Shao et al. 2024 (arXiv 2402.03300, sec. 4.1): group-normalised scores, mean over responses, KL in the loss."""
    return PPOConfig(group_size=8, disable_value=True, advantage=Advantage["group"], adv_norm=False,
                     loss_aggregation=LossAggregation.seq_mean, kl_in=KLPlace.loss, kl_loss_estimator=KLEstimator.k3,
                     kl_ctl=0.04, ppo_n_minibatches=1)  # fmt: skip


def rloo() -> PPOConfig:
    """Ahmadian et al. 2024 (arXiv 2402.14740): leave-one-out baseline, KL in the reward."""
    return PPOConfig(group_size=4, disable_value=True, advantage=Advantage["rloo"], adv_norm=False,
                     policy_loss=PolicyLoss["reinforce"], loss_aggregation=LossAggregation.seq_sum, kl_ctl=0.05,
                     ppo_n_minibatches=1)  # fmt: skip


def reinforce_pp() -> PPOConfig:
    """Hu 2025 (arXiv 2501.03262): returns with the per-token KL, normalised over the batch, PPO's clipping."""
    return PPOConfig(group_size=4, disable_value=True, kl_ctl=0.01)


@dataclass
class GRPOExperiment(PPOMathExperiment):
    """Group relative policy optimisation."""

    ppo: PPOConfig = opt(grpo, "the algorithm")


@dataclass
class RLOOExperiment(PPOMathExperiment):
    """REINFORCE with leave-one-out baselines."""

    ppo: PPOConfig = opt(rloo, "the algorithm")


@dataclass
class ReinforcePPExperiment(PPOMathExperiment):
    """REINFORCE++."""

    ppo: PPOConfig = opt(reinforce_pp, "the algorithm")
