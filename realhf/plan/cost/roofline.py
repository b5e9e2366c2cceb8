"""Roofline times: the maximum of arithmetic and memory traffic, plus kernel launches. Analytic activation memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.api.config.choices import Recompute
from realhf.api.machine import GROUPED_CAPABILITIES, Hardware, Link
from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work

KERNELS_PER_BLOCK = 16  # forward pass: norms, projections, rotary embedding, attention, activation, residual additions
KERNELS_PER_END = 8
LAUNCHES = {  # by block outside of a graph: an inference pass, a training pass, a decoding step
    "dense": (26, 88, 28),
    "routed": (68, 235, 71),
}
"""Counts of tests/gpu_emulated/test_ceilings.py: llama and qwen3_moe in bfloat16, without the fused kernels of csrc."""
ATTENTION_BACKWARD = 2.5  # times the operations of the forward pass: five products for two (arXiv 2307.08691, 3.1)
OPTIMIZER_BYTES = 28  # per parameter: float32 gradient, master weight and two moments read, the last three written
LOGITS_BYTES = {"cpu": 24 << 20}  # chunk of logits that the log-prob head materializes (ops/logprobs.py)
DEFAULT_LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class Roofline:
    """``Speed`` without a profile: matrix products count by operations, everything else by its memory traffic."""

    hardware: Hardware

    @property
    def call(self) -> float:
        return self.hardware.call

    def forward(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> float:
        inside = self._block(shard, work) + self._attention(shard, work)
        inside += self._all_reduces(shard, work.tokens, ranks)
        inside = max(inside, self._launches(shard)[0])
        return shard.n_blocks * inside + self._ends(shard, work.tokens)

    def train(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        block, reduces = self._block(shard, work), self._all_reduces(shard, work.tokens, ranks)
        attention, (launching, both, _) = self._attention(shard, work), self._launches(shard)
        inside = max(block + attention + reduces, launching)
        forward = shard.n_blocks * inside + self._ends(shard, work.tokens)
        recompute_s = 0.0
        if shard.recompute is Recompute.full:
            recompute_s = shard.n_blocks * inside
        elif shard.recompute is Recompute.selective:  # read and write what the products take
            recomputed = 3 * recomputed_numel(shard.model, shard.tp) * shard.itemsize
            recompute_s = shard.n_blocks * work.tokens * recomputed / self.hardware.memory_bandwidth
        # two products for each one of the forward pass, one for frozen weights; the head recomputes its logits
        products = 2 if shard.model.lora is None else 1
        inside = max(products * block + ATTENTION_BACKWARD * attention + reduces, both - launching)
        backward = shard.n_blocks * inside + (1 + products) * self._ends(shard, work.tokens)
        return forward, backward + recompute_s

    def decode(self, shard: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        config, size = shard.model, shard.itemsize
        flops = 2 * rows * (_active_numel(config) + 2 * config.n_heads * config.head_dim * context) / shard.tp
        kv = 2 * rows * context * max(1.0, config.n_kv_heads / shard.tp) * config.head_dim
        touched = (_touched_numel(config, rows) / shard.tp + kv) * size + _dequantization_bytes(shard)
        block = self._time(flops, touched, KERNELS_PER_BLOCK) + self._all_reduces(shard, rows, ranks)
        if not self._is_captured(shard):
            block = max(block, self._launches(shard)[2])
        return shard.n_blocks * block + self._ends(shard, rows)

    def _is_captured(self, shard: StageShard) -> bool:
        """Return True if decoding steps are CUDA graphs, which models/engine/decode/cuda_graphs.py decides."""
        has_routed_kernel = int(self.hardware.compute_capability) in GROUPED_CAPABILITIES and shard.bf16
        return shard.first and shard.last and (not shard.model.n_experts or has_routed_kernel)

    def _launches(self, shard: StageShard) -> tuple[float, float, float]:
        """Return the seconds in which the host launches the kernels of a block, for each pass of ``LAUNCHES``."""
        inference, training, decoding = LAUNCHES["routed" if shard.model.n_experts else "dense"]
        launch = self.hardware.launch
        return inference * launch, training * launch, decoding * launch

    def optimizer(self, shard: StageShard, numel: int) -> float:
        return numel * OPTIMIZER_BYTES / self.hardware.memory_bandwidth

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        """Ring algorithms: n - 1 steps for all-gather and reduce-scatter, twice as many for all-reduce."""
        n = len(ranks)
        if n == 1:
            return 0.0
        link = self._ring(ranks)
        if kind is CollectiveKind.BROADCAST:
            return link.latency * (n - 1).bit_length() + nbytes / link.bandwidth
        rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        return rounds * (n - 1) * (link.latency + nbytes / n / link.bandwidth)

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

    def _attention(self, shard: StageShard, work: Work) -> float:
        """Seconds of attention to the visible keys, whose scores are not stored."""
        flops = 4 * shard.model.n_heads * shard.model.head_dim / shard.tp * work.pairs
        return flops / (self.hardware.attention_flops or self.hardware.flops)

    def _block(self, shard: StageShard, work: Work) -> float:
        """Seconds of a block without attention."""
        config, size = shard.model, shard.itemsize
        products = 2 * _active_numel(config) / shard.tp * work.tokens
        wide = _mlp_width(config) * (4 if config.mlp == "gated" else 2) / shard.tp
        heads = config.head_dim * (4 * config.n_heads + 4 * config.n_kv_heads) / shard.tp
        streamed = work.tokens * (6 * config.hidden + heads + wide) * size + _dequantization_bytes(shard)
        products_s = self._time(products, _touched_numel(config, work.tokens) / shard.tp * size, 0)
        return products_s + streamed / self.hardware.memory_bandwidth + KERNELS_PER_BLOCK * self.hardware.kernel

    def _ends(self, shard: StageShard, tokens: int) -> float:
        config, size = shard.model, shard.itemsize
        seconds = 0.0
        if shard.first:
            seconds += self._time(0, 2 * tokens * config.hidden * size, 2)
        if shard.last:
            width = (config.vocab if config.head == "lm" else 1) / shard.tp
            logits = tokens * width
            streamed = logits * (size + 8) + (width + tokens) * config.hidden * size
            seconds += self._time(2 * config.hidden * logits, streamed, KERNELS_PER_END)
        return seconds

    def _all_reduces(self, shard: StageShard, tokens: int, ranks: Sequence[int]) -> float:
        """Two all-reduces per block: after attention and after the MLP."""
        nbytes = tokens * shard.model.hidden * shard.itemsize
        return 2 * self.collective(CollectiveKind.ALL_REDUCE, nbytes, ranks) if shard.tp > 1 else 0.0

    def _ring(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link of a ring. Each member of a node adds a port to its connection to other nodes."""
        hardware = self.hardware
        nodes = {rank // hardware.node_size for rank in ranks}
        if len(nodes) == 1:
            return hardware.node
        ports = max(1, len(ranks) // len(nodes))
        outside = Link(hardware.cluster.bandwidth * ports, hardware.cluster.latency)
        return min(outside, hardware.node, key=lambda link: link.bandwidth) if ports > 1 else outside


@dataclass(frozen=True)
class AnalyticMemory:
    """``Footprint`` derived from the tensors that models/ and engine/ allocate."""

    device: str

    def train_bytes(self, shard: StageShard, work: Work) -> tuple[float, float]:
        config, size = shard.model, shard.itemsize
        block = saved_activation_numel(config, shard.tp, shard.sequence_parallel)
        outside = config.hidden * (2.0 * shard.first + 3.0 * shard.last)
        if shard.recompute is Recompute.full:
            kept = shard.n_blocks * config.hidden / (shard.tp if shard.sequence_parallel else 1) + outside
            temporary = block + self._temporary_numel(shard)
        elif shard.recompute is Recompute.selective:
            recomputed = recomputed_numel(config, shard.tp)
            kept = shard.n_blocks * (block - recomputed) + outside
            temporary = recomputed + self._temporary_numel(shard)
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
        inner = config.intermediate or config.expert_intermediate * config.experts_per_token
        width = (2 if config.mlp == "gated" else 1) * inner
        return 3 * config.hidden + max(1.5 * width, 2 * heads) / shard.tp

    def _logits(self, shard: StageShard, work: Work) -> float:
        if not shard.last or shard.model.head != "lm":
            return 0.0
        return min(LOGITS_BYTES.get(self.device, DEFAULT_LOGITS_BYTES), 4.0 * work.tokens * shard.model.vocab)


def saved_activation_numel(config: ModelConfig, tp: int, sequence_parallel: bool) -> float:
    """Return the elements per token that autograd saves for a block of models/blocks.py.

    They are the residual stream (twice) and its two normalized copies, the QKV projection, rotated queries and keys,
    the attention output, and in the MLP the up projection, the activation and the input of the down projection. With
    sequence parallelism the residual stream holds only this rank's share of the tokens.
    """
    share = tp if sequence_parallel else 1
    heads, kv = config.n_heads / tp, max(1.0, config.n_kv_heads / tp)
    residual = config.hidden * (2 / share + 2)
    attention = config.head_dim * ((heads + 2 * kv) + (heads + kv) + heads)
    copies = 4 if config.mlp == "gated" else 2
    dense, routed = copies * config.intermediate / tp, _routed(config)
    per_expert = (copies * config.expert_intermediate / tp + 2 * config.hidden) * config.experts_per_token
    return residual + attention + (1 - routed) * dense + routed * (per_expert + 3 * config.n_experts)


def recomputed_numel(config: ModelConfig, tp: int) -> float:
    """Return the elements per token and block that selective recomputation does not save: inputs of products.

    They are the normalised inputs of attention and of a dense MLP, and the input of its down projection.
    """
    dense = 1 - _routed(config)
    return config.hidden * (1 + dense) + dense * config.intermediate / tp


def _mlp_width(config: ModelConfig) -> float:
    """Mean MLP width that a token passes through."""
    routed = _routed(config)
    return (1 - routed) * config.intermediate + routed * config.experts_per_token * config.expert_intermediate


def _routed(config: ModelConfig) -> float:
    return len(config.routed_layers) / config.n_layers


def _active_numel(config: ModelConfig) -> float:
    return _block_numel(config, _mlp_width(config))


def _touched_numel(config: ModelConfig, tokens: int) -> float:
    """Mean weights per block that are read for ``tokens`` tokens: only experts that receive one are read."""
    if not config.n_experts:
        return _active_numel(config)
    share = 1 - (1 - config.experts_per_token / config.n_experts) ** tokens
    experts = share * config.n_experts * config.expert_intermediate
    return _block_numel(config, (1 - _routed(config)) * config.intermediate + _routed(config) * experts)


def _dequantization_bytes(shard: StageShard) -> float:
    """Bytes per block and pass of dequantizing all weights: integers are read, weights are written."""
    lora = shard.model.lora
    if lora is None or not lora.bits:
        return 0.0
    return _active_numel(shard.model) / shard.tp * (lora.bits / 8 + shard.itemsize)


def _block_numel(config: ModelConfig, width: float) -> float:
    """Mean weights per block for MLPs of the given width: attention, MLP and router."""
    attention = config.hidden * config.head_dim * (2 * config.n_heads + 2 * config.n_kv_heads)
    matrices = 3 if config.mlp == "gated" else 2
    return attention + matrices * config.hidden * width + _routed(config) * config.hidden * config.n_experts
