"""The engines of the study: ours, one of the time of ReaL (2024), and the latter with one of our traits at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realhf.api.execution_plan import Placement
from realhf.api.machine import Hardware, Link
from realhf.plan.cost.cost import BatchRows
from realhf.plan.cost.memory import Bytes, MemoryModel
from realhf.plan.cost.speed import StageShard
from realhf.plan.machines.engine_traits import OWN, EngineTraits
from realhf.plan.machines.hardware import read_hardware

H100 = read_hardware("h100")
SLOW_LINKS = replace(H100, node=Link(170e9, H100.node.latency), cluster=Link(20e9, H100.cluster.latency),
                     nvls_bandwidth=0.0)  # fmt: skip
"""Bandwidths that ReaL's estimator assumes (search_engine/estimate.py), and no reduction in NVLink switches."""
EAGER = EngineTraits(hidden_elements=18.0, head_elements=4.0, mlp_elements=5.0, head_passes=1, decode_kernels=29,
                     captures_decoding=False, has_grouped_kv=False, launches=(42, 111, 29))  # fmt: skip
"""README.md has the reason of each value."""


@dataclass(frozen=True)
class StudyEngine:
    """An engine on a cluster; ``label`` is that of tables."""

    label: str
    traits: EngineTraits
    hardware: Hardware


OURS = StudyEngine("ours", OWN, H100)
OF_2024 = StudyEngine("of 2024", EAGER, SLOW_LINKS)
ENGINES = {"ours": OURS, "2024": OF_2024}
VARIANTS = {
    "2024, graphs": replace(OF_2024, label="of 2024, with CUDA graphs", traits=replace(EAGER, captures_decoding=True)),
    "2024, grouped": replace(
        OF_2024, label="of 2024, with shared KV heads", traits=replace(EAGER, has_grouped_kv=True)
    ),
    "2024, fused": replace(
        OF_2024,
        label="of 2024, with our kernels",
        traits=replace(OWN, captures_decoding=False, has_grouped_kv=False, decode_kernels=EAGER.decode_kernels),
    ),
    "2024, links": replace(OF_2024, label="of 2024, with our links", hardware=H100),
}
"""Each has one trait of our engine."""


class RepeatedCacheMemory(MemoryModel):
    """Memory of an engine that stores keys and values once per query head."""

    def _generation(
        self, placement: Placement, ranks: Sequence[BatchRows], shards: Sequence[StageShard], n: int
    ) -> Bytes:
        needed, config = super()._generation(placement, ranks, shards, n), shards[0].model
        return replace(needed, kv_cache=needed.kv_cache * config.n_heads / config.n_kv_heads)


def memory_model(traits: EngineTraits) -> type[MemoryModel]:
    return MemoryModel if traits.has_grouped_kv else RepeatedCacheMemory
