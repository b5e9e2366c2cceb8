"""Answers to prompts: the interface of ``gen``, and what PPO's rollout shares with it."""

from realhf.algorithms.stats import mean_of
from realhf.api.config import GenerationConfig
from realhf.api.messages import State, Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext


def train_temperature(config: GenerationConfig) -> float:
    """Temperature of the log-probabilities that go with ``config``: 1 where answers are drawn greedily."""
    return 1.0 if config.greedy or config.temperature == 0.0 else config.temperature


def sample_responses(
    engine: Engine, batch: SequenceBatch, config: GenerationConfig, n: int, seed: int
) -> tuple[SequenceBatch, Stats]:
    """Draw ``n`` answers to every row of column ``prompts``; columns as in Engine.generate.

    Statistics: tokens per answer (its stop token included), share of answers without a stop token, tokens per prompt.
    """
    answers = engine.generate(batch.only(("prompts",)), config, n, seed)
    stats = {
        "answer_length": (float((answers["prompt_mask"] == 0).sum()), float(len(answers))),
        "truncated": mean_of(answers["truncated"]),
        "prompt_length": (float(sum(batch.lengths("prompts"))), float(len(batch))),
    }
    return answers, stats


class Generate:
    """Draws ``config.n`` answers per prompt."""

    config_type = GenerationConfig

    def __init__(self, config: GenerationConfig, context: InterfaceContext) -> None:
        self.config = config
        self.context = context

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        return sample_responses(engine, batch, self.config, self.config.n, self.context.seed)
