"""Values that are not finite end generation and training with an error that names the row and the cause."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.config import GenerationConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine.native import NativeEngine
from realhf.models.engine.nonfinite import nonfinite_loss
from realhf.models.engine.vllm import VllmEngine
from tests.models.engine.decode.test_generate import HfModels, responses_of
from tests.models.engine.tiny_engine import FAMILIES, VOCAB, counted, engine_on, nll, prompts_of, rows_of
from tests.scaling import examples

LENGTHS, SEED = (3, 1, 7, 7, 12), 11
CONFIGS = (
    GenerationConfig(max_new_tokens=9),
    GenerationConfig(max_new_tokens=9, temperature=0.7, top_p=0.8, max_num_seqs=3),
    GenerationConfig(max_new_tokens=9, top_k=5, top_p=0.9, min_new_tokens=2, max_num_seqs=4),
    GenerationConfig(max_new_tokens=9, greedy=True),
)
MESSAGE = re.compile(
    r"the logits of prompt (\d+), sample (\d+) are not finite at response token (\d+) \(position (\d+)\); "
    r"(?:the first values that are not finite are those of (?P<place>.*?) at position (?P<at>\d+)|computed again.*?)"
    r"(?:; parameters that are not finite: (?P<names>.*?))?; lower the learning rate, .*"
)


@pytest.fixture(scope="module")
def engines(hf_models: HfModels) -> dict[str, NativeEngine]:
    return {family: engine_on(hf_models[family][0], trained=False) for family in FAMILIES}


def place_of(name: str) -> str:
    """Return where a parameter is first used."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer:
        return f"layer {layer[1]}"
    return "the embedding" if name.startswith("embed.") else "the head" if name == "head.weight" else "the final norm"


def error_of(engine: NativeEngine, prompts: SequenceBatch, config: GenerationConfig, n: int = 2) -> re.Match | None:
    """Return the parsed message of the error of a generation; None if all its log-probabilities are finite."""
    try:
        made = engine.generate(prompts, config, n, SEED)
    except ValueError as error:
        found = MESSAGE.fullmatch(str(error))
        assert found is not None, error
        return found
    assert made["logprobs"].isfinite().all() and made["sampling_logprobs"].isfinite().all()
    return None


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.sampled_from(FAMILIES), st.sampled_from(CONFIGS), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_generation_names_layer_and_parameter(
    engines: dict[str, NativeEngine], data: st.DataObject, family: str, config: GenerationConfig, value: float
) -> None:
    engine, prompts = engines[family], prompts_of(LENGTHS)
    params = engine.params
    name = data.draw(st.sampled_from(params.names))
    start = data.draw(st.sampled_from([None, *range(0, params.view(name).numel(), 5)]))  # all elements, or one
    before = params.data.clone()
    params.view(name).view(-1)[slice(start, None if start is None else start + 1)] = value
    try:
        found = error_of(engine, prompts, config)
    finally:
        params.data.copy_(before)
    if start is None and math.isnan(value):
        assert found is not None and (found["place"], found["names"]) == (place_of(name), name)
        assert (found[2], found[3], int(found[4])) == ("0", "0", LENGTHS[int(found[1])])
    elif found is not None:
        assert found["names"] == name


@pytest.mark.parametrize("config", CONFIGS)
def test_generation_names_the_row(llama: Path, config: GenerationConfig) -> None:
    """The embeddings of all tokens but one are finite: rows fail at that token, in the prompt or in the response."""
    engine = engine_on(llama, trained=False)
    prompts, special = prompts_of(LENGTHS, (8, 2, 5, 3, 7)), VOCAB
    numbers = [i.prompt for i in prompts.ids]
    expected = responses_of(engine.generate(prompts, config, 2, SEED))
    in_prompts = {t for row in prompts.columns["prompts"].rows() for t in row.tolist()}
    for special in range(2, VOCAB):
        embedding = engine.params.view("embed.weight")[special]
        before = embedding.clone()
        embedding.fill_(math.nan)
        found = error_of(engine, prompts, config)
        embedding.copy_(before)
        if found is None:
            assert special not in in_prompts and all(special not in row[:-1] for row in expected)
            continue
        prompt, sample, count, position = (int(found[i]) for i in range(1, 5))
        tokens = prompts.columns["prompts"].rows()[numbers.index(prompt)].tolist()
        response = expected[numbers.index(prompt) * 2 + sample][:count]
        assert position == len(tokens) + count and (tokens + response).index(special) == int(found["at"])
        assert count == 0 or response.index(special) == count - 1  # it failed at once
        assert (found["place"], found["names"]) == ("the embedding", "embed.weight")


