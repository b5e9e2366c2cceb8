"""Several decoding steps in one call of the kernel give the bits of single steps."""

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig
from realhf.api.config.choices import CacheType, WeightType
from realhf.api.model_config import ModelConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.decode.group import DecodeGroup
from realhf.models.engine.decode.scheduler import Request
from realhf.models.transformer import Transformer
from tests.models.test_fused_decode import CONFIGS, PARTLY_FUSED, model_of, pytestmark  # noqa: F401
from tests.scaling import subset

WIDE = replace(CONFIGS["llama"], hidden=256, n_heads=8, n_kv_heads=2, head_dim=32, intermediate=768)
"""Threads divide its products if there are few rows."""


def options_of(chance: random.Random) -> dict[str, Any]:
    return {
        "max_new_tokens": chance.choice([1, 2, 7, 20]),
        "min_new_tokens": chance.choice([0, 0, 1]),
        "greedy": chance.random() < 0.2,
        "temperature": chance.choice([1.0, 0.7, 1.5]),
        "top_k": chance.choice([0, 0, 3, 1000]),
        "top_p": chance.choice([1.0, 1.0, 0.9]),
        "kv_cache_dtype": chance.choice(list(CacheType)),
    }


def request_of(config: ModelConfig, chance: random.Random, **options: Any) -> Request:
    """Prompts of which some are prefixes of others, with random limits and stop tokens."""
    text = [chance.randrange(config.vocab) for _ in range(20)]
    rows = [torch.tensor(text[: chance.randint(1, 20)]) for _ in range(chance.randint(1, 7))]
    ids = tuple(RowId(i * 3, PROMPT) for i in range(len(rows)))
    prompts = SequenceBatch(ids, {"prompts": Column.of(rows)})
    stops = tuple(chance.sample(range(config.vocab), chance.randint(1, 4)))
    return Request(prompts, GenerationConfig(**options), chance.randint(1, 5), chance.getrandbits(40), stops, 30,
                   share_prefixes=chance.random() < 0.7)  # fmt: skip


@torch.no_grad()
def generated(model: Transformer, request: Request, n_slots: int, dtype: WeightType, steps: int = 8) -> list[Tensor]:
    """Return rows, tokens and both log-probabilities, by row."""
    group = DecodeGroup(model, request, deque(range(request.n_rows)), n_slots, steps_per_wait=steps)
    with model.decoding(dtype):
        while not group.is_finished:
            group.advance(group.forward(None))
    rows, tokens = (torch.cat(parts) for parts in zip(*group.slots.sampled, strict=True))
    order = rows.argsort(stable=True)
    pairs = [torch.cat(parts) for parts in zip(*group.logprobs, strict=True)]
    return [x[order] for x in (rows, tokens, *pairs)]


def check_bits(model: Transformer, seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    request = request_of(model.config, chance, **options_of(chance))
    n_slots, steps, dtype = chance.choice([1, 3, 8, 40]), chance.choice([1, 2, 8]), chance.choice(list(WeightType))
    found = generated(model, request, n_slots, dtype, steps)
    with monkeypatch.context() as patch:
        patch.setattr("realhf.models.transformer.fused_steps", lambda *_: None)
        expected = generated(model, request, n_slots, dtype)
    # later prompts are computed with others, and torch's products of experts depend on the other tokens
    is_exact = n_slots >= request.n_rows or not model.config.n_experts
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) if is_exact else torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", subset([*CONFIGS], 12))
def test_the_bits_are_those_of_single_steps(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS[name])
    with model.decoding():
        assert (model.fused_steps is not None) == (not model.config.logit_softcap)
    check_bits(model, f"{name} {seed}", monkeypatch)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "granite", "cohere2", "qwen2_moe"])
def test_a_model_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS[name], torch.bfloat16)
    for seed in range(4):
        check_bits(model, f"bf16 {name} {seed}", monkeypatch)


@pytest.mark.parametrize("config", [replace(CONFIGS["gemma2"], logit_softcap=2.0), *PARTLY_FUSED.values()])
def test_models_of_single_steps(config: ModelConfig) -> None:
    """The kernel has no cap of logits, and does not compute all blocks of some models."""
    model = model_of(config)
    with model.decoding():
        assert model.fused_steps is None


