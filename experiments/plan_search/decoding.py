"""Which costs decide the time of a decoding step: what a step would save without each of them."""

from dataclasses import dataclass, replace
from math import inf

from experiments.plan_search.engines import StudyEngine
from realhf.api.layout import ParallelStrategy
from realhf.api.machine import Link
from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import StageShard
from realhf.plan.machines.roofline import Roofline


@dataclass(frozen=True)
class DecodingStep:
    """Seconds of one token for all rows of a replica, and the fractions that it would be shorter without a cost.

    ``cache`` is reading keys and values, ``all_reduces`` communication inside a stage, ``launches`` kernels that are
    launched by the host. Costs overlap, so the fractions do not add up to 1.
    """

    seconds: float
    cache: float
    all_reduces: float
    launches: float


def decoding_step(
    engine: StudyEngine, config: ModelConfig, strategy: ParallelStrategy, rows: int, context: int
) -> DecodingStep:
    """Return a step of ``rows`` rows in total, with ``context`` cached tokens each.

    With pipeline stages, as many groups of rows follow one another.
    """
    tp, stages = strategy.tp, strategy.pp
    group = max(1, -(-rows // (strategy.dp * stages)))
    shard = StageShard(config, tp, config.n_layers // stages, stages == 1, stages == 1, bf16=True)

    def seconds(some: StudyEngine, cached: int) -> float:
        speed = Roofline(some.hardware, some.traits)
        return stages * speed.decode(shard, group, cached, range(tp))

    def without(**constants: object) -> float:
        return 1 - seconds(replace(engine, hardware=replace(engine.hardware, **constants)), context) / whole

    whole = seconds(engine, context)
    return DecodingStep(whole, 1 - seconds(engine, 0) / whole, without(node=Link(inf), nvls_bandwidth=0.0),
                        without(launch=0.0))  # fmt: skip
