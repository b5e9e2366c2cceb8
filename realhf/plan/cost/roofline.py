"""Times from the limits of named hardware: the slower of computing and moving bytes, and the launches of kernels.

What is counted is what models/, engine/ and comm/ do: matrix products by their operations, everything else by the bytes
that pass through memory. The limits and where they come from are in ``machines/*.yaml``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.api.machine import Hardware, Link
from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work

KERNELS_PER_BLOCK = 16
"""Kernels of a block's forward pass: norms, products, rotation, attention, activation, additions."""
KERNELS_PER_END = 8
OPTIMIZER_BYTES = 28
"""Per parameter: gradient, master and two moments are read, the last three written, in float32."""


@dataclass(frozen=True)
class Roofline:
    """The ``Speed`` of a machine that nobody has measured."""

    hardware: Hardware

    @property
    def call(self) -> float:
        return self.hardware.call

    def forward(self, part: StageShard, work: Work, ranks: Sequence[int]) -> float:
        inside = self._block(part, work) + self._reduces(part, work.tokens, ranks)
        return part.n_blocks * inside + self._ends(part, work.tokens)

    def train(self, part: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        block, reduces = self._block(part, work), self._reduces(part, work.tokens, ranks)
        forward = part.n_blocks * (block + reduces) + self._ends(part, work.tokens)
        again = part.n_blocks * (block + reduces) if part.recompute else 0.0
        # two products for each of the forward pass; the head's logits are computed again
        backward = part.n_blocks * (2 * block + reduces) + 3 * self._ends(part, work.tokens)
        return forward, backward + again

    def decode(self, part: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        config, size = part.model, _itemsize(part)
        flops = 2 * rows * (_active_numel(config) + 2 * config.n_heads * config.head_dim * context) / part.tp
        kv = 2 * rows * context * max(1.0, config.n_kv_heads / part.tp) * config.head_dim
        touched = _touched_numel(config, rows) / part.tp + kv
        block = self._time(flops, touched * size, KERNELS_PER_BLOCK)
        blocks = part.n_blocks * (block + self._reduces(part, rows, ranks))
        return blocks + self._ends(part, rows)

    def optimizer(self, part: StageShard, numel: int) -> float:
        return numel * OPTIMIZER_BYTES / self.hardware.memory_bandwidth

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        """Ring algorithms: n - 1 steps around for gathering or scattering, twice that for reducing to all."""
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
        """A hundred small kernels: advantages and statistics. Verifiers are unknown here and count nothing."""
        return 100 * self.hardware.kernel if rows else 0.0

    def _time(self, flops: float, nbytes: float, kernels: int) -> float:
        return (
            max(flops / self.hardware.flops, nbytes / self.hardware.memory_bandwidth) + kernels * self.hardware.kernel
        )

    def _block(self, part: StageShard, work: Work) -> float:
        """One block's forward pass over a micro-batch, collectives apart."""
        config, size = part.model, _itemsize(part)
        products = 2 * _active_numel(config) / part.tp * work.tokens
        attention = 4 * config.n_heads * config.head_dim / part.tp * work.pairs
        wide = _mlp_width(config) * (4 if config.mlp == "gated" else 2) / part.tp
        heads = config.head_dim * (4 * config.n_heads + 4 * config.n_kv_heads) / part.tp
        passing = work.tokens * (6 * config.hidden + heads + wide) * size
        products_s = self._time(products + attention, _touched_numel(config, work.tokens) / part.tp * size, 0)
        return products_s + passing / self.hardware.memory_bandwidth + KERNELS_PER_BLOCK * self.hardware.kernel

    def _ends(self, part: StageShard, tokens: int) -> float:
        """Embedding, final norm and head of the stages that have them."""
        config, size = part.model, _itemsize(part)
        seconds = 0.0
        if part.first:
            seconds += self._time(0, 2 * tokens * config.hidden * size, 2)
        if part.last:
            width = (config.vocab if config.head == "lm" else 1) / part.tp
            logits = tokens * width
            passing = logits * (size + 8) + (width + tokens) * config.hidden * size
            seconds += self._time(2 * config.hidden * logits, passing, KERNELS_PER_END)
        return seconds

    def _reduces(self, part: StageShard, tokens: int, ranks: Sequence[int]) -> float:
        """The collectives of one block: activations are summed behind attention and behind the MLP."""
        nbytes = tokens * part.model.hidden * _itemsize(part)
        return 2 * self.collective(CollectiveKind.ALL_REDUCE, nbytes, ranks) if part.tp > 1 else 0.0

    def _ring(self, ranks: Sequence[int]) -> Link:
        """The slowest link of a ring. Members of one node leave it through as many ports as they are."""
        hardware = self.hardware
        nodes = {rank // hardware.node_size for rank in ranks}
        if len(nodes) == 1:
            return hardware.node
        ports = max(1, len(ranks) // len(nodes))
        outside = Link(hardware.cluster.bandwidth * ports, hardware.cluster.latency)
        return min(outside, hardware.node, key=lambda link: link.bandwidth) if ports > 1 else outside


def _itemsize(part: StageShard) -> int:
    return 2 if part.bf16 else 4


def _mlp_width(config: ModelConfig) -> float:
    """Mean width of what a token goes through."""
    routed = _routed(config)
    return (1 - routed) * config.intermediate + routed * config.experts_per_token * config.expert_intermediate


def _routed(config: ModelConfig) -> float:
    """Share of blocks with experts."""
    return len(config.routed_layers) / config.n_layers if config.n_experts else 0.0


def _active_numel(config: ModelConfig) -> float:
    """Weights of a mean block that a token multiplies with."""
    return _block_numel(config, _mlp_width(config))


def _touched_numel(config: ModelConfig, tokens: int) -> float:
    """Weights of a mean block that are read for so many tokens: of experts, those that any of them is sent to."""
    if not config.n_experts:
        return _active_numel(config)
    share = 1 - (1 - config.experts_per_token / config.n_experts) ** tokens
    experts = share * config.n_experts * config.expert_intermediate
    return _block_numel(config, (1 - _routed(config)) * config.intermediate + _routed(config) * experts)


def _block_numel(config: ModelConfig, width: float) -> float:
    """Weights of a mean block whose MLPs are so wide: attention, MLP and router."""
    attention = config.hidden * config.head_dim * (2 * config.n_heads + 2 * config.n_kv_heads)
    matrices = 3 if config.mlp == "gated" else 2
    return attention + matrices * config.hidden * width + _routed(config) * config.hidden * config.n_experts
