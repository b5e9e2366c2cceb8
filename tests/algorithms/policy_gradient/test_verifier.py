"""Rewards from verifiers, with real judge processes."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.verifier import (
    Verifier,
    VerifierConfig,
    decode_items,
    is_failure,
    shaped_score,
)
from realhf.api.batch_meta import RowId
from realhf.api.config import RewardConfig
from realhf.api.curriculum import PromptResult
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext
from realhf.rewards.verdict import Status, Verdict
from tests.scaling import examples

JUDGE = """
import time

def judge(prompt, answer, row):
    if answer == "raise":
        raise RuntimeError("no such tool")
    if answer == "hang":
        time.sleep(60)
    return row["worth"] if prompt == "Q" else -9.0
"""


class Letters:
    """A tokenizer of code points; 0 is a special token."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(t) for t in tokens if t or not skip_special_tokens)


VALUES = {  # what a function does, and the reward
    "1": 1.0, "-0.5": -0.5, "0": 0.0, "True": 1.0, "fractions.Fraction(1, 4)": 0.25, "1e-30": 1.0000000031710769e-30,
    "None": None, "math.nan": None, "math.inf": None, "-math.inf": None, "'1'": None, "[1.0]": None, "b'1'": None,
    "1j": None, "decimal.Decimal(1)": None, "10**400": None, "1e300": None, "(1, 'why')": None, "object()": None,
    "fail(ValueError('no'))": None, "fail(AssertionError)": None, "fail(KeyError('\\udc80'))": None, "1 / 0": None,
    "undefined": None, "sys.exit()": None, "sys.exit(0)": None, "fail(MemoryError)": None, "fail(StopIteration)": None,
    "fail(Exception())": None, "eval('')": None, "[].pop()": None, "print": None, "...": None,
}  # fmt: skip
CONTEXT = InterfaceContext(seed=1, tokenizer=Letters(), run_root=Path("."))


def responses(*texts, row=None):
    """Samples of one prompt ``Q``; responses end with a special token."""
    rows = [torch.tensor([0, ord("Q"), *map(ord, text), 0]) for text in texts]
    masks = [(torch.arange(len(r)) < 2).byte() for r in rows]
    data = torch.tensor(list(json.dumps(row or {"solutions": ["#### 72"], "name": "é"}).encode()), dtype=torch.uint8)
    columns = {"tokens": Column.of(rows), "prompt_mask": Column.of(masks), "row": Column.of([data] * len(rows))}
    return SequenceBatch(tuple(RowId(0, i) for i in range(len(texts))), columns)


def run(config, batch, reports=None):
    verifier = Verifier(config, CONTEXT if reports is None else replace(CONTEXT, report_failure=reports.append))
    try:
        return verifier.inference(None, batch, {})
    finally:
        verifier.close()


def test_texts_are_decoded_without_special_tokens():
    assert decode_items(responses("a b"), Letters()) == [("Q", "a b", {"solutions": ["#### 72"], "name": "é"})]


def test_math():
    config = VerifierConfig(ppo=PPOConfig(reward_output_bias=0.5, reward_output_scaling=2.0))
    out, stats = run(config, responses("so #### 72", "so #### 71", "no idea"))
    assert out["rewards"].tolist() == [1.0, -3.0, -3.0] and out["rewards"].dtype == torch.float32
    assert stats == {
        "reward": (-5.0, 3.0),
        "reward_sq": (19.0, 3.0),
        "accuracy": (1.0, 3.0),
        "failed": (0.0, 3.0),
        "verifier_error": (0.0, 3.0),
        "verifier_timeout": (0.0, 3.0),
    }


def test_selection_prefers_longer_responses():
    config = VerifierConfig(ppo=PPOConfig(generation_size=4, group_size=2))
    out, stats = run(config, responses("#### 72", "#### 1", "well: #### 72", "thus #### 72"))
    assert out.ids == (RowId(0, 2), RowId(0, 3)) and stats["accuracy"] == (3.0, 4.0)


