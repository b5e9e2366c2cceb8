"""Multi-turn generation: the same rows in every order and layout, with the log-probabilities of the trainer."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.data.turns import TurnOutput
from realhf.models.engine.decode import session_table
from realhf.models.engine.native import NativeEngine
from realhf.models.transformer import Transformer
from tests.models.engine.scripted_driver import LENGTHS, LIMIT, MESHES, SEED, N, play, play_everywhere, reply_to
from tests.models.engine.tiny_engine import engine_on, prompts_of
from tests.models.tiny_models import CAPS, SIZES, WINDOW, hf_model
from tests.scaling import subset

FUSED, OTHERS = ("fused llama", "fused gpt2", "fused gemma2"), ("llama", "gpt2", "mistral", "qwen3_moe", "qwen3_next")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: a folder with a tiny random model. Those in ``FUSED`` decode by the fused kernel."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    gpt2 = GPT2Config(vocab_size=SIZES["vocab_size"], n_embd=64, n_layer=2, n_head=4, n_positions=64)
    models = {
        "fused llama": LlamaForCausalLM(LlamaConfig(**sizes)),
        "fused gpt2": GPT2LMHeadModel(gpt2),
        "fused gemma2": Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=WINDOW, **CAPS)),
        **{name: hf_model(name) for name in OTHERS},
    }
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp("model")
        model.save_pretrained(found[name])
    return found


def computes_whole_stage(engine: NativeEngine) -> bool:
    """Return True if a decoding step is one call of the fused kernel."""
    fused = engine.model.weights.fused
    return fused is not None and fused.is_whole


@pytest.fixture(params=[*FUSED, *OTHERS])
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> NativeEngine:
    engine = engine_on(folders[request.param], trained=False)
    assert computes_whole_stage(engine) == (request.param in FUSED)
    return engine


def test_the_first_turn_is_that_of_generate(engine: NativeEngine) -> None:
    config = GenerationConfig(max_new_tokens=LIMIT)
    made = engine.generate(prompts_of(LENGTHS), config, N, SEED)
    rows, turns = play(engine)
    for (key, some), ids, tokens, logprobs in zip(
        turns, made.ids, *(made.columns[name].rows() for name in ("tokens", "logprobs")), strict=True
    ):
        assert tuple(key) == (ids.prompt, ids.sample)
        first = some[0]["tokens"]
        assert first == tokens[len(tokens) - len(first) :].tolist()
        torch.testing.assert_close(torch.tensor(some[0]["logprobs"]), logprobs[-len(first) :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("delays, limits, fed", subset(product([1, 2, 3], [(1, 1), (2, 3), (12, 12)], [0, 5, 16]), 6))
def test_no_order_of_replies_changes_a_row(
    delays: int, limits: tuple[int, int], fed: int, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probabilities are equal, bit for bit with the fused kernel."""
    monkeypatch.setattr(session_table, "MAX_FED", fed)
    monkeypatch.setattr(session_table, "MAX_TOGETHER", fed)
    expected, found = play(engine), play(engine, delays, *limits)
    if computes_whole_stage(engine):
        assert found == expected
    assert found[0] == expected[0]
    for (_, turns), (_, others) in zip(found[1], expected[1], strict=True):
        for turn, other in zip(turns, others, strict=True):
            assert turn["logprobs"] == pytest.approx(other["logprobs"], abs=2e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"greedy": True}, {"top_k": 5}])
@pytest.mark.parametrize("fed", [0, 16])
def test_logprobs_are_those_of_the_trainer(
    options: dict, fed: int, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_table, "MAX_FED", fed)
    monkeypatch.setattr(session_table, "MAX_TOGETHER", fed)
    rows, turns = play(engine, 1, **options)
    batch = SequenceBatch(
        tuple(RowId(*key) for key, _ in rows), {"tokens": Column.of([torch.tensor(tokens) for _, tokens in rows])}
    )
    temperature = 1.0 if options.get("greedy") else options.get("temperature", 1.0)
    expected = engine.forward(batch, lambda outputs, _: outputs.logprobs(temperature))
    for (key, row), (_, some), logprobs in zip(rows, turns, expected.split(batch.lengths("tokens")), strict=True):
        at = LENGTHS[key[0]]
        for number, turn in enumerate(some, 1):
            found = torch.tensor(turn["logprobs"])
            assert row[at : at + len(found)] == turn["tokens"]
            torch.testing.assert_close(found, logprobs[at : at + len(found)], atol=2e-5, rtol=0)
            at += len(found) + len(reply_to(TurnOutput(**turn), number))


@pytest.mark.slow
@pytest.mark.dist
def test_all_ranks_of_all_layouts_return_the_same_rows(on_ranks: Callable[..., list]) -> None:
    results = on_ranks(4, play_everywhere)
    rows, turns = results[0]["d1"]
    for name, mesh in MESHES.items():
        for rank in mesh:
            found = results[rank][name]
            assert found == results[mesh[0]][name] and found[0] == rows
            for (_, some), (_, others) in zip(found[1], turns, strict=True):
                for turn, other in zip(some, others, strict=True):
                    assert turn["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


@pytest.mark.parametrize("delays, limits", [(1, (12, 12)), (3, (2, 3))])
def test_new_tokens_together_are_the_same_bits_as_one_by_one(
    delays: int, limits: tuple[int, int], engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not engine.model.decodes_tokens_together:
        pytest.skip("operation by operation, rows depend on each other's number")
    found = play(engine, delays, *limits)
    monkeypatch.setattr(session_table, "MAX_STEP", 4)
    assert play(engine, delays, *limits) == found
    monkeypatch.setattr(session_table, "MAX_FED", 1000)
    monkeypatch.setattr(Transformer, "decodes_tokens_together", False)
    assert play(engine) == found


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"greedy": True}])
def test_several_steps_are_the_same_bits_as_single_ones(
    options: dict, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [play(engine, delays, *limits, **options) for delays, limits in ((None, (4, 6)), (2, (12, 12)))]
    monkeypatch.setattr("realhf.models.transformer.fused_steps", lambda *_: None)
    assert [play(engine, delays, *limits, **options) for delays, limits in ((None, (4, 6)), (2, (12, 12)))] == found
