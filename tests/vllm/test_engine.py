"""vLLM samples with the trainer's weights, and its log-probabilities equal those of the native engine."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig
from realhf.base.errors import RunFailed
from realhf.data.batch import Column, SequenceBatch
from realhf.data.turns import TurnOutput
from realhf.models.engine import NativeEngine, VllmEngine
from tests.models.engine.scripted_driver import LIMIT, ScriptedDriver, reply_to
from tests.models.engine.tiny_engine import by_row
from tests.vllm.model import engine_on, prompts_of, vllm_on

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
LENGTHS = (3, 1, 7, 7, 12, 2, 5)
PLAIN = GenerationConfig(max_new_tokens=14)


@pytest.fixture(scope="module")
def engine(sums: Path) -> NativeEngine:
    return engine_on(sums)


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "plain"])
def vllm(
    engine: NativeEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    other = vllm_on(engine, tmp_path_factory.mktemp("served") / "actor", pack=request.param)
    yield other
    assert other.server is not None
    other.server.close()


def max_difference(engine: NativeEngine, responses: SequenceBatch) -> float:
    """Return the largest difference of the responses' log-probabilities from those of the native engine."""
    expected = engine.forward(responses.only(("tokens",)), lambda outputs, _: outputs.logprobs(1.0))
    return float((responses["logprobs"] - expected)[responses["prompt_mask"] == 0].abs().max())


def test_log_probabilities_equal_the_native_engine(engine: NativeEngine, vllm: VllmEngine) -> None:
    prompts = prompts_of(LENGTHS)
    responses = vllm.generate(prompts, PLAIN, 3, seed=5)
    assert [(i.prompt, i.sample) for i in responses.ids] == [(p, s) for p in range(7) for s in range(3)]
    assert max_difference(engine, responses) < 1e-4
    for row, mask, cut, prompt in zip(
        responses.columns["tokens"].rows(),
        responses.columns["prompt_mask"].rows(),
        responses["truncated"].tolist(),
        (p for p in LENGTHS for _ in range(3)),
        strict=True,
    ):
        response = row[mask == 0].tolist()
        assert mask.sum() == prompt and 1 not in response[:-1] and cut == (response[-1] != 1)
        assert cut == 0 or len(response) == 14


def test_more_prompts_than_one_batch(engine: NativeEngine, vllm: VllmEngine) -> None:
    """75 prompts of 9,000 tokens in all; vLLM 0.32 fails on partial prefills of rows with their own generators."""
    responses = vllm.generate(prompts_of([120] * 75), replace(PLAIN, max_new_tokens=2), 1, seed=5)
    assert len(responses) == 75 and max_difference(engine, responses) < 1e-4


def test_a_row_depends_only_on_its_seed(vllm: VllmEngine) -> None:
    together = by_row(vllm.generate(prompts_of(LENGTHS), PLAIN, 2, seed=5), "tokens")
    alone = by_row(vllm.generate(prompts_of(LENGTHS[4:5], first=4), PLAIN, 2, seed=5), "tokens")
    assert all(torch.equal(row, together[i]) for i, row in alone.items())
    other = by_row(vllm.generate(prompts_of(LENGTHS), PLAIN, 2, seed=6), "tokens")
    assert any(not torch.equal(row, together[i]) for i, row in other.items())


