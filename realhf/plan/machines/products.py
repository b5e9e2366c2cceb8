"""Time of a matrix product on a GPU by its shape: tiles, waves of tiles over the multiprocessors, short inner sizes."""

from math import ceil
from typing import NamedTuple

from realhf.api.machine import Hardware
from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import routed_share, touched_experts
from realhf.plan.machines.delta_rule import delta_share


class Product(NamedTuple):
    """``copies`` products ``[m, k] @ [k, n]``, of which ``touched`` have rows; weights are the ``[k, n]``."""

    m: float
    n: float
    k: float
    copies: float = 1.0
    touched: float = 1.0


TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.55), (16, 64, 0.2))
"""Rows and columns of an output tile and its share of the best speed: small tiles load each operand more often."""
PROLOGUE = 256
"""Inner size that a tile could process in the time in which it starts and stores its result."""
MANY_WAVES = 4
"""With more waves the last, incomplete one costs half a wave on average."""


def product_seconds(hardware: Hardware, product: Product, itemsize: int, speed: float = 1.0) -> float:
    """Return the seconds of products: the larger of their arithmetic and of reading their weights.

    ``speed`` is that of the arithmetic relative to ``Hardware.flops``. Without a number of multiprocessors
    (``Hardware.sms``) shapes do not matter.
    """
    m, n, k, copies, touched = product
    reading = touched * n * k * itemsize / hardware.memory_bandwidth
    if not hardware.sms:
        return max(2 * copies * m * n * k / (hardware.flops * speed), reading)
    computing = min(_tiled_seconds(hardware, product, *tile) for tile in TILES) / speed
    return max(computing, reading)


def _tiled_seconds(hardware: Hardware, product: Product, rows: int, columns: int, share: float) -> float:
    """Return the seconds of the arithmetic with tiles of this size, which run ``share`` as fast as the best ones."""
    m, n, k, copies, touched = product
    used = touched or copies
    n_tiles = used * ceil(m * copies / used / rows) * ceil(n / columns)
    splits = max(1, min(hardware.sms // n_tiles, k // PROLOGUE))  # of the inner size, over idle multiprocessors
    waves = n_tiles / hardware.sms + 0.5 if n_tiles > MANY_WAVES * hardware.sms else ceil(n_tiles / hardware.sms)
    flops = waves * 2 * rows * columns * (k / splits + PROLOGUE)
    return flops * hardware.sms / (hardware.flops * share)


def block_products(config: ModelConfig, tp: int, tokens: int, ep: int = 1) -> tuple[tuple[float, Product], ...]:
    """Return the products of a block's forward pass and how many there are per block, on average over the blocks.

    With expert parallelism, experts of a rank get the tokens of ``ep / tp`` replicas; they get equal numbers.
    """
    hidden, gates = config.hidden, 2 if config.mlp == "gated" else 1
    queries, keys = config.n_heads * config.head_dim / tp, max(1.0, config.n_kv_heads / tp) * config.head_dim
    routed, linear = routed_share(config), delta_share(config)
    products = [
        (1 - linear, Product(tokens, queries * (2 if config.attention_gate else 1) + 2 * keys, hidden)),
        (1 - linear, Product(tokens, hidden, queries)),
        (1 - routed, Product(tokens, gates * config.intermediate / tp, hidden)),
        (1 - routed, Product(tokens, hidden, config.intermediate / tp)),
    ]
    if config.delta is not None:
        wide = config.delta.values / tp
        inner = 2 * (config.delta.keys + config.delta.value_heads) / tp + 2 * wide
        products += [(linear, Product(tokens, inner, hidden)), (linear, Product(tokens, hidden, wide))]
    if routed:
        n, wide, tokens_in = (
            config.n_experts / ep,
            config.expert_intermediate * min(ep, tp) / tp,
            tokens * max(1, ep // tp),
        )
        rows, touched = tokens_in * config.experts_per_token / config.n_experts, touched_experts(config, tokens_in) / ep
        products += [
            (routed, Product(tokens, config.n_experts, hidden)),  # the router
            (routed, Product(rows, gates * wide, hidden, n, touched)),
            (routed, Product(rows, hidden, wide, n, touched)),
        ]
        if shared := config.shared_intermediate / tp:
            products += [
                (routed, Product(tokens, gates * shared, hidden)),
                (routed, Product(tokens, hidden, shared)),
            ]
    return tuple((per_block, product) for per_block, product in products if per_block)


def column_parallel(config: ModelConfig, tp: int, tokens: int) -> tuple[tuple[float, Product], ...]:
    """Return the products of QKV and of a dense MLP's up projection, as ``block_products`` does."""
    products = block_products(config, tp, tokens)
    return (products[0], *(products[2:3] if routed_share(config) < 1 else ()))


def backward_products(product: Product, with_weights: bool = True) -> tuple[Product, ...]:
    """Return the products of the backward pass: gradients of the inputs and, with ``with_weights``, of the weights."""
    m, n, k, copies, touched = product
    inputs = Product(m, k, n, copies, touched)
    return (inputs, Product(n, k, m, copies, 0.0)) if with_weights else (inputs,)
