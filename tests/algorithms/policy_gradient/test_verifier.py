"""Rewards from verifiers, with real judge processes."""

import json
from pathlib import Path

import pytest
import torch

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.verifier import Verifier, VerifierConfig, decode_items, shaped_score
from realhf.api.batch_meta import RowId
from realhf.api.config import RewardConfig
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import InterfaceContext
from realhf.rewards.verdict import Status, Verdict

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


CONTEXT = InterfaceContext(seed=1, tokenizer=Letters(), run_root=Path("."))


def responses(*texts, row=None):
    """Samples of one prompt ``Q``; responses end with a special token."""
    rows = [torch.tensor([0, ord("Q"), *map(ord, text), 0]) for text in texts]
    masks = [(torch.arange(len(r)) < 2).byte() for r in rows]
    data = torch.tensor(list(json.dumps(row or {"solutions": ["#### 72"], "name": "é"}).encode()), dtype=torch.uint8)
    columns = {"tokens": Column.of(rows), "prompt_mask": Column.of(masks), "row": Column.of([data] * len(rows))}
    return SequenceBatch(tuple(RowId(0, i) for i in range(len(texts))), columns)


def run(config, batch):
    verifier = Verifier(config, CONTEXT)
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
        "accuracy": (1.0, 3.0),
        "verifier_error": (0.0, 3.0),
        "verifier_timeout": (0.0, 3.0),
    }


def test_selection_prefers_longer_responses():
    config = VerifierConfig(ppo=PPOConfig(generation_size=4, group_size=2))
    out, stats = run(config, responses("#### 72", "#### 1", "well: #### 72", "thus #### 72"))
    assert out.ids == (RowId(0, 2), RowId(0, 3)) and stats["accuracy"] == (3.0, 4.0)


def test_failed_judges_are_counted_separately(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(JUDGE)
    reward = RewardConfig(fn=f"{file}:judge", timeout=1.0, processes=2, wrong_reward=-2.0)
    out, stats = run(VerifierConfig(reward=reward), responses("raise", "hang", "fine", row={"worth": 0.0}))
    assert out["rewards"].tolist() == [-2.0, -2.0, 0.0]  # a user's function returned 0
    assert stats == {"reward": (-4.0, 3.0), "verifier_error": (1.0, 3.0), "verifier_timeout": (1.0, 3.0)}


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
    ("is_well_formed", "scores"), [(True, (1.0, -0.8, -1.0, 0.0)), (False, (1.0, -1.0, -1.0, 0.0))]
)
def test_shaped_score_with_format_reward(is_well_formed, scores):
    right, wrong, failed = Verdict(1.0, Status.ok), Verdict(0.0, Status.ok), Verdict(0.0, Status.error)
    asked = [("math", right), ("code", wrong), ("math", failed), ("f.py:g", wrong)]
    config = RewardConfig(format_reward="x")
    assert tuple(shaped_score(v, fn, config, is_well_formed) for fn, v in asked) == scores


@pytest.mark.parametrize(
    ("fn", "verdict", "score"),
    [
        ("math", Verdict(1.0, Status.ok), 1.0),
        ("math", Verdict(0.0, Status.ok), -1.0),
        ("f.py:g", Verdict(0.0, Status.ok), 0.0),
        ("f.py:g", Verdict(0.0, Status.timeout), -1.0),
        ("math", Verdict(0.0, Status.error), -1.0),
    ],
)
def test_shaped_score(fn, verdict, score):
    assert shaped_score(verdict, fn, RewardConfig()) == score
