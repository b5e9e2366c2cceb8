"""Partial rollouts: episodes that go on in later steps, with the version of every token, layouts and interruptions."""
# ruff: noqa: F401, F811  (fixtures)

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Run, same_curve, start
from tests.integration.kills import changed_by_deaths, changed_by_kill
from tests.integration.test_episodes import KINDS, LAYOUTS, Runs, loose, words

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PARTIAL = ["env.partial_tokens=4", "ppo.recompute_logprobs=True"]


@pytest.mark.parametrize("kind", KINDS)
def test_partial_rollouts_do_not_depend_on_the_layout(
    kind: str,
    words: list[str],
    loose: str,
    realhf_all: Callable[..., Runs],
    tmp_path: Path,
) -> None:
    options = [*words, loose, *KINDS[kind], *PARTIAL, "exp_ctrl.total_train_steps=4"]
    runs = realhf_all(kind, tmp_path, LAYOUTS, options)
    whole = runs["d1"]
    assert [line["actor_gen/carried"] > 0 for line in whole.curve[:3]] == [True] * 3
    assert max(line["actor_gen/token_age"] for line in whole.curve) > 0
    assert whole.curve[-1]["actor_train/grad_norm"] > 0
    for name, run in runs.items():
        assert same_curve(whole, run) == [], name
        for step in range(1, 5):
            assert [row["turns"] for row in run.generations(step)] == [row["turns"] for row in whole.generations(step)]


def test_with_constant_weights_the_episodes_are_those_of_whole_rollouts(
    words: list[str],
    loose: str,
    realhf_all: Callable[..., Runs],
    tmp_path: Path,
) -> None:
    """Nothing is lost, repeated or sampled otherwise; an episode's log-probabilities are those of the policy."""
    options = [*words, loose, *KINDS["grpo"], "actor.optimizer.lr=0", "exp_ctrl.total_train_steps=6"]
    partial = ["env.partial_tokens=3", "ppo.recompute_logprobs=True"]
    runs = realhf_all("grpo", tmp_path, {"whole": [], "partial": partial}, options)
    episodes = {}
    for name, run in runs.items():
        rows = [row for step in range(1, 7) for row in run.generations(step)]
        episodes[name] = sorted(json.dumps([row["prompt"], row["turns"]]) for row in rows)
    rest = list(episodes["whole"])
    for episode in episodes["partial"]:
        rest.remove(episode)
    assert len(episodes["partial"]) >= len(rest) > 0
    assert all(line["actor_train/logprob_diff"] < 1e-4 for line in runs["partial"].curve)


def test_steps_in_which_no_episode_ends(
    words: list[str], loose: str, realhf: Callable[..., Run], tmp_path: Path
) -> None:
    options = [*words, loose, *KINDS["grpo"], "env.partial_tokens=1", "exp_ctrl.total_train_steps=3"]
    run = realhf("grpo", tmp_path, options)
    assert len(run.metrics) == 3 and run.metrics[2]["actor_gen/carried"] == 3
    assert "importance weights" in run.output  # a warning: ppo.recompute_logprobs is not set


def test_single_replies_train_as_responses_without_environment(
    ppo_words: list[str], reward_file: Path, realhf_all: Callable[..., Runs], tmp_path: Path
) -> None:
    """The same samples, rewards and steps; in parts, with constant weights, the same responses in another order."""
    words = [word for word in ppo_words if not word.startswith(("reward.fn=", "critic.", "ppo.kl_ctl="))]
    single = [
        "env.cls=realhf.environments.single_reply:SingleReply",
        f"env.options={{fn: {reward_file}:graded}}",
    ]
    variants = {
        "plain": [f"reward.fn={reward_file}:graded"],
        "episodes": single,
        "fixed": [*single, "actor.optimizer.lr=0"],
        "parts": [*single, "actor.optimizer.lr=0", "env.partial_tokens=5"],
    }
    runs = realhf_all("grpo", tmp_path, variants, [*words, "ppo.kl_in=none", "n_logged_generations=-1"])
    plain, episodes = runs["plain"], runs["episodes"]
    for before, line in zip(plain.curve, episodes.curve, strict=True):
        shared = [key for key in before if key in line and not key.startswith("actor_gen/")]
        assert {"actor_train/grad_norm", "rew_inf/reward", "tokens/generated"} <= {*shared}
        assert [line[key] for key in shared] == pytest.approx([before[key] for key in shared], rel=1e-4, abs=1e-6)
    texts = {
        name: sorted(json.dumps([row["prompt"], row["response"], row["rewards"]]) for step in (1, 2, 3)
                     for row in runs[name].generations(step))
        for name in ("fixed", "parts")
    }  # fmt: skip
    assert 0 < len(texts["parts"]) < len(texts["fixed"]) and set(texts["parts"]) <= set(texts["fixed"])


OFTEN = ["exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_steps=9", "n_gpus_per_node=2", *KINDS["grpo"], *PARTIAL]


def test_kills_do_not_change_a_partial_rollout(
    words: list[str],
    loose: str,
    realhf: Callable[..., Run],
    tmp_path: Path,
) -> None:
    """Of the master, of a worker, and of environments; paused environments are played again."""
    options = [*words, loose, *OFTEN]
    whole = realhf("grpo", tmp_path / "whole", options)
    for whom in ("master", "worker"):
        assert changed_by_kill(whole, tmp_path / whom, options, 4, whom) == []
    assert changed_by_deaths(whole, tmp_path / "environment", options, "env.options.deaths={folder}", at_least=5) == []


def test_kills_do_not_change_single_replies(
    words: list[str], reward_file: Path, realhf: Callable[..., Run], tmp_path: Path
) -> None:
    own = [word for word in words if not word.startswith("ppo.gen.")]
    options = [*own, *OFTEN, "env.cls=realhf.environments.single_reply:SingleReply", "ppo.gen.max_new_tokens=12",
               f"env.options={{fn: {reward_file}:graded}}"]  # fmt: skip
    whole = realhf("grpo", tmp_path / "whole", options)
    assert whole.curve[3]["actor_gen/carried"] > 0 and whole.curve[3]["actor_train/grad_norm"] > 0
    assert changed_by_kill(whole, tmp_path / "worker", options, 4, "worker") == []


@pytest.mark.parametrize(
    "option, problem",
    [("max_staleness=1", "a partial rollout already uses older weights"),
     ("ppo.dynamic_sampling=True", "unfinished prompts would be replaced")],
)  # fmt: skip
def test_options_that_exclude_each_other(
    option: str,
    problem: str,
    words: list[str],
    loose: str,
    tmp_path: Path,
) -> None:
    run = start("grpo", tmp_path, [*words, loose, *KINDS["grpo"], *PARTIAL, option]).finish()
    assert run.code == 2 and problem in run.output
