"""PPO with code: programs are executed, and the reasons of all verdicts are reported."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.rewards.sandbox.sandbox import Reason
from tests.integration.conftest import Run

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_programs_in_responses_are_executed(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path: Path
) -> None:
    """A number is a program without output, which is the expected output here."""
    data = tmp_path / "code.jsonl"
    row = {"prompt": "1+2=", "input_output": json.dumps({"inputs": [""], "outputs": [""]})}
    data.write_text((json.dumps(row) + "\n") * 14)
    words = [word for word in ppo_words if not word.startswith(("dataset.path=", "reward.fn="))]
    words += [f"dataset.path={data}", "ppo.gen.max_new_tokens=3", "n_logged_generations=-1"]
    (run,) = realhf_all("ppo-code", tmp_path, {"code": words}, []).values()
    for line in run.metrics:
        shares = {reason: line[f"rew_inf/verdict_{reason.value}"] for reason in Reason}
        assert sum(shares.values()) == pytest.approx(1.0) and line["rew_inf/verifier_error"] == 0.0
        assert line["rew_inf/accuracy"] == shares[Reason.ok] > 0.0
        assert line["reward/mean"] == pytest.approx(2 * shares[Reason.ok] - 1)
    assert len(run.metrics) == 2
