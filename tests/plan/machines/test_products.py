"""Times of products by shape against hand computations, and limits that hold for every shape."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.machines.hardware import read_hardware
from realhf.plan.machines.products import PROLOGUE, Product, backward_products, block_products, product_seconds
from tests.plan.machines.test_roofline import MOE
from tests.plan.search.planners import FREE, LLAMA
from tests.scaling import examples

H100 = replace(read_hardware("h100"), memory_bandwidth=FREE)
SIZES = st.integers(1, 20_000)
EQUAL = pytest.approx


def test_full_waves_of_large_tiles() -> None:
    # 132 multiprocessors: 12 x 11 tiles of 256 x 128 are one wave
    seconds = product_seconds(H100, Product(12 * 256, 11 * 128, 4096), 2)
    assert seconds == EQUAL(2 * 12 * 256 * 11 * 128 * (4096 + PROLOGUE) / H100.flops)


def test_one_more_tile_is_one_more_wave() -> None:
    full, more = (product_seconds(H100, Product(m, 11 * 128, 4096), 2) for m in (24 * 256, 24 * 256 + 1))
    assert more > 1.2 * full


def test_idle_multiprocessors_split_the_inner_size() -> None:
    one_tile = product_seconds(H100, Product(64, 64, 132 * PROLOGUE), 2)
    unsplit = 2 * 64 * 64 * 133 * PROLOGUE * H100.sms / H100.flops
    assert one_tile < unsplit / 30


def test_few_rows_take_as_long_as_reading_the_weights() -> None:
    h100 = read_hardware("h100")
    assert product_seconds(h100, Product(8, 8192, 8192), 2) == EQUAL(2 * 8192**2 / h100.memory_bandwidth)


def test_tokens_are_distributed_over_experts() -> None:
    # the weights of experts without tokens are not read
    h100 = replace(read_hardware("h100"), flops=FREE)
    one, all_ = (sum(n * product_seconds(h100, p, 2) for n, p in block_products(MOE, 1, t)) for t in (1, 10_000))
    expert = 3 * MOE.hidden * MOE.expert_intermediate * len(MOE.routed_layers) / MOE.n_layers
    assert (all_ - one) * h100.memory_bandwidth == EQUAL(2 * 6 * expert, rel=1e-6)


@settings(max_examples=examples(100))
@given(m=SIZES, n=SIZES, k=SIZES, more=SIZES)
def test_no_shape_beats_the_peak_and_more_rows_are_not_faster(m: int, n: int, k: int, more: int) -> None:
    seconds = product_seconds(H100, Product(m, n, k), 2)
    assert seconds >= 2 * m * n * k / H100.flops
    faster = product_seconds(replace(H100, flops=2 * H100.flops), Product(m, n, k), 2)
    assert faster == EQUAL(seconds / 2)
    assert product_seconds(H100, Product(m + more, n, k), 2) >= seconds


@settings(max_examples=examples(50))
@given(tokens=SIZES, tp=st.sampled_from([1, 2, 4, 8]), model=st.sampled_from([LLAMA, MOE]))
def test_backward_has_twice_the_operations(tokens: int, tp: int, model: object) -> None:
    for _, product in block_products(model, tp, tokens):  # type: ignore[arg-type]
        once = product.m * product.n * product.k * product.copies
        twice = sum(p.m * p.n * p.k * p.copies for p in backward_products(product))
        assert twice == EQUAL(2 * once)
        assert len(backward_products(product, with_weights=False)) == 1