def test_the_responses_that_end_first_are_kept(vllm: VllmEngine) -> None:
    whole = vllm.generate(prompts_of(LENGTHS), PLAIN, 4, seed=5)
    made = vllm.generate(prompts_of(LENGTHS), replace(PLAIN, keep_first=2), 4, seed=5)
    lengths, rows = whole.lengths("tokens"), range(len(whole))
    ranking = sorted(rows, key=lambda row: (row // 4, lengths[row], row))
    expected = whole.select(sorted(row for place, row in enumerate(ranking) if place % 4 < 2))
    assert made.ids == expected.ids and torch.equal(made["tokens"], expected["tokens"])


def test_greedy_responses_equal_the_native_engine(engine: NativeEngine, vllm: VllmEngine) -> None:
    greedy = replace(PLAIN, greedy=True)
    ours, theirs = (e.generate(prompts_of(LENGTHS), greedy, 1, seed=5) for e in (engine, vllm))
    assert torch.equal(ours["tokens"], theirs["tokens"]) and torch.equal(ours["truncated"], theirs["truncated"])


def test_weight_updates_reach_vllm(engine: NativeEngine, vllm: VllmEngine) -> None:
    assert vllm.server is not None
    for version in (1, 2):
        noise = torch.randn(len(engine.params.data), generator=torch.Generator().manual_seed(version))
        engine.params.data.add_(noise, alpha=0.01)
        updated = replace(vllm, version=version, verify=True)
        assert max_difference(engine, updated.generate(prompts_of(LENGTHS), PLAIN, 2, seed=5)) < 1e-4
    engine.params.view("layers.0.down")[3, 4] += 1e-6
    with pytest.raises(RunFailed, match="vLLM of worker 0 has different weights from the trainer: checksums"):
        updated.generate(prompts_of(LENGTHS), PLAIN, 1, seed=5)


def test_weights_are_sent_in_several_requests(
    engine: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realhf.models.engine.vllm_weights.BUCKET_BYTES", 1000)
    other = vllm_on(engine, tmp_path / "actor")
    assert other.server is not None and len(other.buckets) == 4  # embedding, two blocks, the last norm
    responses = replace(other, verify=True).generate(prompts_of(LENGTHS), PLAIN, 2, seed=5)
    assert max_difference(engine, responses) < 1e-4
    other.server.close()


def test_generation_with_another_version_is_rejected(vllm: VllmEngine) -> None:
    assert vllm.server is not None
    with pytest.raises(
        RunFailed, match=r"vLLM of worker 0 failed to generate.*version 77 are requested, the engine has"
    ):
        vllm.server.call("generate", version=77, prompts=[[3]], rows=[])


def test_no_prompts_give_no_rows(vllm: VllmEngine) -> None:
    empty = prompts_of(LENGTHS).split([[]])[0]
    assert len(vllm.generate(empty, PLAIN, 2, seed=5)) == 0


def test_a_killed_process_is_reported(engine: NativeEngine, tmp_path: Path) -> None:
    other = vllm_on(engine, tmp_path / "actor")
    assert other.server is not None
    os.kill(other.server._process.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="vLLM of worker 0 ended by signal SIGKILL"):
        other.generate(prompts_of(LENGTHS), PLAIN, 2, seed=5)
    other.server.close()


def play(engine: NativeEngine, config: GenerationConfig, delays: int | None = None) -> tuple[list, list]:
    """Return the rows and the turns of scripted episodes."""
    prompts = {i: row.tolist() for i, row in enumerate(prompts_of(LENGTHS).columns["prompts"].rows())}
    driver = ScriptedDriver(prompts, 2, delays, engine.config.vocab)
    return tuple(msgspec.msgpack.decode(engine.sample_turns(lambda: driver, config, 5, 64, 8)))


def test_turns_have_the_log_probabilities_of_the_native_engine(engine: NativeEngine, vllm: VllmEngine) -> None:
    check_turns(engine, vllm)


def check_turns(engine: NativeEngine, vllm: VllmEngine) -> None:
    config = replace(PLAIN, max_new_tokens=LIMIT)
    rows, turns = play(vllm, config, delays=1)
    batch = SequenceBatch(
        tuple(RowId(*key) for key, _ in rows), {"tokens": Column.of([torch.tensor(tokens) for _, tokens in rows])}
    )
    expected = engine.forward(batch, lambda outputs, _: outputs.logprobs(1.0))
    for (key, row), (_, some), logprobs in zip(rows, turns, expected.split(batch.lengths("tokens")), strict=True):
        at = LENGTHS[key[0]]
        for number, turn in enumerate(some, 1):
            found = torch.tensor(turn["logprobs"])
            assert row[at : at + len(found)] == turn["tokens"]
            assert float((found - logprobs[at : at + len(found)]).abs().max()) < 1e-4
            at += len(found) + len(reply_to(TurnOutput(**turn), number, engine.config.vocab))


def test_the_order_of_replies_does_not_change_a_row(vllm: VllmEngine) -> None:
    config = replace(PLAIN, max_new_tokens=LIMIT)
    assert play(vllm, config)[0] == play(vllm, config, delays=2)[0]


def test_greedy_turns_equal_the_native_engine(engine: NativeEngine, vllm: VllmEngine) -> None:
    greedy = replace(PLAIN, greedy=True, max_new_tokens=LIMIT)
    assert play(vllm, greedy)[0] == play(engine, greedy)[0]
