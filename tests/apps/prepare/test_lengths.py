"""Expected response lengths: from options, files and earlier runs, with damaged and missing ones."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.config import ExperimentConfig
from realhf.apps.prepare.lengths import given_lengths, lengths_by_step, lengths_of
from realhf.base.errors import UserError
from realhf.experiments.gen import GenerationExperiment
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.experiments.sft import SFTExperiment
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.lengths import MAX_LENGTHS, FixedLengths, LogNormalLengths, MeasuredLengths, UniformLengths
from realhf.plan.train_schedule import PromptRange
from tests.scaling import examples


def config_of(root: Path, text: str) -> ExperimentConfig:
    config = GenerationExperiment(fileroot=str(root), experiment_name="e", trial_name="t")
    config.planner.lengths = text
    return config


def fetched(step: int, prompts: list[int]) -> RowsReady:
    span = PromptRange(step, step * len(prompts), (step + 1) * len(prompts))
    ids = tuple(RowId(span.start + i, PROMPT) for i in range(len(prompts)))
    return RowsReady(None, span, {0: BatchMeta(ids, {"prompts": ColumnMeta("int64", tuple(prompts))})})


def sampled(step: int, prompts: list[int], responses: list[list[int]], mfc: str = "actor_gen") -> RowsReady:
    span = PromptRange(step, step * len(prompts), (step + 1) * len(prompts))
    rows = [(RowId(span.start + i, s), prompts[i] + n) for i, some in enumerate(responses) for s, n in enumerate(some)]
    ids, lengths = zip(*rows, strict=True)
    columns = {key: ColumnMeta(dtype, lengths) for key, dtype in (("tokens", "int64"), ("logprobs", "float32"))}
    return RowsReady(mfc, span, {1: BatchMeta(ids, columns)})


def write_events(root: Path, events: list[RowsReady]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "events.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return path


def run_of(root: Path, n_steps: int = 3) -> Path:
    events = []
    for step in range(n_steps):
        scores = BatchMeta((RowId(2 * step, 0),), {"rewards": ColumnMeta("float32", (1,))})
        greedy = BatchMeta((RowId(2 * step, PROMPT),), {"tokens": ColumnMeta("int64", (50,))})
        events += [fetched(step, [4, 6]), sampled(step, [4, 6], [[step + 1, 10], [3, 7]]),
                   RowsReady("rew_inf", PromptRange(step, 2 * step, 2 * step + 2), {0: scores, 1: greedy})]  # fmt: skip
    return write_events(root, events)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lognormal(930,0.7)", LogNormalLengths(930, 0.7)),
        ("uniform(10, 20)", UniformLengths(10, 20)),
        ("fixed(5)", FixedLengths(5)),
    ],
)
def test_distributions_are_options(text: str, expected: object, tmp_path: Path) -> None:
    assert lengths_of(config_of(tmp_path, text)) == expected  # type: ignore[arg-type]


def test_without_the_option_the_mean_or_the_maximum_is_assumed(tmp_path: Path) -> None:
    config = GenerationExperiment()
    config.sampling.max_new_tokens = 100
    assert lengths_of(config) == FixedLengths(100)
    config.planner.new_tokens = 20
    assert isinstance(lengths_of(config), LogNormalLengths)
    assert lengths_of(SFTExperiment()) is None
    episodes = PPOMathExperiment()
    episodes.env.cls, episodes.planner.lengths = "x.py:Env", "fixed(700)"
    assert lengths_of(episodes) == FixedLengths(700)
    config.planner.lengths = "fixed(7)"
    with pytest.raises(UserError, match=re.escape("planner.lengths=fixed(7) and planner.new_tokens are both set")):
        lengths_of(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognormal(930)", "planner.lengths=lognormal(930): expected lognormal(MEAN,SIGMA) with a mean of at least 1"),
        ("normal(5,1)", "planner.lengths=normal(5,1): unknown distribution normal; known are lognormal(MEAN,SIGMA)"),
        ("nowhere", "planner.lengths=nowhere: there is no such distribution, file or run in "),
        ("930", "planner.lengths=930: there is no such distribution, file or run in "),
        ("x" * 5000, ": there is no such distribution, file or run in "),
        ("a\0b", ": there is no such distribution, file or run in "),
        ("trial-on", "did you mean trial-one ?"),
    ],
)
def test_invalid_values_are_errors_with_a_fix(text: str, message: str, tmp_path: Path) -> None:
    run_of(tmp_path / "e" / "trial-one")
    with pytest.raises(UserError, match=re.escape(message)):
        given_lengths(config_of(tmp_path, text))


def test_files_of_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n 7 \n2147483647\n\n")
    assert given_lengths(config_of(tmp_path, f"{tmp_path}/lengths.txt")) == MeasuredLengths(
        (5, 7, 2**31 - 1), "lengths.txt"
    )
    rows = [{"prompt_id": 0, "response": "a\u2028b", "answer_tokens": 3}, {"answer_tokens": 9}]
    (tmp_path / "step_4.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    found = given_lengths(config_of(tmp_path, f"{tmp_path}/step_4.jsonl"))
    assert found == MeasuredLengths((3, 9), "step_4.jsonl")


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "x", "", "1e3", "2147483648", "9" * 5000, "1 2", "\u0663", "[3]",
                                  '{"answer_tokens": 0}', '{"answer_tokens": true}', '{"a": 1}', "{"])  # fmt: skip
def test_invalid_lines_are_errors_with_their_number(text: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(f"5\n{text}\n6\n", "utf-8")
    with pytest.raises(UserError, match=r"planner.lengths=.*f: line 2 is"):
        given_lengths(config_of(tmp_path, f"{tmp_path}/f"))


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(UserError, match="the file is empty"):
        given_lengths(config_of(tmp_path, f"{tmp_path}/empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read the file"):
        given_lengths(config_of(tmp_path, f"{tmp_path}/binary"))


def test_lengths_are_measured_in_an_earlier_run(tmp_path: Path) -> None:
    events = run_of(tmp_path / "e" / "first")
    newest_first = (3, 10, 3, 7, 2, 10, 3, 7, 1, 10, 3, 7)
    expected = MeasuredLengths(newest_first, "steps 1 to 3 of e/first")
    (tmp_path / "e" / "first" / "metrics.jsonl").write_text("{}\n")
    for text in ("first", "e/first", f"{tmp_path}/e/first", str(events), f"{tmp_path}/e/first/metrics.jsonl"):
        assert given_lengths(config_of(tmp_path, text)) == expected, text
    run_of(tmp_path / "e" / "one", 1)
    assert str(given_lengths(config_of(tmp_path, "one"))) == "4 lengths of step 1 of e/one"


def test_only_the_last_steps_of_a_long_run_are_read(tmp_path: Path) -> None:
    prompts, events = [3] * 500, list[RowsReady]()
    for step in range(100):
        events += [fetched(step, prompts), sampled(step, prompts, [[step + 1]] * 500)]
    path = write_events(tmp_path / "e" / "long", events)
    assert path.stat().st_size > 1 << 20
    found = given_lengths(config_of(tmp_path, "long"))
    assert isinstance(found, MeasuredLengths) and found.source == "steps 92 to 100 of e/long"
    with path.open("ab") as file:
        file.write(b'{"mfc":"other"' + b" " * (1 << 20) + b"}\n")  # of a step without responses
    assert given_lengths(config_of(tmp_path, "long")) == found
    assert MAX_LENGTHS <= len(found.lengths) == 9 * 500 and set(found.lengths) == {*range(92, 101)}


def test_runs_without_responses_are_errors(tmp_path: Path) -> None:
    empty = tmp_path / "e" / "empty"
    empty.mkdir(parents=True)
    with pytest.raises(UserError, match="empty is not the folder of a run: it has no events.jsonl; use lognormal"):
        given_lengths(config_of(tmp_path, "empty"))
    (empty / "metrics.jsonl").write_text('{"step": 1, "length/response": 412.5}\n')
    with pytest.raises(UserError, match=re.escape("its metrics have the mean: planner.new_tokens=412.5")):
        given_lengths(config_of(tmp_path, "empty"))
    write_events(empty, [fetched(0, [4])])
    with pytest.raises(UserError, match="empty has no responses yet"):
        given_lengths(config_of(tmp_path, "empty"))
    stages = tmp_path / "e" / "stages"
    run_of(stages / "ppo")
    (stages / "stages.json").write_text("{}")
    with pytest.raises(UserError, match="has several runs; name one of them: ppo"):
        given_lengths(config_of(tmp_path, "stages"))


@settings(max_examples=examples(60))
@given(st.data())
def test_damaged_events_are_skipped(data: st.DataObject) -> None:
    """A kill leaves a cut line, the start of the tail another; any bytes may be damaged."""
    events = [fetched(0, [4, 6]), sampled(0, [4, 6], [[2], [3]]), fetched(1, [5, 5]), sampled(1, [5, 5], [[7], [9]])]
    text = bytearray(b"\n".join(map(msgspec.json.encode, events)))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    for at in data.draw(st.lists(st.integers(0, len(text) - 1), max_size=3)):
        text[at] = data.draw(st.integers(0, 255))
    found = lengths_by_step(bytes(text[start:stop]).splitlines())
    assert all(length > 0 for some in found.values() for length in some)
    assert lengths_by_step(map(msgspec.json.encode, events)) == {0: [2, 3], 1: [7, 9]}
    whole = [msgspec.json.encode(event) for event in events]
    assert lengths_by_step([whole[0][7:], *whole[1:]]) == {1: [7, 9]}  # prompts of step 0 are unknown
