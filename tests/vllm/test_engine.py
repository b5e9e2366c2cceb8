"""vLLM draws with the trainer's weights, and says of what it drew what the native engine says."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf.api.config import GenerationConfig
from realhf.base.errors import RunFailed
from realhf.data.batch import SequenceBatch
from realhf.models.engine import NativeEngine, ServedEngine
from tests.models.engine.tiny_engine import by_row
from tests.vllm.model import engine_on, prompts_of, served_on

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
LENGTHS = (3, 1, 7, 7, 12, 2, 5)
PLAIN = GenerationConfig(max_new_tokens=14)


@pytest.fixture(scope="module")
def engine(sums: Path) -> NativeEngine:
    return engine_on(sums)


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "plain"])
def vllm(
    engine: NativeEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedEngine]:
    found = served_on(engine, tmp_path_factory.mktemp("served") / "actor", pack=request.param)
    yield found
    assert found.server is not None
    found.server.close()


def differ(engine: NativeEngine, made: SequenceBatch) -> float:
    """How far what was said of answers is from what the native engine says."""
    again = engine.forward(made.only(("tokens",)), lambda outputs, _: outputs.logprobs(1.0))
    return float((made["logprobs"] - again)[made["prompt_mask"] == 0].abs().max())


def test_answers_have_the_log_probabilities_of_the_native_engine(engine: NativeEngine, vllm: ServedEngine) -> None:
    prompts = prompts_of(LENGTHS)
    made = vllm.generate(prompts, PLAIN, 3, seed=5)
    assert [(i.prompt, i.sample) for i in made.ids] == [(p, s) for p in range(7) for s in range(3)]
    assert differ(engine, made) < 1e-4
    for row, mask, cut, prompt in zip(
        made.columns["tokens"].rows(),
        made.columns["prompt_mask"].rows(),
        made["truncated"].tolist(),
        (p for p in LENGTHS for _ in range(3)),
        strict=True,
    ):
        answer = row[mask == 0].tolist()
        assert mask.sum() == prompt and 1 not in answer[:-1] and cut == (answer[-1] != 1)
        assert cut == 0 or len(answer) == 14


def test_more_prompts_than_are_computed_at_a_time(engine: NativeEngine, vllm: ServedEngine) -> None:
    """9,000 tokens of 75 prompts; with prompts in parts vLLM 0.32 ends where every row has a generator of its own."""
    made = vllm.generate(prompts_of([120] * 75), replace(PLAIN, max_new_tokens=2), 1, seed=5)
    assert len(made) == 75 and differ(engine, made) < 1e-4


def test_a_row_depends_on_its_seed_alone(vllm: ServedEngine) -> None:
    together = by_row(vllm.generate(prompts_of(LENGTHS), PLAIN, 2, seed=5), "tokens")
    alone = by_row(vllm.generate(prompts_of(LENGTHS[4:5], first=4), PLAIN, 2, seed=5), "tokens")
    assert all(torch.equal(row, together[i]) for i, row in alone.items())
    other = by_row(vllm.generate(prompts_of(LENGTHS), PLAIN, 2, seed=6), "tokens")
    assert any(not torch.equal(row, together[i]) for i, row in other.items())


def test_greedy_answers_are_those_of_the_native_engine(engine: NativeEngine, vllm: ServedEngine) -> None:
    greedy = replace(PLAIN, greedy=True)
    ours, theirs = (e.generate(prompts_of(LENGTHS), greedy, 1, seed=5) for e in (engine, vllm))
    assert torch.equal(ours["tokens"], theirs["tokens"]) and torch.equal(ours["truncated"], theirs["truncated"])


def test_new_weights_are_drawn_with(engine: NativeEngine, vllm: ServedEngine) -> None:
    assert vllm.server is not None
    for version in (1, 2):
        noise = torch.randn(len(engine.params.data), generator=torch.Generator().manual_seed(version))
        engine.params.data.add_(noise, alpha=0.01)
        now = replace(vllm, version=version, verify=True)
        assert differ(engine, now.generate(prompts_of(LENGTHS), PLAIN, 2, seed=5)) < 1e-4
    engine.params.view("layers.0.down")[3, 4] += 1e-6
    with pytest.raises(RunFailed, match="vLLM of worker 0 holds other weights than the trainer: checksums"):
        now.generate(prompts_of(LENGTHS), PLAIN, 1, seed=5)


def test_weights_in_many_requests(engine: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.models.engine.vllm.BUCKET_BYTES", 1000)
    found = served_on(engine, tmp_path / "actor")
    assert found.server is not None and len(found.buckets) == 4  # embedding, two blocks, the last norm
    made = replace(found, verify=True).generate(prompts_of(LENGTHS), PLAIN, 2, seed=5)
    assert differ(engine, made) < 1e-4
    found.server.close()


def test_weights_of_another_version_are_not_drawn_with(vllm: ServedEngine) -> None:
    assert vllm.server is not None
    with pytest.raises(
        RunFailed, match=r"vLLM of worker 0 could not generate.*version 77 are wanted, the engine holds"
    ):
        vllm.server.ask("generate", version=77, prompts=[[3]], rows=[])


def test_no_prompts_give_no_rows(vllm: ServedEngine) -> None:
    nothing = prompts_of(LENGTHS).split([[]])[0]
    assert len(vllm.generate(nothing, PLAIN, 2, seed=5)) == 0


def test_a_process_that_is_killed_is_named(engine: NativeEngine, tmp_path: Path) -> None:
    found = served_on(engine, tmp_path / "actor")
    assert found.server is not None
    os.kill(found.server.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="vLLM of worker 0 ended by signal SIGKILL"):
        found.generate(prompts_of(LENGTHS), PLAIN, 2, seed=5)
    found.server.close()
