"""The native engine: forward, train and generate on one shard, in plain torch, on CPU and CUDA."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from realhf.api.config import GenerationConfig, OptimizerType
from realhf.api.engine import Limits, LossFn
from realhf.api.experiment import RoleSpec
from realhf.api.messages import Stats
from realhf.api.model import ModelConfig
from realhf.api.params import Box
from realhf.api.plan import MicroBatching
from realhf.comm.parallel import ParallelContext
from realhf.data.batch import SequenceBatch
from realhf.engine.generate import generate
from realhf.engine.micro_batch import micro_batches
from realhf.engine.optimizer import ShardedAdamW, learning_rate
from realhf.engine.outputs import ForwardOutputs
from realhf.models.flat import FlatParams
from realhf.models.hf import init_random, load_hf, save_hf
from realhf.models.specs import param_specs, stage_layers
from realhf.models.transformer import Transformer
from realhf.plan.realloc import shard_of


@dataclass(frozen=True)
class NativeEngine:
    """One role's model on one worker. ``version`` counts the training steps of the weights it holds."""

    config: ModelConfig
    role: RoleSpec
    params: FlatParams
    model: Transformer
    context: ParallelContext
    stop_ids: tuple[int, ...]
    total_steps: int
    tokenizer_folder: Path | None = None
    optimizer: ShardedAdamW | None = None
    micro_batching: MicroBatching = MicroBatching()
    version: int = 0

    def forward(self, batch: SequenceBatch, fn: Callable[[ForwardOutputs, SequenceBatch], Tensor]) -> Tensor:
        rows: list[Tensor] = [torch.empty(0)] * len(batch)
        with torch.no_grad():
            for part in micro_batches(batch.ids, batch.lengths("tokens"), self.micro_batching):
                some = batch.select(part)
                packed = fn(self._outputs(some), some)
                lengths = some.lengths("tokens") if packed.numel() == sum(some.lengths("tokens")) else (1,) * len(some)
                for i, row in zip(part, packed.split(lengths), strict=True):
                    rows[i] = row
        return torch.cat(rows) if rows else torch.empty(0)

    def train(
        self, batch: SequenceBatch, loss_fn: LossFn, count: float, limits: Limits | None = None, together: bool = False
    ) -> Stats:
        if self.optimizer is None:
            raise ValueError("this engine holds no optimizer: its role is not trained in this layout")
        total = float(self.reduce(torch.tensor([count], dtype=torch.float64)))
        if total == 0:
            return {}
        self.params.zero_grad()
        stats: dict[str, tuple[float, float]] = {}
        for part in micro_batches(batch.ids, batch.lengths("tokens"), self.micro_batching, together):
            some = batch.select(part)
            loss = loss_fn(self._outputs(some), some)
            (loss.total / total).backward()
            for name, (value, weight) in loss.stats.items():
                before = stats.get(name, (0.0, 0.0))
                stats[name] = (before[0] + float(value), before[1] + float(weight))
        if self._exceeds(stats, limits or {}):
            return {**stats, "vetoed": (1.0, 1.0)}
        lr = learning_rate(self.role.spec.optimizer, self.version, self.total_steps)
        norm = self.optimizer.step(lr)
        return {**stats, "vetoed": (0.0, 1.0), "grad_norm": (norm, 1.0), "lr": (lr, 1.0)}

    def generate(self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int) -> SequenceBatch:
        stops = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
        with torch.no_grad():
            return generate(self.model, prompts, config, n, seed, stops, self.context.device)

    def reduce(self, sums: Tensor) -> Tensor:
        ours = sums.to(self.context.device, torch.float64, copy=True)  # where the group's backend can reach it
        return self.context.group("dp").all_reduce(ours).to(sums.device)

    def read(self, name: str, box: Box) -> Tensor:
        return self.params.read(name, box)

    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        self.params.write(name, box, tensor)

    def save(self, path: Path) -> None:
        if self.context.coord.dp == 0:
            save_hf(path, self.config, self.params.view, self.tokenizer_folder)

    def _outputs(self, batch: SequenceBatch) -> ForwardOutputs:
        return ForwardOutputs(self.model, self.model.hidden(batch["tokens"], batch.lengths("tokens")), batch)

    def _exceeds(self, stats: Stats, limits: Limits) -> bool:
        """Tell whether a global mean is above its limit; a rank without rows has no statistics and adds zeros."""
        if not limits:
            return False
        table = torch.tensor([stats.get(name, (0.0, 0.0)) for name in limits], dtype=torch.float64)
        means = [value / max(weight, 1.0) for value, weight in self.reduce(table).tolist()]
        return any(mean > limit for mean, limit in zip(means, limits.values(), strict=True))


def build_engine(
    config: ModelConfig,
    role: RoleSpec,
    context: ParallelContext,
    trained: bool,
    holds_weights: bool,
    seed: int,
    total_steps: int,
    stop_ids: tuple[int, ...],
    tokenizer_folder: Path | None,
) -> NativeEngine:
    """Build a role's engine on this worker. ``holds_weights`` is False for a layout that borrows them per call."""
    specs = param_specs(config)
    boxes = shard_of(specs, lambda pp: stage_layers(config, pp), context.layout, context.rank)
    mine = [s for s in specs if s.name in boxes]
    dtype = torch.bfloat16 if role.spec.bf16 else torch.float32
    params = FlatParams(mine, boxes, dtype, context.device, pad_to=context.layout.strategy.dp)
    if not holds_weights:
        params.free()
    elif role.spec.init_from_scratch:
        init_random(config, params, seed)
    else:
        fresh = frozenset({"head.weight"}) if role.spec.init_critic_from_actor else frozenset()
        load_hf(Path(role.spec.path or ""), config, params, seed, allow_missing=fresh)
    model = Transformer(config, params, checkpoint_activations=trained and role.spec.gradient_checkpointing)
    learns = trained and role.spec.optimizer.type is not OptimizerType.empty
    optimizer = ShardedAdamW(params, role.spec.optimizer, context.group("dp")) if learns else None
    return NativeEngine(config, role, params, model, context, stop_ids, total_steps, tokenizer_folder, optimizer)
