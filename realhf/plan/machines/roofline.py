"""Roofline times: the maximum of arithmetic and memory traffic, plus kernel launches. Analytic activation memory."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from realhf.api.config.choices import Recompute
from realhf.api.machine import GROUPED_CAPABILITIES, Hardware
from realhf.api.model_config import ModelConfig
from realhf.plan.cost.overlap import exposed_tp_backward
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work, mlp_width, routed_share
from realhf.plan.machines.collectives import collective_seconds
from realhf.plan.machines.delta_rule import (
    FLOAT32,
    STATE_PASSES,
    delta_share,
    has_rule_kernel,
    rule_flops,
    rule_numel,
    saved_rule_numel,
)
from realhf.plan.machines.engine_traits import OWN, OWN_MEMORY, EngineTraits, MemoryTraits
from realhf.plan.machines.launches import launches_of
from realhf.plan.machines.products import Product, backward_products, block_products, column_parallel, product_seconds

KERNELS_PER_BLOCK = 16  # forward pass: norms, projections, rotary embedding, attention, activation, residual additions
KERNELS_PER_END = 8
ATTENTION_BACKWARD = 2.5  # times the operations of the forward pass: five products for two (arXiv 2307.08691, 3.1)
ATTENTION_TILE = 128  # rows and columns of scores that attention computes together, also where the mask hides some
OPTIMIZER_BYTES = 28  # per parameter: float32 gradient, master weight and two moments read, the last three written
LOGITS_BYTES = {"cpu": 24 << 20}  # a tile of logits, and those kept for the backward pass (ops/logprobs.py)
DEFAULT_LOGITS_BYTES = 256 << 20


class Pass(NamedTuple):
    """Seconds of a block in a forward pass or a backward pass, without communication."""

    products: float
    attention: float
    elementwise: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.elementwise


@dataclass(frozen=True)
class Roofline:
    """``Speed`` without a profile: matrix products count by operations, everything else by its memory traffic."""

    hardware: Hardware
    traits: EngineTraits = OWN
    _products: dict[Hashable, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def call(self) -> float:
        return self.hardware.call

    @property
    def jitter(self) -> float:
        """Unknown, and counted as 0."""
        return 0.0

    def forward(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> float:
        inside = self.block_forward(shard, work).seconds + self._all_reduces(shard, work.tokens, ranks)
        inside = max(inside, self._launches(shard)[0])
        return shard.n_blocks * inside + self._ends(shard, work.tokens, self._head_tokens(work))

    def train(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        first, back = self.block_forward(shard, work), self._backward(shard, work)
        exposed = 1.0 - self.traits.tp_overlap
        reduces = exposed * self._all_reduces(shard, work.tokens, ranks)
        launching, both, _ = self._launches(shard)
        inside = max(first.seconds + reduces, launching)
        ends = self._ends(shard, work.tokens, self._head_tokens(work))
        forward = shard.n_blocks * inside + ends
        recompute_s = 0.0
        if shard.recompute is Recompute.full:
            recompute_s = shard.n_blocks * inside
        elif shard.recompute is Recompute.selective:
            recompute_s = shard.n_blocks * self._recomputed_inputs(shard, work, first)
        reduces = exposed * self._backward_reduces(shard, work.tokens, ranks)
        inside = max(back.seconds + reduces, both - launching)
        # two products for each one of the forward pass, one for frozen weights
        products = 2 if shard.model.lora is None else 1
        backward = shard.n_blocks * inside + (self.traits.head_passes - 1 + products) * ends
        return forward, backward + recompute_s

    def decode(self, shard: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        config, size = shard.model, shard.itemsize
        products = sum(n * self._product(p, size) for n, p in block_products(config, shard.tp, rows, shard.ep))
        flops = 4 * rows * config.n_heads * config.head_dim * context / shard.tp
        n_kv = config.n_kv_heads if self.traits.has_grouped_kv else config.n_heads
        kv = 2 * rows * context * max(1.0, n_kv / shard.tp) * config.head_dim * size
        linear = delta_share(config)
        states = STATE_PASSES * rows * (config.delta.slot_bytes(size) if config.delta else 0) / shard.tp
        nbytes = (1 - linear) * kv + linear * states + _dequantization_bytes(shard)
        attention = self._time((1 - linear) * flops, nbytes, self.traits.decode_kernels)
        block = products + attention + self._all_reduces(shard, rows, ranks)
        if not self._is_captured(shard):
            block = max(block, self._launches(shard)[2])
        host = self.traits.host_row * rows if shard.last else 0.0
        return shard.n_blocks * block + self._ends(shard, rows, rows) + host

    def _is_captured(self, shard: StageShard) -> bool:
        """Return True if decoding steps are CUDA graphs, which models/engine/decode/cuda_graphs.py decides."""
        has_routed_kernel = int(self.hardware.compute_capability) in GROUPED_CAPABILITIES and shard.bf16
        is_whole = shard.first and shard.last and self.traits.captures_decoding
        return is_whole and (not shard.model.n_experts or has_routed_kernel)

    def _launches(self, shard: StageShard) -> tuple[float, float, float]:
        """Return the seconds in which the host launches the kernels of a block, in each pass of ``launches_of``."""
        inference, training, decoding = self.traits.launches or launches_of(shard.model)
        launch = self.hardware.launch
        return inference * launch, training * launch, decoding * launch

    def optimizer(self, shard: StageShard, numel: int) -> float:
        return numel * OPTIMIZER_BYTES / self.hardware.memory_bandwidth

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        return collective_seconds(self.hardware, kind, nbytes, ranks)

    def send(self, nbytes: float, src: int, dst: int) -> float:
        return self.hardware.link(src, dst).seconds(nbytes)

    def exchange(self, traffic: Traffic) -> float:
        hardware = self.hardware
        packing = 2 * traffic.copied / hardware.memory_bandwidth + traffic.n_parts * hardware.kernel
        on_links = hardware.node.seconds(traffic.node) + hardware.cluster.seconds(traffic.cluster)
        return max(packing, on_links)  # packing overlaps with the wire

    def host_copy(self, nbytes: float) -> float:
        return self.hardware.host.seconds(nbytes)

    def interface(self, name: str, rows: int, tokens: int) -> float:
        """About a hundred small kernels (advantages, statistics). The time of verifiers is unknown and counts 0."""
        return 100 * self.hardware.kernel if rows else 0.0

    def _time(self, flops: float, nbytes: float, kernels: int) -> float:
        hardware = self.hardware
        return max(flops / hardware.flops, nbytes / hardware.memory_bandwidth) + kernels * hardware.kernel

    def _product(self, product: Product, itemsize: int) -> float:
        return product_seconds(self.hardware, product, itemsize, self.traits.products)

    def block_forward(self, shard: StageShard, work: Work) -> Pass:
        """Return the seconds of a block's forward pass."""
        seconds = self._products_seconds(shard, work.tokens, is_backward=False)
        return Pass(seconds, self._attention(shard, work), self._elementwise(shard, work.tokens))

    def _backward(self, shard: StageShard, work: Work) -> Pass:
        seconds = self._products_seconds(shard, work.tokens, is_backward=True)
        attention = ATTENTION_BACKWARD * self._attention(shard, work)
        kernels = KERNELS_PER_BLOCK * self.hardware.kernel
        elementwise = self.traits.backward_elements * (self._elementwise(shard, work.tokens) - kernels)
        return Pass(seconds, attention, elementwise + 2 * kernels)

    def _products_seconds(self, shard: StageShard, tokens: int, is_backward: bool) -> float:
        """Return the seconds of a block's products in one pass. A search asks for the same ones for many layouts."""
        key = shard.model, shard.tp, shard.ep, shard.itemsize, tokens, is_backward
        if key not in self._products:
            found = block_products(shard.model, shard.tp, tokens, shard.ep)
            if is_backward:
                has_weights = shard.model.lora is None
                found = tuple((n, each) for n, p in found for each in backward_products(p, has_weights))
            self._products[key] = sum(n * self._product(p, shard.itemsize) for n, p in found)
        return self._products[key]

    def _attention(self, shard: StageShard, work: Work) -> float:
        """Mean seconds of a block's attention, or of what it has instead."""
        config, linear = shard.model, delta_share(shard.model)
        if not linear:
            return self._full_attention(shard, work)
        nbytes = 2 * FLOAT32 * rule_numel(config, shard.tp) * work.tokens
        rule = self._time(rule_flops(config, shard.tp) * work.tokens, nbytes, 0)
        return (1 - linear) * self._full_attention(shard, work) + linear * rule

    def _full_attention(self, shard: StageShard, work: Work) -> float:
        """Seconds of attention to the visible keys and to the masked ones of the tiles on the diagonal."""
        config, traits, hardware = shard.model, self.traits, self.hardware
        heads = config.n_heads / shard.tp
        if traits.score_elements:  # all scores are computed and stored
            scores = heads * 2 * work.pairs
            products = 4 * config.head_dim * scores / hardware.flops
            return products + traits.score_elements * scores * shard.itemsize / self.hardware.memory_bandwidth
        pairs = work.pairs + (work.tokens * ATTENTION_TILE / 2 if hardware.sms else 0)
        flops = 4 * heads * config.head_dim * pairs
        return flops / ((hardware.attention_flops or hardware.flops) * traits.attention)

    def _elementwise(self, shard: StageShard, tokens: int) -> float:
        """Seconds of the elementwise kernels of a block's forward pass, and of starting all its kernels."""
        config, traits, size = shard.model, self.traits, shard.itemsize
        n_kv = config.n_kv_heads if traits.has_grouped_kv else config.n_heads
        share = shard.tp if shard.sequence_parallel else 1
        hidden = traits.hidden_elements * config.hidden / share
        heads = traits.head_elements * config.head_dim * 2 * (config.n_heads + n_kv) / shard.tp
        mlp = traits.mlp_elements * mlp_width(config) / shard.tp * (1 if config.mlp == "gated" else 2 / 3)
        nbytes = tokens * (hidden + heads + mlp) * size + _dequantization_bytes(shard)
        return nbytes / self.hardware.memory_bandwidth + KERNELS_PER_BLOCK * self.hardware.kernel

    def _recomputed_inputs(self, shard: StageShard, work: Work, forward: Pass) -> float:
        """Seconds of selective recomputation: what products read is computed again, or attention whose scores are."""
        if self.traits.score_elements:
            return forward.attention
        nbytes = 3 * recomputed_numel(shard.model, shard.tp) * shard.itemsize * work.tokens
        return nbytes / self.hardware.memory_bandwidth

    def _head_tokens(self, work: Work) -> int:
        return work.head_tokens if self.traits.skips_prompts else work.tokens

    def _ends(self, shard: StageShard, tokens: int, head_tokens: int) -> float:
        config, size = shard.model, shard.itemsize
        seconds = 0.0
        if shard.first:
            seconds += self._time(0, 2 * tokens * config.hidden * size, 2)
        if shard.last:
            width = (config.vocab if config.head == "lm" else 1) / shard.tp
            logits = head_tokens * width
            seconds += self._product(Product(head_tokens, width, config.hidden), size)
            seconds += self._time(0, logits * (size + 8) + head_tokens * config.hidden * size, KERNELS_PER_END)
        return seconds

    def _all_reduces(self, shard: StageShard, tokens: int, ranks: Sequence[int]) -> float:
        """Two all-reduces per block: after attention and after the MLP."""
        nbytes = tokens * shard.model.hidden * shard.itemsize
        return 2 * self.collective(CollectiveKind.ALL_REDUCE, nbytes, ranks) if shard.tp > 1 else 0.0

    def _backward_reduces(self, shard: StageShard, tokens: int, ranks: Sequence[int]) -> float:
        """Sums of the input gradients of QKV and a dense MLP's up projection, beyond what their products hide."""
        config = shard.model
        if shard.tp == 1 or not shard.tp_overlap:
            return self._all_reduces(shard, tokens, ranks)
        nbytes = tokens * config.hidden * shard.itemsize
        reduce, gather, scatter = (
            self.collective(kind, nbytes, ranks)
            for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        )
        qkv, *up = (self._product(p, shard.itemsize) * n for n, p in column_parallel(config, shard.tp, tokens))
        return exposed_tp_backward((qkv, sum(up)), reduce, gather, scatter, shard)  # experts hide nothing


