"""GRPO with a generator that is wrong on purpose: another temperature, or weights rounded to bfloat16."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.ppo import PPOActor, sample_responses
from realhf.api.codec import to_plain
from realhf.api.config import opt
from realhf.api.graph import MFC, InterfaceSpec
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import InterfaceContext
from realhf.experiments.grpo import GRPOExperiment


@dataclass
class WrongConfig:
    ppo: PPOConfig = opt(PPOConfig, "the algorithm")
    temperature: float = opt(1.0, "factor of the temperature")
    bf16: bool = opt(False, "generate with weights rounded to bfloat16")


class WrongRollout(PPOActor):
    """Samples with the wrong temperature or weights; ``logprobs`` are those of the sampling distribution."""

    config_type = WrongConfig  # type: ignore[assignment]

    def __init__(self, config: WrongConfig, context: InterfaceContext) -> None:
        super().__init__(config.ppo, context)
        self.wrong = config

    def generate(self, engine: Any, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        gen = replace(self.config.gen, temperature=self.config.gen.temperature * self.wrong.temperature)
        exact = engine.params.data.clone()
        if self.wrong.bf16:
            engine.params.data.copy_(exact.bfloat16())
        try:
            with torch.no_grad():
                return sample_responses(engine, batch, gen, self.config.group_size, self.context.seed)
        finally:
            engine.params.data.copy_(exact)


@dataclass
class WrongGRPO(GRPOExperiment):
    """GRPO with a wrong generator."""

    wrong_temperature: float = opt(1.0, "factor of the temperature of generation")
    wrong_bf16: bool = opt(False, "generate with weights rounded to bfloat16")

    def rollout_mfc(self) -> MFC:
        config = {"ppo": to_plain(self.ppo), "temperature": self.wrong_temperature, "bf16": self.wrong_bf16}
        return replace(super().rollout_mfc(), interface=InterfaceSpec(f"{__file__}:WrongRollout", config))
