"""Amounts of work, shards of models, and what they need on a machine: ``Speed`` (seconds) and ``Footprint`` (bytes)."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple, Protocol

from realhf.api.config.choices import Recompute
from realhf.api.experiment import RoleSpec
from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import ParamSpec, box_numel, largest_box
from realhf.arch.decode_kernel import fuses_attention, fuses_some
from realhf.arch.lora import own_specs
from realhf.arch.param_specs import chunk_layers, stage_layers
from realhf.arch.quantization import base_nbytes


class CollectiveKind(Enum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


class Work(NamedTuple):
    """Size of a micro-batch: rows, distinct row lengths, tokens, and (query, visible key) pairs.

    ``predicted`` counts the tokens whose log-probabilities are read (None: all): the vocabulary head skips others.
    A prompt shared by several rows counts once, as a row of its own.
    """

    rows: int
    runs: int
    tokens: int
    pairs: int
    predicted: int | None = None

    @property
    def head_tokens(self) -> int:
        return self.tokens if self.predicted is None else self.predicted

    def divided(self, n: int) -> "Work":
        """Return the work of one of ``n`` ranks that divide the tokens, with an equal share of the visible keys."""
        predicted = None if self.predicted is None else -(-self.predicted // n)
        return Work(self.rows, self.runs, -(-self.tokens // n), -(-self.pairs // n), predicted)

    @staticmethod
    def of(lengths: Sequence[int], predicted: int | None = None, before: Sequence[int] = ()) -> "Work":
        """Return the work of rows; row ``i`` also attends to ``before[i]`` tokens of a shared prompt (default: 0)."""
        pairs = sum([n * (n + 1) // 2 for n in lengths])
        if before:
            pairs += sum(n * b for n, b in zip(lengths, before, strict=True))
        return Work(len(lengths), len(set(lengths)), sum(lengths), pairs, predicted)


@dataclass(frozen=True)
class Traffic:
    """Load of an exchange on its busiest worker, in bytes.

    ``node`` and ``cluster``: the larger of bytes sent and bytes received over such links. ``copied``: all bytes through
    the worker's memory (sent, received, local copies); ``local`` counts only the local copies. ``n_parts`` is the
    number of tensor slices, ``total`` the sum of ``copied`` over all workers.
    """

    local: int = 0
    node: int = 0
    cluster: int = 0
    n_parts: int = 0
    copied: int = 0
    total: int = 0


@dataclass(frozen=True)
class StageShard:
    """One worker's share of a model: ``n_blocks`` transformer blocks, each split ``tp`` ways, and perhaps an end."""

    model: ModelConfig
    tp: int
    n_blocks: int
    first: bool
    last: bool
    bf16: bool
    recompute: Recompute | None = None  # gradient checkpointing
    sequence_parallel: bool = False  # training: outside tensor-parallel layers each rank has its share of the tokens
    tp_overlap: bool = False  # training: collectives run during products of weight gradients
    ep: int = 1  # ranks over which the routed experts of a block are divided

    @property
    def n_expert_blocks(self) -> float:
        return self.n_blocks * routed_share(self.model)

    @property
    def itemsize(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def input_shards(self) -> int:
        """Number of ranks among which the saved inputs of column-parallel layers are divided."""
        return self.tp if self.sequence_parallel and self.tp_overlap else 1

    @property
    def kv_numel(self) -> int:
        """Key/value cache elements per token on this worker; of a stage with the model's mix of blocks."""
        n_blocks = -(-self.n_blocks * len(self.model.attention_layers) // self.model.n_layers)
        if self.model.latent:
            return n_blocks * self.model.cache_numel
        return 2 * n_blocks * max(1, self.model.n_kv_heads // self.tp) * self.model.head_dim

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row on this worker that do not depend on its length: states and last inputs of convolutions."""
        if self.model.delta is None:
            return 0
        n_blocks = -(-self.n_blocks * len(self.model.delta_layers) // self.model.n_layers)
        return n_blocks * self.model.delta.slot_bytes(self.itemsize) // self.tp

    @property
    def shares_prompts(self) -> bool:
        """True if the CPU kernel of decoding can read the cache of a prompt once for all its rows."""
        has_windows, has_states = any(self.model.sliding_windows), bool(self.model.delta_layers)
        return fuses_attention(self.model, self.tp) and not (self._is_quantized or has_windows or has_states)

    @property
    def packs_weights(self) -> bool:
        """True if decoding by the CPU kernel needs copies of the weights."""
        return not self._is_quantized and fuses_some(self.model, self.tp)

    @property
    def _is_quantized(self) -> bool:
        return self.model.lora is not None and self.model.lora.bits > 0


Stages = Sequence[tuple[StageShard, tuple[int, ...]]]  # shard and tensor-parallel group of each stage


def stage_shards(config: ModelConfig, role: RoleSpec, strategy: ParallelStrategy) -> tuple[StageShard, ...]:
    """Return what a worker of each stage has of a model."""
    return _shards(config, role, strategy, stage_layers(config, strategy.pp, strategy.vpp))


def chunk_shards(config: ModelConfig, role: RoleSpec, strategy: ParallelStrategy) -> tuple[StageShard, ...]:
    """Return what a worker has of each chunk of layers; chunk c is on stage c modulo the number of stages."""
    return _shards(config, role, strategy, chunk_layers(config, strategy.pp * strategy.vpp))


def _shards(
    config: ModelConfig, role: RoleSpec, strategy: ParallelStrategy, parts: Sequence[Collection[int]]
) -> tuple[StageShard, ...]:
    spec, last, tp = role.spec, config.n_layers + 1, strategy.weight_tp
    return tuple(
        StageShard(config, tp, n_blocks=len(layers) - (0 in layers) - (last in layers), first=0 in layers,
                   last=last in layers, bf16=bool(spec.bf16), recompute=spec.recompute,
                   sequence_parallel=spec.sequence_parallel and tp > 1,
                   tp_overlap=spec.tp_overlap is True and tp > 1 and config.lora is None, ep=strategy.ep)
        for layers in parts
    )  # fmt: skip


def itemsize(role: RoleSpec) -> int:
    """Return the bytes of a parameter that a role owns; adapters are float32."""
    return 2 if role.spec.bf16 and not role.spec.lora.rank else 4


def model_itemsize(role: RoleSpec) -> int:
    """Return the bytes of a weight of the model, adapted or not."""
    return 2 if role.spec.bf16 else 4


def optimizer_bytes(role: RoleSpec) -> int:
    """Return the bytes of optimizer state per parameter: two moments, and float32 master weights of bfloat16 ones."""
    return 12 if itemsize(role) == 2 else 8


def shard_numels(config: ModelConfig, strategy: ParallelStrategy) -> tuple[int, ...]:
    """Return, per stage, the parameters that a role owns; those of the largest shard.

    With LoRA these are the adapters.
    """
    return _numels(config, False, strategy.weight_tp, strategy.pp, strategy.ep, strategy.vpp)


def expert_numels(config: ModelConfig, strategy: ParallelStrategy) -> tuple[int, ...]:
    """Return, per stage, those of ``shard_numels`` that fewer replicas hold than the others: divided experts."""
    if strategy.expert_dp == 1:
        return (0,) * strategy.pp
    return _numels(config, True, strategy.weight_tp, strategy.pp, strategy.ep, strategy.vpp)


def updated_numels(config: ModelConfig, strategy: ParallelStrategy) -> tuple[float, ...]:
    """Return, per stage, the parameters that a worker updates: equal ranges of what its replicas hold."""
    both = zip(shard_numels(config, strategy), expert_numels(config, strategy), strict=True)
    return tuple((total - experts + experts * strategy.expert_dp) / strategy.weight_dp for total, experts in both)


def base_bytes(config: ModelConfig, strategy: ParallelStrategy, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of the frozen weights per stage below LoRA adapters; zeros without adapters."""
    return _base_bytes(config, itemsize, strategy.weight_tp, strategy.pp, strategy.ep, strategy.vpp)


@lru_cache(maxsize=4096)
def _base_bytes(config: ModelConfig, itemsize: int, tp: int, pp: int, ep: int, vpp: int) -> tuple[int, ...]:
    return tuple(base_nbytes(config, tp, layers, itemsize, ep) for layers in stage_layers(config, pp, vpp))


@lru_cache(maxsize=4096)
def _numels(config: ModelConfig, only_experts: bool, tp: int, pp: int, ep: int, vpp: int) -> tuple[int, ...]:
    specs = [spec for spec in own_specs(config) if spec.is_expert or not only_experts]
    return stage_numels(specs, tp, stage_layers(config, pp, vpp), ep)


def stage_numels(specs: Sequence[ParamSpec], tp: int, stages: Sequence[Container[int]], ep: int = 1) -> tuple[int, ...]:
    """Return the parameters of each stage, whose layers are given, in its largest shard."""
    totals = [0] * len(stages)
    for spec in specs:
        numel = box_numel(largest_box(spec, tp, ep))
        for stage, layers in enumerate(stages):
            totals[stage] += numel * spec.is_in(layers)
    return tuple(totals)


def routed_share(config: ModelConfig) -> float:
    """Return the fraction of a model's blocks that have routed experts."""
    return len(config.routed_layers) / config.n_layers


def mlp_width(config: ModelConfig) -> float:
    """Return the mean MLP width that a token passes through."""
    routed = routed_share(config)
    of_experts = config.experts_per_token * config.expert_intermediate + config.shared_intermediate
    return (1 - routed) * config.intermediate + routed * of_experts


def touched_experts(config: ModelConfig, tokens: int) -> float:
    """Return the mean number of experts that at least one of ``tokens`` tokens is routed to."""
    share = 1 - (1 - config.experts_per_token / config.n_experts) ** tokens
    return share * config.n_experts


class Speed(Protocol):
    """Seconds on a worker that has its core or device to itself. ``ranks`` of a shard are its tensor-parallel group."""

    def forward(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> float:
        """Seconds of a micro-batch without autograd, tensor-parallel collectives included."""

    def train(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        """Seconds of a forward pass that saves activations, and of the backward pass (recomputation included)."""

    def decode(self, shard: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        """Seconds of one new token for each of ``rows`` rows with ``context`` cached tokens each, with sampling."""

    def optimizer(self, shard: StageShard, numel: int) -> float:
        """Seconds of an update of ``numel`` parameters."""

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective over ``ranks`` on a buffer whose full size is ``nbytes``."""

    def send(self, nbytes: float, src: int, dst: int) -> float: ...

    def exchange(self, traffic: Traffic) -> float:
        """Seconds of moving rows or parameter boxes."""

    def host_copy(self, nbytes: float) -> float:
        """Seconds to copy a worker's weights to host memory or back."""

    def interface(self, name: str, rows: int, tokens: int) -> float:
        """Seconds of an algorithm outside the model on one worker's rows (a verifier, advantages)."""

    @property
    def call(self) -> float:
        """Seconds from the master to a worker and back."""

    @property
    def jitter(self) -> float:
        """Relative standard deviation of the time of equal work, on one worker after another."""


def slowest_of(n: int, jitter: float) -> float:
    """Return the expected longest of ``n`` normally distributed times of mean 1 and standard deviation ``jitter``.

    Blom 1958, Statistical Estimates and Transformed Beta-Variables.
    """
    return 1.0 + jitter * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


class Footprint(Protocol):
    """Bytes that a micro-batch takes on one worker beyond weights, gradients and optimizer state."""

    def train_bytes(self, shard: StageShard, work: Work) -> tuple[float, float]:
        """Bytes saved for the backward pass, and the peak, which includes them."""

    def forward_bytes(self, shard: StageShard, work: Work) -> float:
        """Peak bytes without autograd."""