@pytest.mark.parametrize("config", [CONFIGS["llama"], WIDE], ids=["rows", "products"])
def test_threads_do_not_change_bits(config: ModelConfig) -> None:
    model, before = model_of(config), torch.get_num_threads()
    chance = random.Random(3)
    request = request_of(config, chance, max_new_tokens=20, temperature=1.2)
    try:
        torch.set_num_threads(1)
        expected = generated(model, request, 40, WeightType.auto)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for ours, theirs in zip(generated(model, request, 40, WeightType.auto), expected, strict=True):
                assert torch.equal(ours, theirs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("steps", [1, 8])
def test_logits_that_are_not_finite_name_the_row_and_position(steps: int) -> None:
    config = replace(CONFIGS["llama"], tied_embedding=False)
    model, chance = model_of(config), random.Random(1)
    request = request_of(config, chance, max_new_tokens=20)
    rows, tokens, *_ = generated(model, request, 40, WeightType.auto)
    first = tokens[rows == 0].tolist()
    assert len(set(first)) > 3, "the row samples several tokens"
    model.params.view("embed.weight")[first[2]] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        generated(model, request, 40, WeightType.auto, steps)


def arguments(model: Transformer, n_rows: int = 3) -> tuple[list[Any], dict[str, int]]:
    """Return valid arguments of the kernel, and the places of some."""
    with model.decoding():
        steps = model.fused_steps
        assert steps is not None
    cache, shape = model.new_cache(n_rows, 32), steps.blocks.shape
    cache.both.zero_()
    state = torch.tensor([[3, 4, 5], [6, 0, 2], [0, 1, 2], [0, 0, 0], [0, 0, 0], [9, 9, 9]])
    given = [state, steps.embed, None, steps.head, torch.tensor([1]), 8, model.config.vocab, 5, 0, 1.0, 0, 1.0, 1.0,
             1.0, 1.0, steps.blocks.weights, cache.k, cache.v, None, *shape.of_blocks(32), *shape.numbers]  # fmt: skip
    return given, {"state": 0, "head": 3, "stops": 4, "n_steps": 5, "vocab": 6, "min": 8, "temperature": 9, "top_p": 11}


def test_the_kernel_passes_opcheck() -> None:
    given, _ = arguments(model_of(replace(CONFIGS["llama"], n_layers=1)))
    found = torch.library.opcheck(torch.ops.realhf.decode_steps.default, tuple(given))
    assert set(found.values()) == {"SUCCESS"}, found


def changed_state(row: int, column: int, value: int) -> Tensor:
    state = torch.tensor([[3, 4, 5], [6, 0, 2], [0, 1, 2], [0, 0, 0], [0, 0, 0], [9, 9, 9]])
    state[row, column] = value
    return state


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("state", changed_state(0, 1, 40), "token 40 of 40"),
        ("state", changed_state(0, 1, -1), "token -1 of 40"),
        ("state", changed_state(1, 2, 32), "makes 8 steps from position 32 of 32"),
        ("state", changed_state(1, 2, 26), "makes 8 steps from position 26 of 32"),
        ("state", changed_state(1, 2, -1), "at position -1"),
        ("state", changed_state(5, 0, 0), "has 0 of 0 tokens"),
        ("state", changed_state(1, 1, 1 << 62), "from position 4611686018427387904 of 32"),
        ("state", torch.zeros(6, 4, dtype=torch.int64), "state must be"),
        ("state", torch.zeros(5, 3, dtype=torch.int64), "state must be"),
        ("n_steps", 0, "0 steps"),
        ("n_steps", 33, "33 steps of 32"),
        ("vocab", 41, "head must be tiles"),
        ("temperature", -1.0, "need temperature"),
        ("top_p", 0.0, "need temperature"),
        ("stops", torch.tensor([1], dtype=torch.int32), "stops must be"),
    ],
)
def test_invalid_arguments_are_refused(name: str, value: Any, message: str) -> None:
    given, places = arguments(model_of(CONFIGS["llama"]))
    torch.ops.realhf.decode_steps(*given)
    given[places[name]] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.realhf.decode_steps(*given)


def test_a_forbidden_token_outside_of_the_vocabulary_is_refused() -> None:
    given, places = arguments(model_of(CONFIGS["llama"]))
    given[places["stops"]] = torch.tensor([40])
    torch.ops.realhf.decode_steps(*given)
    given[places["min"]] = 2
    with pytest.raises(RuntimeError, match="token 40 is forbidden"):
        torch.ops.realhf.decode_steps(*given)
