"""The fused decoding kernel against the unfused reference implementation."""

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.api.model_config import GatedDelta, Latent, ModelConfig
from realhf.models.fused.tiles import pack_tiles, tiled_linear
from realhf.models.hf_folder import init_random
from realhf.models.kv_cache import KVCache
from realhf.models.transformer import Transformer
from realhf.ops import extension
from realhf.plan.machines.processor import has_bf16_products
from tests.models.tiny_models import whole_params
from tests.scaling import examples

MULTIPLIES_PAIRS = has_bf16_products() or "REALHF_EMULATES_PAIRS" in os.environ
"""Pairs are products in bfloat16, whose inputs are rounded, as torch rounds them; else products are in float32."""
LLAMA = ModelConfig("llama", 3, 64, 4, 2, 16, 112, 40, 128, init_std=0.2)
LAYER_NORMS = {
    "norm": "layer",
    "qkv_bias": True,
    "proj_bias": True,
    "mlp_bias": True,
    "mlp": "ungated",
    "n_kv_heads": 4,
}
EXPERTS = {"n_experts": 6, "experts_per_token": 3, "expert_intermediate": 32}
CONFIGS = {
    "llama": LLAMA,
    "wide heads": replace(LLAMA, head_dim=48, n_heads=6, n_kv_heads=1),
    "qwen2": replace(LLAMA, qkv_bias=True, tied_embedding=True),
    "qwen3": replace(LLAMA, qk_norm="head"),
    "mistral": replace(LLAMA, sliding_windows=(5, 5, 0)),
    "gemma": replace(LLAMA, norm_offset=1.0, activation="gelu_tanh", scaled_embedding=True),
    "gemma2": replace(LLAMA, norm_offset=1.0, activation="gelu_tanh", norm_placement="sandwich", attention_softcap=1.5,
                      attention_scale=0.3, sliding_windows=(0, 7, 0)),
    "gpt2": replace(LLAMA, **LAYER_NORMS, activation="gelu_tanh", learned_positions=True),
    "gpt_neox": replace(LLAMA, **LAYER_NORMS, activation="gelu", parallel_residual=True, rotary_dims=8),
    "gemma3": replace(LLAMA, norm_offset=1.0, norm_placement="sandwich", qk_norm="head", sliding_windows=(7, 0, 7),
                      windowed_rotary_base=100.0, rotary_scaling=(("rope_type", "linear"), ("factor", 4.0))),
    "granite": replace(LLAMA, residual_scale=0.4, attention_scale=0.3, embedding_scale=2.0, logit_scale=0.5,
                       mlp_bias=True),
    "cohere2": replace(LLAMA, norm="layer", norm_bias=False, shared_norm=True, parallel_residual=True,
                       sliding_windows=(5, 5, 0), unrotated_layers=(2,), logit_scale=0.4),
    "smollm3": replace(LLAMA, unrotated_layers=(0, 2)),
    "ministral3": replace(LLAMA, query_growth=(0.5, 16)),
    "olmo2": replace(LLAMA, norm_placement="post", qk_norm="full"),
    "gates": replace(LLAMA, attention_gate=True, qk_norm="head", rotary_dims=8),
    "mixtral": replace(LLAMA, **EXPERTS),
    "olmoe": replace(LLAMA, **EXPERTS, qk_norm="full", renormalise_experts=False),
    "qwen2_moe": replace(LLAMA, **EXPERTS, qkv_bias=True, shared_intermediate=48, shared_gate=True, dense_layers=(1,)),
    "glm4_moe": replace(LLAMA, **EXPERTS, qkv_bias=True, expert_scores="sigmoid", choice_bias=True, expert_scale=1.5,
                        expert_groups=(3, 2), shared_intermediate=32, dense_layers=(0,), rotary_dims=8),
    "gpt_oss": replace(LLAMA, **EXPERTS, qkv_bias=True, proj_bias=True, expert_bias=True, attention_sinks=True,
                       activation="clamped_swiglu", sliding_windows=(5, 0, 5)),
    "many experts": replace(LLAMA, n_experts=70, experts_per_token=9, expert_intermediate=16, norm_placement="sandwich",
                            residual_scale=0.4),
}  # fmt: skip
LATENT = replace(LLAMA, **EXPERTS, latent=Latent(kv_rank=24, value_dim=12, q_rank=20), n_kv_heads=4, head_dim=20,
                 rotary_dims=8, shared_intermediate=32, dense_layers=(0,))  # fmt: skip