@dataclass(frozen=True)
class AnalyticMemory:
    """``Footprint`` derived from the tensors that models/ and engine/ allocate, or another engine by its traits."""

    device: str
    traits: MemoryTraits = OWN_MEMORY

    def train_bytes(self, shard: StageShard, work: Work) -> tuple[float, float]:
        config, size = shard.model, shard.itemsize
        block = saved_activation_numel(config, shard.tp, shard.sequence_parallel, shard.input_shards, self.traits,
                                       shard.ep, size, self.device)  # fmt: skip
        outside = config.hidden * (2.0 * shard.first + 3.0 * shard.last)
        if shard.recompute is Recompute.full:
            kept = shard.n_blocks * config.hidden / (shard.tp if shard.sequence_parallel else 1) + outside
            temporary = block + self._temporary_numel(shard)
        elif shard.recompute is Recompute.selective:
            recomputed = recomputed_numel(config, shard.tp, shard.input_shards)
            kept = shard.n_blocks * (block - recomputed) + outside
            temporary = recomputed + self._temporary_numel(shard)
        else:
            kept, temporary = shard.n_blocks * block + outside, self._temporary_numel(shard)
        peak = (kept + temporary) * work.tokens * size + self._logits(shard, work)
        return kept * work.tokens * size, peak

    def forward_bytes(self, shard: StageShard, work: Work) -> float:
        numel = self.traits.workspace_elements * shard.model.hidden or self._temporary_numel(shard)
        scores = self.traits.score_bytes * 2 * work.pairs * shard.model.n_heads / shard.tp
        return numel * work.tokens * shard.itemsize + scores + self._logits(shard, work)

    def _temporary_numel(self, shard: StageShard) -> float:
        """Peak elements per token inside a block when no activations are saved."""
        config = shard.model
        heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        of_experts = config.expert_intermediate * config.experts_per_token + config.shared_intermediate
        inner = config.intermediate or of_experts
        width = (2 if config.mlp == "gated" else 1) * inner
        has_chunks = config.delta_layers and not has_rule_kernel(config, self.device)
        rule = rule_numel(config, shard.tp) * FLOAT32 / shard.itemsize if has_chunks else 0.0
        return 3 * config.hidden + max(1.5 * width / shard.tp, 2 * heads / shard.tp, rule)

    def _logits(self, shard: StageShard, work: Work) -> float:
        if not shard.last or shard.model.head != "lm":
            return 0.0
        if self.traits.logits_bytes:
            return self.traits.logits_bytes * work.tokens * shard.model.vocab / shard.tp
        return min(LOGITS_BYTES.get(self.device, DEFAULT_LOGITS_BYTES), 4.0 * work.tokens * shard.model.vocab)


