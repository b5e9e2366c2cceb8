"""On-policy distillation: the actor samples, and learns from a teacher's log-probs of its responses."""

from dataclasses import dataclass
from functools import partial

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import KLPlace, opt
from realhf.experiments.ppo_math import PPOMathExperiment


@dataclass
class DistillExperiment(PPOMathExperiment):
    """On-policy distillation. The verifier only measures: its rewards have weight 0."""

    # Agarwal et al. 2023 (arXiv 2306.13649): the student's own samples, the teacher's log-probs of every token
    ppo: PPOConfig = opt(partial(PPOConfig, group_size=4, disable_value=True, adv_norm=False, kl_in=KLPlace.none,
                                 kl_ctl=0.0, reward_output_scaling=0.0, ppo_n_minibatches=1),
                         "the algorithm")  # fmt: skip

    @property
    def teacher_role(self) -> str:  # type: ignore[override]
        return super().teacher_role or "teacher"
