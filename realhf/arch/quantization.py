"""Quantized bases of LoRA adapters: which frozen matrices are stored as integers with scales, and their sizes.

A scale belongs to a group of adjacent weights of a row. Shards consist of whole groups, so that values do not depend on
the layout. Embedding, head, norms and biases keep their type.
"""

from collections.abc import Container
from dataclasses import replace
from functools import lru_cache

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import Box, ParamSpec, box_numel, largest_box, shard_box
from realhf.arch.lora import DENSE_MLP, PRODUCTS, base_specs

QUANTIZED = ("wq", "wk", "wv", "wo", *DENSE_MLP)
"""The matrices of a block that are quantized."""
INTEGER_BITS = 8
"""Integers are stored in bytes, several in one if they are smaller."""


@lru_cache(maxsize=256)
def quantized_names(config: ModelConfig) -> frozenset[str]:
    """Return the names of the quantized matrices; none without quantization."""
    if config.lora is None or not config.lora.bits:
        return frozenset()
    return frozenset(spec.name for spec in base_specs(config) if spec.name.rpartition(".")[2] in QUANTIZED)


def fewer_columns(spec: ParamSpec, by: int) -> ParamSpec:
    """Return the parameter with one column for ``by`` columns of a matrix. It has no sharding of its own."""
    shape = *spec.shape[:-1], spec.shape[-1] // by
    return replace(spec, shape=shape, tp_dim=None, tp_units=0)


def column_box(box: Box, by: int) -> Box:
    """Return the box of ``fewer_columns`` for a box of the matrix, which has whole groups of columns."""
    start, stop = box[-1]
    assert start % by == 0 and stop % by == 0, f"columns {start} to {stop} are not groups of {by}"
    return (*box[:-1], (start // by, stop // by))


def check_quantization(config: ModelConfig) -> None:
    """Raise ValueError for a model whose base cannot be quantized as its options request."""
    if config.lora is None or not config.lora.bits:
        return
    bits, group = config.lora.bits, config.lora.group_size
    if config.latent:
        raise ValueError(f"lora.quantization=int{bits} does not support the latent attention of {config.family} models")
    if config.delta_layers:
        raise ValueError(f"lora.quantization=int{bits} does not support the linear attention of {config.family} models")
    if config.n_experts:
        raise ValueError(f"lora.quantization=int{bits} does not support the routed experts of {config.family} models")
    if group < 2:
        raise ValueError(f"lora.quantization_group_size={group}: a scale for every weight saves no memory")
    if bits < INTEGER_BITS and group % 2:
        raise ValueError(f"lora.quantization_group_size={group} is odd: int{bits} weights are stored in pairs")
    names = quantized_names(config)
    widths = {spec.shape[-1]: spec.name.rpartition(".")[2] for spec in base_specs(config) if spec.name in names}
    for width, name in sorted(widths.items()):
        if width % group:
            raise ValueError(f"lora.quantization_group_size={group} does not divide the {width} columns of {name}"
                             f"{_suggestion(*widths)}")  # fmt: skip


@lru_cache(maxsize=4096)
def shard_problems(config: ModelConfig, tp: int) -> tuple[str, ...]:
    """Return the reason why tensor parallelism would cut groups of a quantized base."""
    if config.lora is None or not config.lora.bits:
        return ()
    names, group = quantized_names(config), config.lora.group_size
    for spec in base_specs(config):
        if spec.name in names and spec.tp_dim == 1:
            boxes = [shard_box(spec, tp, rank) for rank in range(tp)]
            if any(edge % group for box in boxes for edge in box[1]):
                name, columns = spec.name.rpartition(".")[2], spec.shape[1]
                edges = {edge for box in boxes for edge in box[1]}
                return (f"lora.quantization_group_size={group} does not divide the shards of {name} ({columns} columns)"
                        f" at tensor-parallel size {tp}{_suggestion(*edges)}",)  # fmt: skip
    return ()


def _suggestion(*numbers: int) -> str:
    """Return a clause that names the largest power of two, up to 128, that divides all numbers."""
    fitting = max(2**k for k in range(8) if not any(number % 2**k for number in numbers))
    return f"; {fitting} does" if fitting > 1 else ""


def base_nbytes(config: ModelConfig, tp: int, layers: Container[int], itemsize: int, ep: int = 1) -> int:
    """Return the bytes of the frozen weights of a stage's largest shard.

    ``itemsize`` is that of weights which are not quantized, and of scales.
    """
    names, total = quantized_names(config), 0
    for spec in base_specs(config):
        if spec.is_in(layers):
            numel = box_numel(largest_box(spec, tp, ep))
            total += numel * itemsize if spec.name not in names else quantized_nbytes(config, numel, itemsize)
    return total


def largest_product_nbytes(config: ModelConfig, tp: int, itemsize: int) -> int:
    """Return the bytes of the largest dequantized product of a block, 0 without quantization.

    One is in memory at a time. ``itemsize`` is that of its weights.
    """
    names, numels = quantized_names(config), dict[tuple[str, ...], int]()
    for spec in base_specs(config):
        if spec.name in names and spec.layer == 1:
            product = next(several for several in PRODUCTS if spec.name.rpartition(".")[2] in several)
            numel = box_numel(shard_box(spec, tp, 0))
            numels[product] = numels.get(product, 0) + numel
    return max(numels.values(), default=0) * itemsize


def quantized_nbytes(config: ModelConfig, numel: int, itemsize: int) -> int:
    """Return the bytes of ``numel`` quantized weights and of their scales."""
    assert config.lora is not None
    return numel * config.lora.bits // INTEGER_BITS + numel // config.lora.group_size * itemsize