def test_failures_are_counted_reported_and_have_no_reward(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(JUDGE)
    reward = RewardConfig(fn=f"{file}:judge", timeout=1.0, processes=2)
    reports = []
    batch = responses("fine", "raise", "hang", "fine", row={"worth": 0.0})
    out, stats = run(VerifierConfig(reward=reward), batch, reports)
    assert out.ids == (RowId(0, 0), RowId(0, 3)) and out["rewards"].tolist() == [0.0, 0.0]
    assert stats == {"reward": (0.0, 2.0), "reward_sq": (0.0, 2.0), "failed": (2.0, 4.0), "verifier_error": (1.0, 4.0),
                     "verifier_timeout": (1.0, 4.0)}  # fmt: skip
    (report,) = reports
    assert report.startswith(
        f"{file}:judge, response 1 to prompt 0: RuntimeError: no such tool\nTraceback (most recent"
    )
    assert f'File "{file}", line 6, in judge' in report and "server.py" not in report


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=12), st.booleans())
def test_only_finite_numbers_are_scores(returned, is_asynchronous):
    """Any value that a function returns or raises either is the reward, or the response has none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "values.py"
        word = "async " if is_asynchronous else ""
        file.write_text(f"import decimal, fractions, math, sys\n\n{word}def value(prompt, answer, row):\n"
                        "    return eval(answer)\n\ndef fail(error):\n    raise error\n")  # fmt: skip
        reports = []
        config = VerifierConfig(RewardConfig(fns=[f"{file}:value", "format:.*"], weights=[1.0, 0.0]))
        out, stats = run(config, responses(*returned), reports)
    scored = [i for i, text in enumerate(returned) if VALUES[text] is not None]
    assert [row.sample for row in out.ids] == scored
    assert out["rewards"].tolist() == [VALUES[returned[i]] for i in scored]
    assert stats["failed"] == (float(len(returned) - len(scored)), float(len(returned)))
    assert stats["reward"] == (sum(out["rewards"].tolist()), float(len(scored)))
    failed = [i for i, text in enumerate(returned) if VALUES[text] is None and text != "1e300"]  # which overflows later
    assert [f"response {i} to prompt 0" in report for i, report in zip(failed, reports, strict=False)] == [True] * (
        len(failed) > 0
    )


def test_a_failed_format_reward_is_a_failure():
    """A regular expression with exponential time; the same one may also be a reward of its own."""
    pattern = "(a+)+b"
    for fns in (["math"], ["math", f"format:{pattern}"]):
        config = RewardConfig(fns=fns, format_reward=pattern, timeout=10.0)
        out, stats = run(VerifierConfig(config), responses("a" * 40, "ab"))
        assert out.ids == (RowId(0, 1),) and stats["failed"] == (1.0, 2.0)
        assert (stats["format_ok"], stats["accuracy"]) == ((1.0, 1.0), (0.0, 1.0))


def test_an_overflowing_reward_is_a_failure(tmp_path):
    file = tmp_path / "large.py"
    file.write_text("def large(prompt, answer, row):\n    return float(answer)\n")
    config = VerifierConfig(RewardConfig(fn=f"{file}:large"), PPOConfig(reward_output_scaling=10.0))
    out, stats = run(config, responses("1e38", "-2"))
    assert out["rewards"].tolist() == [-20.0] and stats["failed"] == (1.0, 2.0) and stats["reward"] == (-20.0, 1.0)


def test_no_rows():
    out, stats = run(VerifierConfig(reward=RewardConfig(check_verifier_status=True)), responses("x").select([]))
    assert len(out) == 0 and stats["reward"] == (0.0, 0.0)


def test_check_verifier_status():
    strict = VerifierConfig(reward=RewardConfig(check_verifier_status=True))
    with pytest.raises(ValueError, match="all 2 responses are wrong"):
        run(strict, responses("#### 1", "#### 2"))
    assert run(strict, responses("#### 1", "#### 72"))[1]["accuracy"] == (1.0, 2.0)


def test_format_reward():
    reward = RewardConfig(format_reward=r"<think>.*</think> ####.*", right_unformatted_reward=0.5)
    batch = responses("<think>a</think> #### 72", "#### 72", "<think>a\n</think> #### 7", "no")
    out, stats = run(VerifierConfig(reward=reward), batch)
    assert out["rewards"].tolist() == pytest.approx([1.0, 0.5, -0.8, -1.0])
    assert (stats["accuracy"], stats["format_ok"]) == ((2.0, 4.0), (2.0, 4.0))


def test_several_rewards_are_weighted_and_reported_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def length(prompt, answer, row):\n    return len(answer)\n")
    reward = RewardConfig(fns=["math", f"{file}:length", "format:.*2"], weights=[2.0, -0.1, 1.0])
    out, stats = run(VerifierConfig(reward=reward), responses("#### 72", "#### 7"))
    assert out["rewards"].tolist() == pytest.approx([2 - 0.7 + 1, -2 - 0.6])
    scores = {name: stats[f"score_{name}"] for name in ("math", "length", "format")}
    assert scores == {"math": (0.0, 2.0), "length": (13.0, 2.0), "format": (1.0, 2.0)}
    assert stats["accuracy"] == (1.0, 2.0) and stats["verifier_error"] == (0.0, 6.0)


def test_equal_responses_are_verified_once(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("calls = 0\ndef count(prompt, answer, row):\n    global calls\n    calls += 1\n    return calls\n")
    out, _ = run(VerifierConfig(reward=RewardConfig(fn=f"{file}:count")), responses("a", "b", "a", "a"))
    assert out["rewards"].tolist() == [1.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("is_well_formed", "scores"), [(True, (1.0, -0.8, -0.8, 0.0)), (False, (1.0, -1.0, -1.0, 0.0))]
)
def test_shaped_score_with_format_reward(is_well_formed, scores):
    right, wrong, late = Verdict(1.0, Status.ok), Verdict(0.0, Status.ok), Verdict(0.0, Status.timeout)
    asked = [("math", right), ("code", wrong), ("math", late), ("f.py:g", wrong)]
    config = RewardConfig(format_reward="x")
    assert tuple(shaped_score(v, fn, config, is_well_formed) for fn, v in asked) == scores


@pytest.mark.parametrize(
    ("fn", "verdict", "score"),
    [
        ("math", Verdict(1.0, Status.ok), 1.0),
        ("math", Verdict(0.0, Status.ok), -1.0),
        ("f.py:g", Verdict(0.0, Status.ok), 0.0),
        ("math", Verdict(0.0, Status.timeout), -1.0),
        ("http://host/judge?fn=code", Verdict(0.0, Status.timeout), -1.0),
    ],
)
def test_shaped_score(fn, verdict, score):
    assert shaped_score(verdict, fn, RewardConfig()) == score and not is_failure(verdict, fn)


@pytest.mark.parametrize("fn", ["math", "code", "f.py:g", "format:x", "http://host/judge?fn=math", "http://host/"])
def test_errors_are_failures_and_late_verifiers_are_not(fn):
    assert is_failure(Verdict(0.0, Status.error), fn) and not is_failure(Verdict(0.0, Status.ok), fn)
    is_builtin = fn.endswith(("math", "code"))
    assert is_failure(Verdict(0.0, Status.timeout), fn) is not is_builtin


def test_a_verifier_reports_which_responses_are_correct():
    """Also where a wrong response has a positive reward."""
    results = []
    context = replace(CONTEXT, report_results=results.extend)
    verifier = Verifier(VerifierConfig(reward=RewardConfig(wrong_reward=0.5)), context)
    verifier.inference(None, responses("so #### 72", "so #### 71", "#### 72"), {})
    verifier.close()
    assert results == [PromptResult(0, (1.0, 0.5, 1.0), n_right=2)]
