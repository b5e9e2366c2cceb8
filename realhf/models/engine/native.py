"""The native engine: forward, train and generate on one shard, in plain torch, on CPU and CUDA."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
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
from realhf.api.param_box import box_numel, box_shape
from realhf.arch.lora import base_specs, own_specs
from realhf.arch.param_specs import stage_layers
from realhf.base.seeds import stable_seed
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.expert_parallel import expert_region
from realhf.comm.process_groups import Group, ParallelContext
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import Limits, Loss, LossFn
from realhf.data.turns import TurnDriver
from realhf.models.engine.decode.generate import generate
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.decode.session import run_turns, session_options
from realhf.models.engine.frozen_base import FrozenBases
from realhf.models.engine.nonfinite import nonfinite_loss
from realhf.models.engine.optimizer import ShardedAdamW
from realhf.models.engine.packing import ForwardOutputs, Packing, filler, pack
from realhf.models.engine.pipeline_runner import Pipeline
from realhf.models.engine.zero_stages import gathered_params, layer_memory
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, load_hf, save_hf
from realhf.models.low_rank import Dropout, token_keys
from realhf.models.peft_folder import load_peft, merged_names, merged_parameter, save_peft
from realhf.models.token_head import FinalStates
from realhf.models.transformer import Transformer
from realhf.ops.attention import supports_shared_prefixes
from realhf.ops.moe import LOAD_RATIOS, load_ratios
from realhf.ops.rows import to_floats
from realhf.plan.compile.micro_batch import micro_batches
from realhf.plan.compile.realloc import BoxCopy, plan_realloc, route_copies, shard_boxes
from realhf.plan.learning_rate import learning_rate


@dataclass(frozen=True)
class NativeEngine:
    """One role's model on one worker. ``version`` is the number of training steps of its weights."""

    config: ModelConfig
    role: RoleSpec
    params: FlatParams
    model: Transformer
    pipeline: Pipeline
    context: ParallelContext
    stop_ids: tuple[int, ...]
    total_steps: int
    tokenizer_folder: Path | None = None
    base_name: str = ""
    optimizer: ShardedAdamW | None = None
    micro_batching: MicroBatching = MicroBatching()
    version: int = 0
    share_prompts: bool = True
    seed: int = 0

    @property
    def _shares_prefixes(self) -> bool:
        """Common prefixes of one prompt's rows are computed once, unless that makes attention slower."""
        config, window = self.config, max(map(self.config.sliding_window, range(self.config.n_layers)))
        kind = self.context.device, self.model.dtype, config.head_dim, config.attention_softcap, window
        has_whole_rows = not self.context.layout.strategy.context
        return self.share_prompts and has_whole_rows and supports_shared_prefixes(*kind)

    def forward(self, batch: SequenceBatch, fn: Callable[[ForwardOutputs, SequenceBatch], Tensor]) -> Tensor:
        parts = self._micro_batches(batch, at_least=self.pipeline.n_stages)
        batches = batch.split(parts)
        packings = self._with_fillers([pack(some, self._shares_prefixes) for some in batches])
        rows: list[Tensor] = [torch.empty(0)] * len(batch)

        def finish(number: int, states: FinalStates) -> None:
            if packings[number].is_filler:
                return
            some = batches[number]
            packed = fn(ForwardOutputs(self.model, states, some, packings[number]), some)
            lengths = some.lengths("tokens") if len(packed) == sum(some.lengths("tokens")) else (1,) * len(some)
            for i, row in zip(parts[number], packed.split(lengths), strict=True):
                rows[i] = row

        with torch.no_grad():
            self.pipeline.infer(packings, finish)
        return self._broadcast_from_last(torch.cat(rows) if rows else torch.empty(0))

    def _with_fillers(self, packings: list[Packing]) -> list[Packing]:
        """Append fillers where replicas must make as many passes, because layers have collectives among them."""
        group = self.context.group("dp" if self.model.memory is not None else "ep")
        if group.size == 1:
            return packings
        n = torch.tensor([len(packings)], device=self.context.device)
        missing = int(group.all_max(n)) - len(packings)
        return packings + [filler(self.context.device)] * missing

    def _broadcast_from_last(self, result: Tensor) -> Tensor:
        """Send the last stage's result to all stages, since interfaces run on every one."""
        if self.pipeline.n_stages == 1:
            return result
        shape = torch.tensor([len(result), result.numel()], device=self.context.device)
        n_rows, size = self.pipeline.from_last(shape).tolist()
        if not self.pipeline.is_last:
            result = torch.empty(size, device=self.context.device)
        result = self.pipeline.from_last(result.float())
        return result.view(n_rows, -1) if size > n_rows else result

    def train(
        self, batch: SequenceBatch, loss_fn: LossFn, count: float, limits: Limits | None = None, together: bool = False
    ) -> Stats:
        if self.optimizer is None:
            raise ValueError("this engine has no optimizer: its role is not trained in this layout")
        local_counts = torch.tensor([count, sum(batch.lengths("tokens"))], dtype=torch.float64)
        total, n_tokens = self.reduce(local_counts).tolist()
        if total == 0:
            return {}
        self.optimizer.zero_grad()
        at_least = 2 * self.pipeline.n_stages if self.pipeline.n_stages > 1 else 1
        multiple_of = self.pipeline.n_stages if len(self.model.chunks) > 1 else 1
        batches = batch.split(self._micro_batches(batch, at_least, together, multiple_of))
        packings = self._with_fillers([self._training_packing(some) for some in batches])
        losses: dict[int, Loss] = {}

        def loss_of(number: int, states: FinalStates) -> Tensor:
            if packings[number].is_filler:
                return states.all().sum() * 0.0
            loss = loss_fn(ForwardOutputs(self.model, states, batches[number], packings[number]), batches[number])
            losses[number] = _detached(loss)
            return loss.total / total

        reduction = self.optimizer.reduction
        context = nullcontext if reduction is None else reduction.last_backward
        self.pipeline.train(packings, loss_of, 1.0 / max(n_tokens, 1.0), context)
        if reduction is not None:
            reduction.backward_ended()
        if self.model.memory is not None:
            self.model.memory.finish()
        loads, router_stats = self._router_stats(float(sum(batch.lengths("tokens"))))
        stats = {**_sum_stats(losses, batches), **router_stats}
        if self._exceeds(stats, limits or {}):
            self.optimizer.discard()
            return {**stats, "step_skipped": (1.0, 1.0)}
        lr = learning_rate(self.role.spec.optimizer, self.version, self.total_steps)
        self.optimizer.balance_experts(loads, self.role.spec.router_bias_update_rate)
        norm = self.optimizer.step(lr)
        return {**stats, "step_skipped": (0.0, 1.0), "grad_norm": (norm, 1.0), "lr": (lr, 1.0)}

    def _training_packing(self, batch: SequenceBatch) -> Packing:
        """Pack a micro-batch. Rows must be complete for router losses, which are means over rows, and for dropout."""
        rate = self.config.lora.dropout if self.config.lora is not None else 0.0
        packing = pack(batch, self._shares_prefixes and not self.config.n_experts and not rate)
        if not rate:
            return packing
        seeds = [stable_seed(self.seed, "dropout", self.version, row.prompt, row.sample) for row in batch.ids]
        keys = token_keys(seeds, packing.lengths, packing.tokens.device)
        return replace(packing, dropout=Dropout(keys, rate))

    def _router_stats(self, weight: float) -> tuple[Mapping[int, Tensor], Stats]:
        """Return the tokens per expert of all replicas by routed layer, ``[E]``, and statistics.

        These are the router losses of this replica's tokens and the balance of experts, means over routed layers. They
        have the ``weight`` of this replica, its number of tokens.
        """
        if not self.config.n_experts:
            return {}, {}
        sums = self.model.pop_router_sums()
        for axis in ("tp", "pp") if self.model.divides_tokens else ("pp",):  # without it every rank has all tokens
            self.context.group(axis).all_reduce(sums)
        losses = sums[:, :2].mean(0)
        loads, ep = self.context.group("dp").all_reduce(sums[:, 2:].contiguous()), self.context.layout.strategy.ep
        balance, z, *ratios = torch.cat((losses, load_ratios(loads, ep))).tolist()  # one wait
        named = zip(LOAD_RATIOS[: 2 if ep > 1 else 1], ratios, strict=False)
        return dict(zip(self.config.routed_layers, loads, strict=True)), {
            "router_balance_loss": (balance, weight), "router_z_loss": (z, weight),
            **{name: (ratio * weight, weight) for name, ratio in named},
        }  # fmt: skip

    def _micro_batches(
        self, batch: SequenceBatch, at_least: int, together: bool = False, multiple_of: int = 1
    ) -> list[list[int]]:
        limits = replace(self.micro_batching, n_mbs=max(self.micro_batching.n_mbs, at_least))
        return micro_batches(batch.ids, batch.lengths("tokens"), limits, together, self._shares_prefixes, multiple_of)

    def generate(
        self, prompts: SequenceBatch, config: GenerationConfig, n: int, seed: int, record_experts: bool = False
    ) -> SequenceBatch:
        stops = tuple(dict.fromkeys((*self.stop_ids, *config.stop_token_ids)))
        config = replace(config, max_num_seqs=self.micro_batching.limit_num_seqs(config.max_num_seqs))
        limit = self.micro_batching.max_tokens_per_mb
        request = Request(prompts, config, n, seed, stops, limit, self.share_prompts and n > 1, record_experts)
        with torch.no_grad():
            return generate(self.pipeline, request)

    def sample_turns(
        self,
        make_driver: Callable[[], TurnDriver],
        config: GenerationConfig,
        seed: int,
        max_len: int,
        max_episodes: int,
    ) -> bytes:
        n_slots = self.micro_batching.limit_num_seqs(config.max_num_seqs)
        options = session_options(config, seed, self.stop_ids, max_len, max_episodes, n_slots)
        return run_turns(self.pipeline, options, make_driver)

    def reduce(self, sums: Tensor) -> Tensor:
        group = self.context.group("dp")
        if group.size == 1:
            return sums.to(torch.float64, copy=True)
        total = sums.to(self.context.device, torch.float64, copy=True)  # where the group's backend can reach it
        return group.all_reduce(total).to(sums.device)

    def save(self, path: Path) -> None:
        if not self.context.layout.has_first_copy(self.context.rank):
            return
        writer = self.context.layout.rank(Coord(0, 0, 0))
        if self.context.rank == writer:
            self._write(path, lambda name: self._gather_parameter(name, writer))
        else:
            for name in self._saved_names:
                self._gather_parameter(name, writer)

    @property
    def _saves_adapter(self) -> bool:
        return self.config.lora is not None and not self.role.spec.lora.merge_on_save

    @property
    def _saved_names(self) -> Iterator[str]:
        """The parameters that are saved, in the order in which they are gathered."""
        if self._saves_adapter:
            return (spec.name for spec in own_specs(self.config))
        return merged_names(self.config)

    def _write(self, path: Path, read: Callable[[str], Tensor]) -> None:
        if self._saves_adapter:
            save_peft(path, self.config, read, self.base_name, self.tokenizer_folder)
        elif self.config.lora is not None:
            save_hf(path, self.config, partial(merged_parameter, self.config, read), self.tokenizer_folder)
        else:
            save_hf(path, self.config, read, self.tokenizer_folder)

    def _gather_parameter(self, name: str, writer: int) -> Tensor:
        """Gather a whole parameter on the writer. Collective over the first replica of the weights."""
        specs = [spec for spec in (*own_specs(self.config), *base_specs(self.config)) if spec.name == name]
        params = self.params if name in {spec.name for spec in own_specs(self.config)} else self.model.base
        dtype, layout, strategy = params.data.dtype, self.context.layout, self.context.layout.strategy
        full = torch.empty(specs[0].shape if self.context.rank == writer else (0,), dtype=dtype)
        replica = tuple(rank for rank in layout.mesh.ranks if layout.has_first_copy(rank))
        first = replace(strategy, dp=strategy.expert_dp, tp=strategy.cuts.tp, zero3=False, context=False)
        source = layout if strategy.zero3 else Layout(DeviceMesh(replica), first)
        target = Layout(DeviceMesh((writer,)), ParallelStrategy())
        routes = plan_realloc(specs, partial(stage_layers, self.config), source, target)
        copies = [P2PCopy(c, c.src, c.dst, TensorSlice(dtype, box_numel(c.box))) for c in route_copies(routes)]

        def write(copy: BoxCopy, flat: Tensor) -> None:
            full[tuple(slice(*span) for span in copy.box)] = flat.view(box_shape(copy.box)).cpu()

        exchange(copies, self.context.rank, lambda c: params.read(c.name, c.box), write, self.context.device)
        return full

    def _exceeds(self, stats: Stats, limits: Limits) -> bool:
        """Return True if a global mean exceeds its limit. A rank without rows contributes zeros."""
        if not limits:
            return False
        table = torch.tensor([stats.get(name, (0.0, 0.0)) for name in limits], dtype=torch.float64)
        sums = self.pipeline.from_last(self.reduce(table).to(self.context.device))  # NCCL takes no host memory
        means = [value / max(weight, 1.0) for value, weight in sums.tolist()]
        return any(not mean <= limit for mean, limit in zip(means, limits.values(), strict=True))