PARTLY_FUSED = {
    "latent": LATENT,
    "delta": replace(LLAMA, **EXPERTS, delta=GatedDelta(2, 4, 8, 8, 4), delta_layers=(0, 2), attention_gate=True,
                     qk_norm="head", shared_intermediate=32, shared_gate=True),
    "heads of 12": replace(LLAMA, head_dim=12),
    "MLPs of 50": replace(LLAMA, intermediate=50, proj_bias=True),
    "experts of 24": replace(LLAMA, **EXPERTS | {"expert_intermediate": 24}),
}  # fmt: skip
"""Models of which the kernel computes one sublayer of some blocks."""
N_SLOTS, CACHED = 24, (1, 6, 2, 30, 17, 64, 5, 0, 9, 33, 12, 3, 8, 1, 21)

pytestmark = pytest.mark.skipif(
    extension.kernel("decode_blocks", "cpu") is None, reason="the compiled kernels are not built"
)


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    params = whole_params(config, dtype)
    init_random(config, params, 0)
    generator = torch.Generator().manual_seed(1)
    for name in params.names:  # non-trivial norms and biases
        view = params.view(name)
        if view.dim() == 1:
            view.add_(torch.randn(view.shape, generator=generator).mul_(0.1).to(dtype))
    return Transformer(config, params)


def without_kernel(model: Transformer) -> Transformer:
    reference = Transformer(model.config, model.params)
    reference._weights = replace(reference.weights, fused=None)
    return reference


def filled(model: Transformer) -> KVCache:
    cache = model.new_cache(N_SLOTS, 96)
    generator = torch.Generator().manual_seed(2)  # everywhere: the reference also reads masked positions
    for store in (cache.k, cache.v):
        store.copy_(torch.randn(store.shape, generator=generator))
    return cache


def decoded(model: Transformer, steps: int = 3, rows: slice = slice(None)) -> tuple[Tensor, KVCache]:
    """Return the hidden states of the last step and the cache after it; ``rows`` selects from CACHED."""
    cache, tokens = filled(model), torch.arange(len(CACHED))[rows] % model.config.vocab
    for store in (cache.k, cache.v):
        store[:, : len(tokens)] = store[:, : len(CACHED)][:, rows].clone()
    with torch.no_grad():
        for step in range(steps):
            hidden = model.decode(tokens, torch.tensor(CACHED)[rows] + step, cache)
    return hidden, cache


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", CONFIGS | PARTLY_FUSED)
def test_fused_blocks_equal_the_reference(name: str) -> None:
    model = model_of((CONFIGS | PARTLY_FUSED)[name])
    assert model.weights.fused is not None and model.weights.fused.is_whole == (name in CONFIGS)
    found, cache = decoded(model)
    expected, reference_cache = decoded(without_kernel(model))
    assert distance(found, expected) < 1e-5
    for ours, theirs in ((cache.k, reference_cache.k), (cache.v, reference_cache.v)):
        assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "mixtral", "gpt_oss"])
def test_bfloat16_weights_are_close_to_float32(name: str) -> None:
    model = model_of(CONFIGS[name], torch.bfloat16)
    assert model.weights.fused is not None
    precise = model_of(CONFIGS[name])
    precise.params.data.copy_(model.params.data)
    found, expected = decoded(model)[0], decoded(without_kernel(precise))[0]
    of_torch = distance(decoded(without_kernel(model))[0], expected)
    limit = 1.5 * of_torch if MULTIPLIES_PAIRS else min(of_torch, 1e-2)
    assert found.dtype == torch.bfloat16 and distance(found, expected) <= limit