def saved_activation_numel(
    config: ModelConfig,
    tp: int,
    sequence_parallel: bool,
    input_shards: int = 1,
    traits: MemoryTraits = OWN_MEMORY,
    ep: int = 1,
    itemsize: int = FLOAT32,
    device: str = "cuda",
) -> float:
    """Return the elements per token that autograd saves for a block of models/blocks.py.

    They are the residual stream (twice) and its two normalized copies, the QKV projection, rotated queries and keys,
    the attention output, and in the MLP the up projection, the activation and the input of the down projection. With
    sequence parallelism the residual stream holds only this rank's share of the tokens; the normalized copies are in
    ``input_shards``. Experts' inputs are those of the tokens that a rank computes, or that it also sends.
    """
    share = tp if sequence_parallel else 1
    heads, kv = config.n_heads / tp, max(1.0, config.n_kv_heads / tp)
    residual = config.hidden * (2 / share + 2 / input_shards)
    attention = config.head_dim * (traits.saved_queries * heads + traits.saved_keys * kv)
    rule, linear = saved_rule_numel(config, tp, itemsize, device), delta_share(config)
    attention = (1 - linear) * attention + linear * rule
    copies = 4 if config.mlp == "gated" else 2
    dense, routed = copies * config.intermediate / tp, routed_share(config)
    inputs = config.hidden * (1 + (2 if ep > tp else 1) / min(ep, tp))
    per_expert = (copies * config.expert_intermediate / tp + inputs) * config.experts_per_token
    per_expert += copies * config.shared_intermediate / tp
    return residual + attention + (1 - routed) * dense + routed * (per_expert + 3 * config.n_experts)


def recomputed_numel(config: ModelConfig, tp: int, input_shards: int = 1) -> float:
    """Return the elements per token and block that selective recomputation does not save: inputs of products.

    They are the normalised inputs of attention and of a dense MLP, and the input of its down projection.
    """
    dense = 1 - routed_share(config)
    return config.hidden * (1 + dense) / input_shards + dense * config.intermediate / tp


def _dequantization_bytes(shard: StageShard) -> float:
    """Bytes per block and pass of dequantizing all weights: integers are read, weights are written."""
    lora = shard.model.lora
    if lora is None or not lora.bits:
        return 0.0
    return _block_numel(shard.model) / shard.tp * (lora.bits / 8 + shard.itemsize)


def _block_numel(config: ModelConfig) -> float:
    """Mean weights per block that a token passes through: attention, MLP and router."""
    matrices = 3 if config.mlp == "gated" else 2
    routed = routed_share(config) * config.n_experts
    linear = delta_share(config)
    mixer = (1 - linear) * config.attention_numel + linear * config.delta_numel
    return mixer + matrices * config.hidden * mlp_width(config) + config.hidden * routed
