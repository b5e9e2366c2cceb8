"""Kernels of a block that the host launches outside of a graph, by model family, as counted from the engine."""

import json
from functools import cache
from pathlib import Path

from realhf.api.model_config import ModelConfig

LAUNCHES_FILE = Path(__file__).with_name("launches.json")
LIKE = {"dense": "llama", "routed": "qwen3_moe"}  # families whose counts stand for those that were not counted
Launches = tuple[int, int, int]  # of an inference pass, a training pass and a decoding step


@cache
def counted_launches() -> dict[str, Launches]:
    """Return the counts by family: in bfloat16, without the fused kernels of csrc."""
    families = json.loads(LAUNCHES_FILE.read_text())["families"]
    return {family: (inference, training, decoding) for family, (inference, training, decoding) in families.items()}


def launches_of(model: ModelConfig) -> Launches:
    """Return the launches of a model's block."""
    counts = counted_launches()
    return counts.get(model.family, counts[LIKE["routed" if model.n_experts else "dense"]])