@pytest.mark.parametrize("name", ["llama", "gpt2", "glm4_moe", "gpt_oss"])
def test_a_row_is_bitwise_independent_of_the_batch_size(name: str) -> None:
    """Batches of one, two and more rows use different loops over the tiles, with the same order of summation."""
    model = model_of(CONFIGS[name])
    whole = decoded(model)[0]
    for count in (1, 2, 3, 7, 13):
        assert torch.equal(decoded(model, rows=slice(0, count))[0], whole[:count])


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "many experts", "latent", "delta"])
def test_the_experts_of_tokens_are_recorded(name: str) -> None:
    model = model_of((CONFIGS | PARTLY_FUSED)[name])
    slots, positions = torch.arange(5), torch.arange(5) * 3
    recorded = []
    for each in (model, without_kernel(model)):
        cache = each.new_cache(N_SLOTS, 96, records_experts=True)
        cache.k.zero_(), cache.v.zero_()
        with torch.no_grad():
            each.decode(slots, positions, cache)
        assert cache.experts is not None
        recorded.append(cache.experts.read(slots, positions).sort(-1).values)
    assert torch.equal(*recorded) and len(recorded[0].unique()) > 3


@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])
def test_weights_that_are_no_numbers_choose_different_experts(name: str) -> None:
    """A row then has no numbers either, which sampling reports; others are as before."""
    model = model_of(CONFIGS[name])
    whole = decoded(model)[0]
    model.params.view("embed.weight")[3] = torch.nan
    found = decoded(model)[0]
    assert found[3].isnan().all() and torch.equal(found[[0, 1, 2, *range(4, 15)]], whole[[0, 1, 2, *range(4, 15)]])


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 3), st.integers(2, 11), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
       st.sampled_from((0, 16)), st.integers(1, 150), st.randoms(use_true_random=False))  # fmt: skip
def test_any_routing_of_any_number_of_rows(
    n_groups: int, size: int, is_sigmoid: bool, renormalises: bool, has_bias: bool, is_gated: bool, shared: int,
    n_rows: int, rng: random.Random,
) -> None:  # fmt: skip
    """A token may choose all experts, one, or those of one group; threads take several passes over many rows."""
    n_used = rng.randint(1, n_groups)
    top_k = rng.randint(1, n_used * size)
    config = replace(
        LLAMA, n_layers=2, n_experts=n_groups * size, experts_per_token=top_k, expert_groups=(n_groups, n_used),
        expert_intermediate=16, expert_scores="sigmoid" if is_sigmoid else "softmax", choice_bias=has_bias,
        renormalise_experts=renormalises, shared_intermediate=shared, shared_gate=bool(shared) and is_gated,
        expert_scale=rng.choice((1.0, 2.5)), dense_layers=rng.choice(((), (0,), (1,))),
    )  # fmt: skip
    model = model_of(config)
    tokens, positions = torch.arange(n_rows) % config.vocab, torch.zeros(n_rows, dtype=torch.int64)
    with torch.no_grad():
        found, expected = (
            each.decode(tokens, positions, each.new_cache(n_rows, 4)) for each in (model, without_kernel(model))
        )
    assert model.weights.fused is not None and model.weights.fused.is_whole
    assert distance(found, expected) < 1e-5


def test_weights_are_tiled_once_within_decoding() -> None:
    model = model_of(LLAMA)
    each = decoded(model)[0]
    with model.decoding(), torch.no_grad():
        assert torch.equal(decoded(model)[0], each)
        for name in ("layers.0.wo", "layers.1.down", "head.weight"):
            model.params.view(name).mul_(1.1)
        assert torch.equal(decoded(model)[0], each)
        assert distance(model.logits(each) * 1.1, F.linear(each, model.head)) < 1e-5
    with torch.no_grad():
        assert distance(decoded(model)[0], each) > 1e-3
        assert torch.equal(model.logits(each), F.linear(each, model.head))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 31])
@pytest.mark.parametrize("outs", [1, 16, 40, 521])
def test_tiled_linear_equals_a_matrix_product(outs: int, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(outs + rows)
    x = torch.randn(rows, 272, generator=generator).to(dtype)
    weight = torch.randn(outs, 272, generator=generator).to(dtype)
    found, before = tiled_linear(x, pack_tiles(weight), outs), torch.get_num_threads()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    try:
        torch.set_num_threads(3)
        assert torch.equal(tiled_linear(x, pack_tiles(weight), outs), found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-39, 1e30, float("inf"), float("nan")])
