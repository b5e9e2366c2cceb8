"""Decoding with matrices of bfloat16 and int8 is decoding with the rounded weights, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig
from realhf.api.config.choices import CacheType, WeightType
from realhf.data.batch import Column, SequenceBatch
from realhf.models.fused.fused_blocks import FusedBlocks
from realhf.models.fused.sublayer_weights import KernelWeight, SublayerWeights
from realhf.models.fused.tiles import TILE_N, pack_tiles
from realhf.models.kv_cache import KVCache
from realhf.models.transformer import Transformer
from tests.models.engine.tiny_engine import engine_on
from tests.models.test_fused_decode import (
    CACHED,
    CONFIGS,
    N_SLOTS,
    PARTLY_FUSED,
    decoded,
    distance,
    filled,
    model_of,
    pytestmark,  # noqa: F401
    without_kernel,
)
from tests.scaling import subset

TYPES = [WeightType.bfloat16, WeightType.int8]


def rounded(weight: Tensor, dtype: WeightType) -> Tensor:
    """Return a matrix whose numbers are those of its tiles of a type, computed by torch."""
    if dtype is WeightType.bfloat16:
        return weight.bfloat16().to(weight.dtype)
    values = weight.float()
    scales = values.abs().amax(-1, keepdim=True) / 127
    return (values / scales.clamp(min=1e-38)).round() * scales


def with_rounded_weights(fused: FusedBlocks, dtype: WeightType) -> FusedBlocks:
    def changed(part: KernelWeight) -> KernelWeight:
        if part.value is None or not part.is_matrix or part.keeps_type:
            return part
        return replace(part, value=rounded(part.value.detach(), dtype))

    def sublayer(parts: SublayerWeights | None) -> SublayerWeights | None:
        return None if parts is None else tuple(changed(part) for part in parts)

    return replace(fused, sublayers=tuple((sublayer(a), sublayer(b)) for a, b in fused.sublayers))


def of_rounded_weights(model: Transformer, dtype: WeightType) -> Transformer:
    reference = Transformer(model.config, model.params)
    weights = reference.weights
    assert weights.fused is not None
    reference._weights = replace(weights, fused=with_rounded_weights(weights.fused, dtype))
    return reference


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 15])
@pytest.mark.parametrize("name", subset(list(CONFIGS | PARTLY_FUSED), 12))
def test_decoding_is_that_of_the_rounded_weights(name: str, rows: int, dtype: WeightType) -> None:
    """Of one and two rows, which other loops compute, and of more."""
    model = model_of((CONFIGS | PARTLY_FUSED)[name])
    reference, some = of_rounded_weights(model, dtype), slice(rows)
    with model.decoding(dtype), reference.decoding():
        found, cache = decoded(model, rows=some)
        expected, other = decoded(reference, rows=some)
    assert torch.equal(found, expected) and torch.equal(cache.k, other.k) and torch.equal(cache.v, other.v)
    exact = decoded(model, rows=some)[0]
    assert not torch.equal(found, exact) and distance(found, exact) < (0.02 if dtype is TYPES[0] else 0.06)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["llama", "glm4_moe", "many experts"])
def test_a_row_does_not_depend_on_threads_or_other_rows(name: str, dtype: WeightType) -> None:
    model, before = model_of(CONFIGS[name]), torch.get_num_threads()
    try:
        with model.decoding(dtype):
            torch.set_num_threads(1)
            expected = decoded(model)[0]
            for threads, rows in ((3, slice(None)), (2, slice(7)), (1, slice(1)), (2, slice(2))):
                torch.set_num_threads(threads)
                assert torch.equal(decoded(model, rows=rows)[0], expected[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_model_in_bfloat16(dtype: WeightType) -> None:
    model = model_of(CONFIGS["llama"], torch.bfloat16)
    exact = decoded(model)[0]
    with model.decoding(dtype):
        found = decoded(model)[0]
    assert torch.equal(found, exact) if dtype is TYPES[0] else 0 < distance(found, exact) < 0.06


@pytest.mark.parametrize("outs", [1, 16, 40])
@pytest.mark.parametrize("extreme", [0.0, 1e-44, 1e-30, 1e30, float("inf"), float("nan")])
def test_tiles_of_integers(outs: int, extreme: float) -> None:
    """Rows of zeros stay zero, the largest number of a row is kept, and one that is not finite is not hidden."""
    weight = torch.randn(outs, 32, generator=torch.Generator().manual_seed(outs))
    weight[0] = 0.0
    weight[0, 3] = extreme
    tiles = pack_tiles(weight, WeightType.int8)
    n_tiles = -(-outs // TILE_N)
    assert tiles.shape == (n_tiles, 36 * TILE_N) and tiles.dtype == torch.int8
    scales = tiles[:, : 4 * TILE_N].contiguous().view(torch.float32)
    numbers = tiles[:, 4 * TILE_N :].unflatten(1, (8, TILE_N, 4)).transpose(1, 2).flatten(2)
    values = (numbers * scales[:, :, None]).flatten(0, 1)
    assert not values[outs:].any()
    if extreme >= 1e-30 and extreme < 1e31:
        torch.testing.assert_close(values[0], weight[0], rtol=1e-6, atol=0)
    elif extreme < 1e-30:
        assert values[0].abs().max() <= 1e-30
    else:
        assert not values[0].isfinite().all()
    steps = weight[1:].abs().amax(1, keepdim=True) / 127
    assert ((values[1:outs] - weight[1:]).abs() <= steps * 0.50001).all()


def test_a_model_without_kernels_is_refused() -> None:
    model = model_of(replace(CONFIGS["llama"], hidden=24, head_dim=12, intermediate=50))
    assert model.weights.fused is None
    with pytest.raises(ValueError, match="gen.weight_dtype=int8: the CPU kernel of decoding"), model.decoding(TYPES[1]):
        pass


def decoded_in_bfloat16(model: Transformer) -> tuple[Tensor, KVCache]:
    """Decode as ``decoded`` does, with the same cache in bfloat16."""
    cache = model.new_cache(N_SLOTS, 96, bf16=True)
    cache.both.copy_(filled(model).both)
    with torch.no_grad():
        for step in range(3):
            hidden = model.decode(torch.arange(len(CACHED)) % model.config.vocab, torch.tensor(CACHED) + step, cache)
    return hidden, cache


@pytest.mark.parametrize("name", subset(list(CONFIGS | PARTLY_FUSED), 12))
def test_a_cache_in_bfloat16(name: str) -> None:
    """The kernel and operations read the same rounded keys and values."""
    model = model_of((CONFIGS | PARTLY_FUSED)[name])
    found, cache = decoded_in_bfloat16(model)
    other, again = decoded_in_bfloat16(without_kernel(model))
    exact, plain = decoded(model)
    assert cache.both.dtype == torch.bfloat16 and cache.bytes_per_token * 2 == plain.bytes_per_token
    assert distance(found, other) < 0.003 and distance(cache.both, again.both) < 0.003
    assert 1e-5 < distance(found, exact) < 0.02


def test_the_cache_of_a_generation_is_bfloat16(actor_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are written to it, shared, and read again; log-probabilities of first tokens are those of the prefill."""
    engine, made, new_cache = engine_on(actor_folder, trained=False), list[KVCache](), Transformer.new_cache
    monkeypatch.setattr(
        Transformer, "new_cache", lambda *given, **options: made.append(new_cache(*given, **options)) or made[-1]
    )
    rows = [torch.arange(3, 9 + i) for i in range(5)]
    prompts = SequenceBatch(tuple(RowId(i, PROMPT) for i in range(5)), {"prompts": Column.of(rows)})
    options = GenerationConfig(max_new_tokens=12, max_num_seqs=4, greedy=True)
    exact = engine.generate(prompts, options, 3, 7)
    rounded = engine.generate(prompts, replace(options, kv_cache_dtype=CacheType.bfloat16), 3, 7)
    assert [cache.both.dtype for cache in made] == [torch.float32, torch.bfloat16]
    assert not torch.equal(exact["logprobs"], rounded["logprobs"])
    firsts = [
        [row[row != 0][0] for row in found["logprobs"].split(found.lengths("tokens"))] for found in (exact, rounded)
    ]
    assert torch.equal(torch.stack(firsts[0]), torch.stack(firsts[1]))
