"""Which matrices a quantized base has, their sizes in every layout, and models and layouts that are refused."""

from dataclasses import replace

import pytest

from realhf.api.layout import ParallelStrategy
from realhf.api.model_config import GatedDelta, Lora, ModelConfig
from realhf.api.param_box import box_numel, shard_box
from realhf.arch.lora import base_specs
from realhf.arch.quantization import (
    base_nbytes,
    check_quantization,
    column_box,
    largest_product_nbytes,
    quantized_names,
    shard_problems,
)
from realhf.plan.compile.check import all_strategies, nearest_strategy, strategy_problems
from tests.plan.search.planners import LLAMA

HYBRID = replace(LLAMA, delta=GatedDelta(2, 2, 4, 4, 4), delta_layers=(0,))


def quantized(bits: int = 8, group_size: int = 32, model: ModelConfig = LLAMA) -> ModelConfig:
    return replace(model, lora=Lora(4, 8.0, (), bits, group_size))


def test_attention_and_mlp_matrices_are_quantized() -> None:
    names = quantized_names(quantized())
    assert names == {f"layers.{i}.{name}" for i in range(LLAMA.n_layers)
                     for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")}  # fmt: skip
    assert not quantized_names(LLAMA) and not quantized_names(replace(LLAMA, lora=Lora(4)))


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("itemsize", (2, 4))
def test_bytes_of_a_shard(bits: int, itemsize: int) -> None:
    config, layers = quantized(bits), range(0, LLAMA.n_layers + 2)
    for tp in (1, 2):
        expected = 0.0
        for spec in base_specs(config):
            per_weight = bits / 8 + itemsize / 32 if spec.name in quantized_names(config) else itemsize
            expected += box_numel(shard_box(spec, tp, 0)) * per_weight
        assert base_nbytes(config, tp, layers, itemsize) == expected
    unquantized = base_nbytes(replace(LLAMA, lora=Lora(4)), 1, layers, itemsize)
    assert unquantized == itemsize * sum(spec.numel for spec in base_specs(config))


def test_the_largest_product_is_that_of_gate_and_up() -> None:
    assert largest_product_nbytes(quantized(), 1, 4) == 4 * 2 * LLAMA.intermediate * LLAMA.hidden
    assert largest_product_nbytes(quantized(), 2, 2) == 2 * LLAMA.intermediate * LLAMA.hidden
    assert largest_product_nbytes(replace(LLAMA, lora=Lora(4)), 1, 4) == 0


@pytest.mark.parametrize(
    "config, problem",
    [
        (quantized(8, 48), "group_size=48 does not divide the 64 columns of .*; 32 does"),
        (quantized(model=HYBRID), "int8 does not support the linear attention of llama models"),
        (quantized(4, 5), "group_size=5 is odd: int4 weights are stored in pairs"),
        (quantized(8, 1), "group_size=1: a scale for every weight saves no memory"),
        (quantized(8, 10_000), "group_size=10000 does not divide"),
        (quantized(8, 2, replace(LLAMA, hidden=33)), "group_size=2 does not divide the 33 columns of [a-z]+$"),
        (quantized(model=replace(LLAMA, n_experts=4, experts_per_token=2, expert_intermediate=64)),
         "int8 does not support the routed experts of llama models"),
    ],
)  # fmt: skip
def test_models_that_are_refused(config: ModelConfig, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_quantization(config)


def test_layouts_that_would_cut_groups_are_refused() -> None:
    """A model of 8 heads of 8, and an MLP of 160."""
    check_quantization(quantized())
    assert shard_problems(quantized(), 1) == ()
    (problem,) = shard_problems(quantized(), 2)
    assert problem == ("lora.quantization_group_size=32 does not divide the shards of down (160 columns) at "
                       "tensor-parallel size 2; 16 does")  # fmt: skip
    assert shard_problems(quantized(group_size=16), 2) == () and shard_problems(quantized(group_size=8), 4) == ()
    (problem,) = strategy_problems(quantized(), ParallelStrategy(tp=2))
    assert "at tensor-parallel size 2" in problem
    assert strategy_problems(replace(LLAMA, lora=Lora(4)), ParallelStrategy(tp=2)) == []
    assert nearest_strategy(ParallelStrategy(tp=2), 2, [quantized()]).tp == 1
    assert {s.tp for s in all_strategies(4) if not strategy_problems(quantized(), s)} == {1}


def test_boxes_have_whole_groups() -> None:
    assert column_box(((0, 5), (32, 96)), 32) == ((0, 5), (1, 3))
    with pytest.raises(AssertionError, match="columns 16 to 96 are not groups of 32"):
        column_box(((0, 5), (16, 96)), 32)