def test_tiled_linear_of_extreme_numbers(factor: float, dtype: torch.dtype) -> None:
    """A row with numbers that are not finite has no others, and does not change other rows."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 96, generator=generator).to(dtype) for n in (9, 40))
    plain, tiles = tiled_linear(x, pack_tiles(weight), 40), pack_tiles(weight)
    x[4] *= factor
    found, exact = tiled_linear(x, tiles, 40), x.double() @ weight.double().t()
    assert torch.equal(found.isfinite(), exact.isfinite())
    assert torch.equal(found[:4], plain[:4]) and torch.equal(found[5:], plain[5:])
    size = x[4].double().abs() @ weight.double().abs().t()
    assert not exact[4].isfinite().all() or ((found[4] - exact[4]).abs() <= 1e-6 * size + 1e-37).all()


def test_tiled_linear_rejects_wrong_sizes() -> None:
    tiles = pack_tiles(torch.randn(40, 32))
    found = torch.library.opcheck(torch.ops.realhf.tiled_linear.default, (torch.randn(3, 32), tiles, 40))
    assert set(found.values()) == {"SUCCESS"}, found
    with pytest.raises(RuntimeError, match=r"tiles must be \[ceil\(50 / 16\), 32, 16\]"):
        tiled_linear(torch.randn(3, 32), tiles, 50)
    with pytest.raises(RuntimeError, match="D a multiple of 16"):
        tiled_linear(torch.randn(3, 31), tiles, 40)
    with pytest.raises(RuntimeError, match="of the same type"):
        tiled_linear(torch.randn(3, 32).bfloat16(), tiles, 40)


@pytest.mark.parametrize("name", ["llama", "glm4_moe", "many experts"])
def test_a_row_does_not_depend_on_threads_or_other_rows(name: str) -> None:
    model, before = model_of(CONFIGS[name]), torch.get_num_threads()
    whole = decoded(model)[0]
    try:
        torch.set_num_threads(3)
        assert torch.equal(decoded(model)[0], whole)
    finally:
        torch.set_num_threads(before)
    for first in (0, 1, 4, 14):
        assert torch.equal(decoded(model, rows=slice(first, first + 5))[0], whole[first : first + 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CONFIGS, "heads of 12"])
def test_threads_that_divide_products_compute_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Wide layers are divided by outputs and heads, narrow ones by rows."""
    config = (CONFIGS | PARTLY_FUSED)[name]
    wide = {"hidden": 256, "intermediate": 528}
    if config.n_experts:
        wide |= {"expert_intermediate": 512}
    model, before = model_of(replace(config, **wide), dtype), torch.get_num_threads()
    numbers, shared = torch.tensor([7, 3, 7, 7, 3, 1, *[9] * 9]), torch.tensor([1, 6, 1, 1, 6, 17, *[0] * 9])
    prefixes = torch.stack((numbers, shared, torch.tensor([0, 1, 0, 0, 1, 5, *[6] * 9])))
    can_share = not any(config.sliding_windows) and model.weights.fused is not None and model.weights.fused.is_whole

    def results() -> list[Tensor]:
        hidden, cache = decoded(model)
        tokens, positions, shared_cache = torch.arange(15), torch.tensor(CACHED).clamp(min=17), filled(model)
        with torch.no_grad():
            of_prefixes = model.decode(tokens, positions, shared_cache, None, prefixes) if can_share else hidden
        return [hidden, cache.k, cache.v, of_prefixes]

    try:
        torch.set_num_threads(1)
        expected = results()
        for n_threads in (2, 3, 7):
            torch.set_num_threads(n_threads)
            assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True)), n_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["llama", "wide heads", "gemma2", "qwen2_moe", "gates"])