def _detached(loss: Loss) -> Loss:
    detach = lambda x: x.detach() if isinstance(x, Tensor) else x
    return Loss(loss.total.detach(), {name: (detach(a), detach(b)) for name, (a, b) in loss.stats.items()})


def _sum_stats(losses: Mapping[int, Loss], batches: Sequence[SequenceBatch]) -> dict[str, tuple[float, float]]:
    """Return the sums of the statistics over micro-batches, read with one wait. ValueError for an infinite loss."""
    pairs = [(name, pair) for loss in losses.values() for name, pair in loss.stats.items()]
    numbers = to_floats([*(loss.total for loss in losses.values()), *(number for _, pair in pairs for number in pair)])
    for batch, total in zip(losses, numbers, strict=False):
        if not math.isfinite(total):
            raise nonfinite_loss(total, batches[batch])
    rest = iter(numbers[len(losses) :])
    stats: dict[str, tuple[float, float]] = {}
    for (name, _), value, weight in zip(pairs, rest, rest, strict=True):
        old_value, old_weight = stats.get(name, (0.0, 0.0))
        stats[name] = (old_value + value, old_weight + weight)
    return stats


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
    shared_name: str = "",
    bases: FrozenBases | None = None,
    base_name: str = "",
) -> NativeEngine:
    """Build a role's engine on this worker. ``holds_weights`` is False for a layout that receives them per call.

    With ``shared_name`` the weights are in shared host memory, which other processes can map. ``bases`` has the frozen
    weights of LoRA, which every layout holds; saved adapters name their model ``base_name``.
    """
    dtype = own_dtype(role)
    has_optimizer = trained and role.spec.optimizer.type is not OptimizerType.none
    strategy = context.layout.strategy
    replicas = 1 if strategy.zero3 else len(context.layout.axis("replicas", context.rank))
    optimizer_type, pad_to = _optimizer(role, replicas) if has_optimizer else (None, replicas)
    params = empty_shard(config, context.layout, context.rank, dtype, context.device, pad_to, shared_name)
    base = None
    if config.lora is not None:
        where = context.layout, context.rank, model_dtype(role), context.device
        base = (bases or FrozenBases()).get(config, role, *where, seed)
    if not holds_weights:
        params.free()
    elif role.spec.lora.init_from:
        load_peft(Path(role.spec.lora.init_from), config, params)
    elif role.spec.init_from_scratch or config.head == "lm" and config.lora is not None:
        init_random(config, params, seed)
    else:
        new = frozenset({"head.weight"}) if role.spec.init_critic_from_actor else frozenset()
        load_hf(Path(role.spec.path or ""), config, params, seed, allow_missing=new)
    recompute = role.spec.recompute if trained else None
    tp_overlap = context.device.type == "cuda" if role.spec.tp_overlap is None else role.spec.tp_overlap
    used = gathered_params(config, params, context) if strategy.zero3 else params
    group, single = context.group("tp"), Group((context.rank,), context.rank)
    tp, cp = (single, group) if strategy.context else (group, single)
    model = Transformer(config, used, recompute, tp, trained and role.spec.sequence_parallel, base,
                        tp_overlap, expert_region(config.n_experts, context), cp)  # fmt: skip
    pipeline, sequence = Pipeline(model, context), model.sequence_parallel
    overlap = role.spec.overlap_grad_reduce
    overlap = context.device.type == "cuda" if overlap is None else overlap
    options, stage = role.spec.optimizer, role.zero_stage(strategy)
    adamw = optimizer_type(params, options, context, sequence, overlap, stage) if optimizer_type else None
    if adamw is not None and adamw.reduction is not None:
        model.on_backward = adamw.reduction.backward_reached
    owned = adamw.owned if adamw is not None else None
    if strategy.zero3 or owned is not None:
        model.memory = layer_memory(model, params, context, owned, adamw is not None)
        model.on_backward = model.memory.backward_reached
    return NativeEngine(config, role, params, model, pipeline, context, stop_ids, total_steps, tokenizer_folder,
                        base_name, adamw, seed=seed)  # fmt: skip


def model_dtype(role: RoleSpec) -> torch.dtype:
    """Return the type of a role's weights and activations."""
    return torch.bfloat16 if role.spec.bf16 else torch.float32


def own_dtype(role: RoleSpec) -> torch.dtype:
    """Return the type of the parameters that a role owns. Adapters are float32: small updates do not round away."""
    return torch.float32 if role.spec.lora.rank else model_dtype(role)


def empty_shard(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
    pad_to: int = 1,
    shared_name: str = "",
) -> FlatParams:
    """Return the parameters that a role owns in a rank's shard, all zero; on device ``meta`` without memory."""
    specs = own_specs(config)
    boxes = shard_boxes(specs, partial(stage_layers, config), layout, rank)
    return FlatParams(specs, boxes, dtype, device, pad_to, shared_name, layout.strategy.expert_dp > 1)


def _optimizer(role: RoleSpec, dp: int) -> tuple[type[ShardedAdamW], int]:
    """Return the optimizer of a role, and the number that must divide the length of its parameters."""
    if role.spec.backend is not Backend.megatron:
        return ShardedAdamW, dp
    from realhf.models.engine.megatron import MegatronAdamW, padding

    return MegatronAdamW, padding(dp)
