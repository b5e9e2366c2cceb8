"""A mock group records and charges the collectives of a shard."""

import torch

from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import CollectiveKind
from realhf.system.profiler.model_probes import ProbeContext, pass_probes
from realhf.system.profiler.probes import Clock
from realhf.system.profiler.tp_probes import MockGroup, free, recorded_collectives

MODEL = ModelConfig("llama", 2, 32, 4, 2, 8, 64, 64, 100)
BYTES = 4 * 32
"""Activation of one token."""


def mock_group() -> MockGroup:
    return MockGroup(2, Clock(torch.device("cpu"), 1, 1), free)


def test_mock_collectives_keep_shapes_and_charge_their_price() -> None:
    group, calls = mock_group(), list[tuple[CollectiveKind, float]]()

    def price(kind: CollectiveKind, nbytes: float) -> float:
        calls.append((kind, nbytes))
        return 100.0

    group.price = price
    whole, part = torch.zeros(4, 3), torch.ones(2, 3)
    assert (
        300
        <= group.clock.time(
            lambda: (group.all_reduce(part), group.all_gather(whole, part), group.reduce_scatter(part, 2 * whole))
        )
        < 301
    )
    assert whole.sum() == 12 and part.sum() == 12
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    assert calls == list(zip(kinds, (24.0, 48.0, 48.0), strict=True))


def test_collectives_of_passes_are_recorded() -> None:
    group = mock_group()
    bench = ProbeContext.of(group, group.clock, bf16=False)
    infer, train = pass_probes(bench, bench.engine(MODEL), [8, 8], half=False)
    # embedding, attention and MLP of two blocks; largest logit, and two sums of each predicted token
    (forward,) = recorded_collectives(infer, group)
    assert forward == {"all_reduce message": 7, "all_reduce byte": 5 * 16 * BYTES + 3 * 14 * 4}
    # sequence parallelism: reduce-scatter after and all-gather before each product
    forward, backward = recorded_collectives(train, group)
    collectives = {"all_gather message": 5, "all_gather byte": 5 * 16 * BYTES}
    collectives |= {"reduce_scatter message": 5, "reduce_scatter byte": 5 * 16 * BYTES}
    assert (
        forward == {"all_reduce message": 2, "all_reduce byte": 3 * 14 * 4, **collectives} and backward == collectives
    )
    assert group.price(CollectiveKind.ALL_REDUCE, 8.0) == 0.0
