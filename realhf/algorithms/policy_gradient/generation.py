"""Sampling of responses: the interface ``generation``, and what the PPO actor shares with it."""

from realhf.algorithms.stats import mean_of
from realhf.api.config import GenerationConfig
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext


def train_temperature(config: GenerationConfig) -> float:
    """Return the temperature of log-probabilities in training: that of sampling, 1 with greedy decoding."""
    return 1.0 if config.greedy or config.temperature == 0.0 else config.temperature


def sample_responses(
    engine: Engine, batch: SequenceBatch, config: GenerationConfig, n: int, seed: int
) -> tuple[SequenceBatch, Stats]:
    """Sample ``n`` responses to every row of column ``prompts``; columns as in Engine.generate.

    Statistics: ``response_length`` (tokens including the stop token), ``truncated`` (fraction of responses without a
    stop token), ``prompt_length``.
    """
    responses = engine.generate(batch.only(("prompts",)), config, n, seed)
    return responses, {
        "response_length": (float((responses["prompt_mask"] == 0).sum()), float(len(responses))),
        "truncated": mean_of(responses["truncated"]),
        "prompt_length": (float(sum(batch.lengths("prompts"))), float(len(batch))),
    }


class Generate:
    """Samples ``config.n`` responses per prompt."""

    config_type = GenerationConfig

    def __init__(self, config: GenerationConfig, context: InterfaceContext) -> None:
        self.config = config
        self.context = context

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        return sample_responses(engine, batch, self.config, self.config.n, self.context.seed)
