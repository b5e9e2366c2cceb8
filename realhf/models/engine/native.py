"""The native engine: forward, train and generate on one shard, in plain torch, on CPU and CUDA."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from realhf.api.config import GenerationConfig, OptimizerType
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import MicroBatching
from realhf.api.experiment import RoleSpec
from realhf.api.layout import Coord, DeviceMesh, Layout, ParallelStrategy
from realhf.api.messages import Stats
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, box_numel, box_shape
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.process_groups import ParallelContext
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Limits, LossFn
from realhf.models.engine.decode.generate import generate
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.optimizer import ShardedAdamW, learning_rate
from realhf.models.engine.outputs import ForwardOutputs
from realhf.models.engine.packing import pack
from realhf.models.engine.pipeline_runner import Pipeline
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, load_hf, save_hf
from realhf.models.transformer import Transformer
from realhf.ops.attention import supports_shared_prefixes
from realhf.plan.compile.micro_batch import micro_batches
from realhf.plan.compile.realloc import BoxCopy, plan_realloc, route_copies, shard_boxes


@dataclass(frozen=True)
class NativeEngine:
    """One role's model on one worker. ``version`` counts the training steps of the weights it holds."""

    config: ModelConfig
    role: RoleSpec
    params: FlatParams
    model: Transformer
    pipeline: Pipeline
    context: ParallelContext
    stop_ids: tuple[int, ...]
    total_steps: int
    tokenizer_folder: Path | None = None
    optimizer: ShardedAdamW | None = None
    micro_batching: MicroBatching = MicroBatching()
    version: int = 0
    share_prompts: bool = True

    @property
    def _shares(self) -> bool:
        """Tell whether what rows of one prompt begin with is computed once: not where attention would be slower so."""
        softcap = self.config.attention_softcap
        return self.share_prompts and supports_shared_prefixes(self.context.device, self.params.data.dtype, softcap)

    def forward(self, batch: SequenceBatch, fn: Callable[[ForwardOutputs, SequenceBatch], Tensor]) -> Tensor:
        parts = self._micro_batches(batch, at_least=self.pipeline.n_stages)
        batches = batch.split(parts)
        packings = [pack(some, self._shares) for some in batches]
        rows: list[Tensor] = [torch.empty(0)] * len(batch)

        def finish(number: int, hidden: Tensor) -> None:
            some = batches[number]
            packed = fn(ForwardOutputs(self.model, hidden, some, packings[number]), some)
            lengths = some.lengths("tokens") if packed.numel() == sum(some.lengths("tokens")) else (1,) * len(some)
            for i, row in zip(parts[number], packed.split(lengths), strict=True):
                rows[i] = row

        with torch.no_grad():
            self.pipeline.infer(packings, finish)
        return self._to_all_stages(torch.cat(rows) if rows else torch.empty(0))

    def _to_all_stages(self, result: Tensor) -> Tensor:
        """Give every stage what the last one made: interfaces run on all of them."""
        if self.pipeline.n_stages == 1:
            return result
        size = self.pipeline.from_last(torch.tensor([result.numel()], device=self.context.device))
        if not self.pipeline.is_last:
            result = torch.empty(int(size), device=self.context.device)
        return self.pipeline.from_last(result.float())

    def train(
        self, batch: SequenceBatch, loss_fn: LossFn, count: float, limits: Limits | None = None, together: bool = False
    ) -> Stats:
        if self.optimizer is None:
            raise ValueError("this engine holds no optimizer: its role is not trained in this layout")
        ours = torch.tensor([count, sum(batch.lengths("tokens"))], dtype=torch.float64)
        total, n_tokens = self.reduce(ours).tolist()
        if total == 0:
            return {}
        self.params.zero_grad()
        at_least = 2 * self.pipeline.n_stages if self.pipeline.n_stages > 1 else 1
        batches = batch.split(self._micro_batches(batch, at_least, together))
        # the losses of routers are means over rows, of which each has all of its tokens
        packings = [pack(some, self._shares and not self.config.n_experts) for some in batches]
        stats: dict[str, tuple[float, float]] = {}

        def loss_of(number: int, hidden: Tensor) -> Tensor:
            loss = loss_fn(ForwardOutputs(self.model, hidden, batches[number], packings[number]), batches[number])
            for name, (value, weight) in loss.stats.items():
                before = stats.get(name, (0.0, 0.0))
                stats[name] = (before[0] + float(value), before[1] + float(weight))
            return loss.total / total

        self.pipeline.train(packings, loss_of, token_weight=1.0 / max(n_tokens, 1.0))
        stats |= self._router_stats(sum(batch.lengths("tokens")))
        if self._exceeds(stats, limits or {}):
            return {**stats, "step_skipped": (1.0, 1.0)}
        lr = learning_rate(self.role.spec.optimizer, self.version, self.total_steps)
        norm = self.optimizer.step(lr)
        return {**stats, "step_skipped": (0.0, 1.0), "grad_norm": (norm, 1.0), "lr": (lr, 1.0)}

    def _router_stats(self, n_tokens: int) -> Stats:
        """Return the losses of routers, as sums over the tokens of this replica of their mean over routed layers."""
        if not self.config.n_experts:
            return {}
        lost = self.model.take_router_losses()
        for axis in ("tp", "pp") if self.model.sequence_parallel else ("pp",):  # without it every rank has all tokens
            self.context.group(axis).all_reduce(lost)
        balance, z = (lost / len(self.config.routed_layers)).tolist()
        return {"router_balance_loss": (balance, float(n_tokens)), "router_z_loss": (z, float(n_tokens))}

    def _micro_batches(self, batch: SequenceBatch, at_least: int, together: bool = False) -> list[list[int]]:
        limits = replace(self.micro_batching, n_mbs=max(self.micro_batching.n_mbs, at_least))
        return micro_batches(batch.ids, batch.lengths("tokens"), limits, together, prefer_prompts_together=self._shares)

    def generate(self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int) -> SequenceBatch:
        stops = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
        config = replace(config, max_num_seqs=self.micro_batching.limit_num_seqs(config.max_num_seqs))
        limit = self.micro_batching.max_tokens_per_mb
        request = Request(prompts, config, n, seed, stops, limit, share=self.share_prompts and n > 1)
        with torch.no_grad():
            return generate(self.pipeline, request)

    def reduce(self, sums: Tensor) -> Tensor:
        ours = sums.to(self.context.device, torch.float64, copy=True)  # where the group's backend can reach it
        return self.context.group("dp").all_reduce(ours).to(sums.device)

    def read(self, name: str, box: Box) -> Tensor:
        return self.params.read(name, box)

    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        self.params.write(name, box, tensor)

    def save(self, path: Path) -> None:
        layout = self.context.layout
        if self.context.coord.dp != 0:
            return
        writer = layout.rank(Coord(0, 0, 0))
        if self.context.rank == writer:
            save_hf(path, self.config, lambda name: self._assemble(name, writer), self.tokenizer_folder)
        else:
            for spec in param_specs(self.config):
                self._assemble(spec.name, writer)

    def _assemble(self, name: str, writer: int) -> Tensor:
        """Bring the pieces of a parameter to the writer, which gets it whole. Collective over the first replica."""
        specs = [spec for spec in param_specs(self.config) if spec.name == name]
        whole_one = torch.empty(specs[0].shape if self.context.rank == writer else (0,), dtype=self.params.data.dtype)
        target = Layout(DeviceMesh((writer,)), ParallelStrategy())
        replica = [rank for rank in self.context.layout.mesh.ranks if self.context.layout.coord(rank).dp == 0]
        strategy = self.context.layout.strategy
        source = Layout(DeviceMesh(tuple(replica)), ParallelStrategy(1, strategy.tp, strategy.pp))
        routes = plan_realloc(specs, lambda pp: stage_layers(self.config, pp), source, target)
        moves = [
            P2PCopy(c, c.src, c.dst, TensorSlice(self.params.data.dtype, box_numel(c.box)))
            for c in route_copies(routes)
        ]

        def read(copy: object) -> Tensor:
            assert isinstance(copy, BoxCopy)
            return self.params.read(copy.name, copy.box)

        def write(copy: object, flat: Tensor) -> None:
            assert isinstance(copy, BoxCopy)
            whole_one[tuple(slice(*span) for span in copy.box)] = flat.view(box_shape(copy.box)).cpu()

        exchange(moves, self.context.rank, read, write, self.context.device)
        return whole_one

    def _exceeds(self, stats: Stats, limits: Limits) -> bool:
        """Tell whether a global mean is above its limit; a rank without rows has no statistics and adds zeros."""
        if not limits:
            return False
        table = torch.tensor([stats.get(name, (0.0, 0.0)) for name in limits], dtype=torch.float64)
        sums = self.pipeline.from_last(self.reduce(table))
        means = [value / max(weight, 1.0) for value, weight in sums.tolist()]
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
    share_as: str = "",
) -> NativeEngine:
    """Build a role's engine on this worker. ``holds_weights`` is False for a layout that borrows them per call.

    With ``share_as`` another process can map the weights, which then lie on the host.
    """
    specs = param_specs(config)
    boxes = shard_boxes(specs, lambda pp: stage_layers(config, pp), context.layout, context.rank)
    mine = [s for s in specs if s.name in boxes]
    dtype = torch.bfloat16 if role.spec.bf16 else torch.float32
    learns = trained and role.spec.optimizer.type is not OptimizerType.none
    kind, pad_to = _optimizer(role, context.layout.strategy.dp) if learns else (None, context.layout.strategy.dp)
    params = FlatParams(mine, boxes, dtype, context.device, pad_to, share_as)
    if not holds_weights:
        params.free()
    elif role.spec.init_from_scratch:
        init_random(config, params, seed)
    else:
        fresh = frozenset({"head.weight"}) if role.spec.init_critic_from_actor else frozenset()
        load_hf(Path(role.spec.path or ""), config, params, seed, allow_missing=fresh)
    recompute = trained and role.spec.gradient_checkpointing
    model = Transformer(config, params, recompute, context.group("tp"), trained and role.spec.sequence_parallel)
    pipeline = Pipeline(model, context)
    optimizer = kind(params, role.spec.optimizer, context, model.sequence_parallel) if kind else None
    return NativeEngine(
        config, role, params, model, pipeline, context, stop_ids, total_steps, tokenizer_folder, optimizer
    )


def _optimizer(role: RoleSpec, dp: int) -> tuple[type[ShardedAdamW], int]:
    """Return who steps a role's weights, and what their length must be a multiple of."""
    if role.spec.backend is not Backend.megatron:
        return ShardedAdamW, dp
    from realhf.models.engine.megatron import MegatronAdamW, padding

    return MegatronAdamW, padding(dp)