def test_common_prefixes_are_read_once(name: str) -> None:
    """Slots of one prompt, more than the kernel groups, are at any index and any position after it."""
    model = model_of(CONFIGS[name])
    numbers = torch.tensor([7, 3, 7, 7, 3, 1, *[9] * 18])
    shared = torch.tensor([20, 5, 20, 20, 5, 0, *[33] * 18])
    positions = shared + torch.arange(N_SLOTS) % 7
    cache, reference_cache = filled(model), filled(model)
    for store in (cache.k, cache.v, reference_cache.k, reference_cache.v):
        for slot in range(N_SLOTS):
            first = int((numbers == numbers[slot]).nonzero()[0])
            store[:, slot, :, : shared[slot]] = store[:, first, :, : shared[slot]].clone()
    tokens = torch.arange(N_SLOTS)
    with torch.no_grad():
        expected = without_kernel(model).decode(tokens, positions, reference_cache)
        separate = model.decode(tokens, positions, filled_like(model, reference_cache))
        for store in (cache.k, cache.v):  # the other slots' copies are not read
            for slot in (0, 2, 4, *range(7, N_SLOTS)):
                store[:, slot, :, : shared[slot]] = torch.nan
        own = torch.stack((numbers, shared, tokens))
        shared_slot = torch.stack((numbers, shared, torch.tensor([3, 1, 3, 3, 1, 5, *[6] * 18])))
        if model.supports_shared_prefixes:
            assert torch.equal(model.decode(tokens, positions, cache, prefixes=shared_slot), separate)
            ungrouped = torch.stack((torch.arange(N_SLOTS), shared, shared_slot[2]))  # a prefix number per slot
            assert torch.equal(model.decode(tokens, positions, cache, prefixes=ungrouped), separate)
        else:
            with pytest.raises(RuntimeError, match="row 0 cannot read what row 3 holds"):
                model.decode(tokens, positions, cache, prefixes=shared_slot)
        cache = filled_like(model, reference_cache)
        assert distance(model.decode(tokens, positions, cache, prefixes=own), expected) < 1e-5
        with pytest.raises(RuntimeError, match="row 0 at position 20 shares 21 tokens"):
            model.decode(tokens, positions, cache, prefixes=own + torch.tensor([[0], [1], [0]]))
        with pytest.raises(RuntimeError, match="row 23 cannot read what row 24 holds"):
            model.decode(tokens, positions, cache, prefixes=own + torch.tensor([[0], [0], [1]]) * (tokens == 23))


def filled_like(model: Transformer, other: KVCache) -> KVCache:
    cache = model.new_cache(N_SLOTS, 96)
    cache.k.copy_(other.k)
    cache.v.copy_(other.v)
    return cache


def test_weight_updates_are_visible() -> None:
    """Fused blocks have views of the weights, not copies."""
    model = model_of(LLAMA)
    before = decoded(model)[0]
    model.params.data.mul_(1.1)
    assert distance(decoded(model)[0], before) > 1e-2
    assert distance(decoded(model)[0], decoded(without_kernel(model))[0]) < 1e-5


@pytest.mark.parametrize("change", [{"hidden": 72}, {"activation": "relu"}, {"activation": "clamped_swiglu",
                                    "mlp": "ungated"}])  # fmt: skip
def test_unsupported_models_are_not_fused(change: dict[str, Any]) -> None:
    fused = model_of(replace(LLAMA, **change)).weights.fused
    assert fused is None or all(mlp is None for _, mlp in fused.sublayers)


def test_empty_batches_and_positions_beyond_the_cache() -> None:
    model = model_of(LLAMA)
    with torch.no_grad():
        none = torch.empty(0, dtype=torch.int64)
        assert model.decode(none, none, filled(model)).shape == (0, LLAMA.hidden)
        with pytest.raises(RuntimeError, match="position 96 of 96"):
            model.decode(torch.tensor([3]), torch.tensor([96]), filled(model))


def test_the_kernel_passes_opcheck() -> None:
    model = model_of(replace(LLAMA, n_layers=1, **EXPERTS))
    cache, fused = filled(model), model.weights.fused
    assert fused is not None
    tiled = fused.tiled()
    given = (
        torch.randn(5, 64), [*tiled.sublayers[0][0], *tiled.sublayers[0][1], *tiled.final_norm], cache.k, cache.v,
        torch.arange(5), None, None, model.rotary.tables(96), [0], [0], [1], [6, 0, 6, 3, 1, 1, 0, 1, 32, 0],
        torch.empty(1, 5, 3, dtype=torch.int64), 0, 4, 0, 0, True, False, False, False, False, 1e-6, 0.0, 1.0, 0.25,
        0.0, 0.0, 0, 1.0,
    )  # fmt: skip
    found = torch.library.opcheck(torch.ops.realhf.decode_blocks.default, given)
    assert set(found.values()) == {"SUCCESS"}, found
