"""Analytic activation memory of a micro-batch, used without a profile."""

from dataclasses import dataclass

from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import StageShard, Work
from realhf.plan.cost.stage import saved_activation_numel

LOGITS_BYTES = {"cpu": 24 << 20}
"""Chunk of logits that the log-prob head materializes (ops/logprobs.py)."""
DEFAULT_LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class AnalyticMemory:
    """``Footprint`` derived from the tensors that models/ and engine/ allocate."""

    device: str

    def train_bytes(self, shard: StageShard, work: Work) -> tuple[float, float]:
        config, size = shard.model, shard.itemsize
        block = saved_activation_numel(config, shard.tp, shard.sequence_parallel)
        outside = config.hidden * (2.0 * shard.first + 3.0 * shard.last)
        if shard.recompute:
            kept = shard.n_blocks * config.hidden / (shard.tp if shard.sequence_parallel else 1) + outside
            temporary = block + self._temporary_numel(shard)
        else:
            kept, temporary = shard.n_blocks * block + outside, self._temporary_numel(shard)
        peak = (kept + temporary) * work.tokens * size + self._logits(shard, work)
        return kept * work.tokens * size, peak

    def forward_bytes(self, shard: StageShard, work: Work) -> float:
        return self._temporary_numel(shard) * work.tokens * shard.itemsize + self._logits(shard, work)

    def _temporary_numel(self, shard: StageShard) -> float:
        """Peak elements per token inside a block when no activations are saved."""
        config = shard.model
        heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        return 3 * config.hidden + max(1.5 * _width(config), 2 * heads) / shard.tp

    def _logits(self, shard: StageShard, work: Work) -> float:
        if not shard.last or shard.model.head != "lm":
            return 0.0
        return min(LOGITS_BYTES.get(self.device, DEFAULT_LOGITS_BYTES), 4.0 * work.tokens * shard.model.vocab)


def _width(config: ModelConfig) -> int:
    inner = config.intermediate or config.expert_intermediate * config.experts_per_token
    return (2 if config.mlp == "gated" else 1) * inner