def test_a_temperature_can_make_finite_logits_overflow(llama: Path) -> None:
    engine, config = engine_on(llama, trained=False), GenerationConfig(max_new_tokens=3, temperature=1e-39)
    with pytest.raises(ValueError, match="prompt 0, sample 0 .*computed again, all values are finite.*temperature"):
        engine.generate(prompts_of((4,)), config, 1, SEED)


class FakeServer:
    """Answers a generation with tokens and log-probabilities given by row."""

    version = 0

    def __init__(self, tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        self.reply: dict[str, Any] = {"tokens": tokens, "logprobs": logprobs}

    def call(self, method: str, **_: Any) -> dict[str, Any]:
        assert method == "generate"
        return self.reply

    def end_call(self) -> None:
        pass


@settings(max_examples=examples(30), deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), min_size=4, max_size=4), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_log_probability_of_vllm_names_the_row(
    engines: dict[str, NativeEngine], data: st.DataObject, counts: list[int], value: float
) -> None:
    row = data.draw(st.integers(0, 3))
    index = data.draw(st.integers(0, counts[row] - 1))
    logprobs = [[-1.0] * count for count in counts]
    logprobs[row][index] = value
    native, tokens = engines["llama"], [[5] * count for count in counts]
    base = {field.name: getattr(native, field.name) for field in fields(native)}
    finite = VllmEngine(**base, server=FakeServer(tokens, [[-1.0] * count for count in counts]))  # type: ignore
    prompts = prompts_of((3, 6), (4, 9))
    assert responses_of(finite.generate(prompts, GenerationConfig(), 2, SEED)) == tokens
    engine = replace(finite, server=FakeServer(tokens, logprobs))
    found = error_of(engine, prompts, GenerationConfig())
    assert found is not None and found["place"] is None
    assert [int(found[i]) for i in range(1, 5)] == [(4, 9)[row // 2], row % 2, index, (3, 6)[row // 2] + index]


@settings(max_examples=examples(30), deadline=None)
@given(st.data(), st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans())
def test_training_on_values_that_are_not_finite_changes_no_weight(
    trained: NativeEngine, data: st.DataObject, value: float, in_gradient: bool
) -> None:
    """One advantage is not finite; its product with the loss has a gradient, or is only added to the loss."""
    batch = rows_of((4, 9, 2, 7), 2)
    token = data.draw(st.integers(0, 21))
    weights = torch.ones(22)
    weights[token] = value
    batch = batch.with_tokenwise("mask", torch.ones(22, dtype=torch.uint8)).with_tokenwise("weights", weights)

    def weighted(outputs: Outputs, part: SequenceBatch) -> Loss:
        loss = nll(outputs, part)
        more = (outputs.logprobs() if in_gradient else 1.0) * part["weights"]
        return Loss(loss.total + more.sum(), loss.stats)

    before = trained.params.data.clone()
    row = (0, 0, 0, 0, *(1,) * 9, 2, 2, *(3,) * 7)[token]
    with pytest.raises(ValueError, match=f"the loss of .* is (nan|inf|-inf); .*'weights' of prompt {row // 2}, sample"):
        trained.train(batch, weighted, counted(batch))
    assert torch.equal(trained.params.data, before) and trained.optimizer.steps == 0


@pytest.fixture(scope="module")
def trained(llama: Path) -> NativeEngine:
    return engine_on(llama)


def test_a_statistic_that_is_not_a_number_exceeds_its_limit(llama: Path) -> None:
    engine, batch = engine_on(llama), rows_of((4, 9))

    def loss_fn(outputs: Outputs, part: SequenceBatch) -> Loss:
        return Loss(nll(outputs, part).total, {"kl": (math.nan, 1.0)})

    before = engine.params.data.clone()
    assert engine.train(batch, loss_fn, counted(batch), {"kl": 1.0})["step_skipped"] == (1.0, 1.0)
    assert torch.equal(engine.params.data, before)


def test_the_loss_of_no_rows_can_be_reported() -> None:
    """A loss may divide by the number of rows, which is zero on a rank without rows."""
    empty = SequenceBatch((), {"tokens": Column(torch.empty(0, dtype=torch.int64), ())})
    assert "0 rows" in str(nonfinite_loss(math.nan, empty))
