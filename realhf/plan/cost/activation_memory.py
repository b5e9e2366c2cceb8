"""Bytes of a micro-batch, counted from the sizes of a model: where nobody has measured them."""

from dataclasses import dataclass

from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import StageShard, Work
from realhf.plan.cost.stage import saved_activation_numel

LOGITS_BYTES = {"cpu": 24 << 20}
"""Logits that the log-prob head holds at once (ops/logprobs.py)."""
LOGITS_BYTES_ELSEWHERE = 256 << 20


@dataclass(frozen=True)
class AnalyticMemory:
    """The ``Footprint`` of models/ and engine/ as they are written."""

    device: str

    def train_bytes(self, part: StageShard, work: Work) -> tuple[float, float]:
        config, size = part.model, 2 if part.bf16 else 4
        block = saved_activation_numel(config, part.tp, part.sequence_parallel)
        outside = config.hidden * (2.0 * part.first + 3.0 * part.last)
        if part.recompute:
            kept = part.n_blocks * config.hidden / (part.tp if part.sequence_parallel else 1) + outside
            at_work = block + self._working(part)
        else:
            kept, at_work = part.n_blocks * block + outside, self._working(part)
        peak = (kept + at_work) * work.tokens * size + self._logits(part, work)
        return kept * work.tokens * size, peak

    def forward_bytes(self, part: StageShard, work: Work) -> float:
        size = 2 if part.bf16 else 4
        return self._working(part) * work.tokens * size + self._logits(part, work)

    def _working(self, part: StageShard) -> float:
        """Elements per token that live at a time inside a block, nothing being kept."""
        config = part.model
        heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        return 3 * config.hidden + max(1.5 * _width(config), 2 * heads) / part.tp

    def _logits(self, part: StageShard, work: Work) -> float:
        if not part.last or part.model.head != "lm":
            return 0.0
        return min(LOGITS_BYTES.get(self.device, LOGITS_BYTES_ELSEWHERE), 4.0 * work.tokens * part.model.vocab)


def _width(config: ModelConfig) -> int:
    inner = config.intermediate or config.expert_intermediate * config.experts_per_token
    return (2 if config.mlp == "gated" else 1) * inner
