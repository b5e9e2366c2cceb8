"""Algorithms without a critic that differ from PPO only in their options: GRPO, RLOO, REINFORCE++."""

from dataclasses import dataclass
from functools import partial

from realhf.algorithms.policy_gradient.config import Advantage, PolicyLoss, PPOConfig
from realhf.api.config import KLEstimator, KLPlace, LossAggregation, opt
from realhf.experiments.ppo_math import PPOMathExperiment


@dataclass
class GRPOExperiment(PPOMathExperiment):
    """Group relative policy optimisation."""

    # Shao et al. 2024 (arXiv 2402.03300, sec. 4.1): group-normalised scores, mean over responses, KL in the loss
    ppo: PPOConfig = opt(partial(PPOConfig, group_size=8, disable_value=True, advantage=Advantage["group"],
                                 adv_norm=False, loss_aggregation=LossAggregation.seq_mean, kl_in=KLPlace.loss,
                                 kl_loss_estimator=KLEstimator.k3, kl_ctl=0.04, ppo_n_minibatches=1),
                         "the algorithm")  # fmt: skip


@dataclass
class RLOOExperiment(PPOMathExperiment):
    """REINFORCE with leave-one-out baselines."""

    # Ahmadian et al. 2024 (arXiv 2402.14740): leave-one-out baseline, KL in the reward
    ppo: PPOConfig = opt(partial(PPOConfig, group_size=4, disable_value=True, advantage=Advantage["rloo"],
                                 adv_norm=False, policy_loss=PolicyLoss["reinforce"], kl_ctl=0.05,
                                 loss_aggregation=LossAggregation.seq_sum, ppo_n_minibatches=1),
                         "the algorithm")  # fmt: skip


@dataclass
class ReinforcePPExperiment(PPOMathExperiment):
    """REINFORCE++."""

    # Hu 2025 (arXiv 2501.03262): returns with the per-token KL, normalised over the batch, PPO's clipping
    ppo: PPOConfig = opt(partial(PPOConfig, group_size=4, disable_value=True, kl_ctl=0.01), "the algorithm")
