"""Rollouts ahead of training on workers of their own: the curve does not depend on where calls run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Run, same_curve
from tests.integration.kills import changed_by_kill

pytestmark = [pytest.mark.dist, pytest.mark.slow]
WORDS = [
    "max_staleness=1",
    "exp_ctrl.total_train_steps=4",
    "exp_ctrl.total_train_epochs=4",
    "exp_ctrl.ckpt_freq_steps=2",
    "ppo.recompute_logprobs=True",
    "ppo.group_size=2",
    "critic.optimizer.lr=1e-5",
]
PLANS = {
    "one worker": "d1",
    "two meshes": "actor_gen:d1@0,*:d1@1",
    "three meshes": "actor_gen:d1@0,rew_inf:d1@1,ref_inf:d1@1,critic_inf:d1@2,*:d1@2",
    "replicas": "actor_gen:d1@0,rew_inf:d2@1-2,ref_inf:d1@3,critic_inf:t2@2-3,*:d2@2-3",
}


def test_the_curve_does_not_depend_on_where_calls_run(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path: Path
) -> None:
    words = [*ppo_words, *WORDS]
    variants = {name: [f"allocation_mode={text}", f"n_gpus_per_node={1 + max(int(c) for c in text[1:] if c.isdigit())}"]
                for name, text in PLANS.items()}  # fmt: skip
    variants["one worker"] = ["n_gpus_per_node=1"]
    runs = realhf_all("ppo-math", tmp_path, variants, words)
    for name, run in runs.items():
        assert run.code == 0, (name, run.output)
        assert same_curve(runs["one worker"], run) == [], name


@pytest.mark.parametrize("whom", ["master", "worker"])
def test_a_kill_does_not_change_a_run_with_rollouts_ahead(
    whom: str, realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], tmp_path: Path
) -> None:
    """The resumed run has the rows of rollouts ahead on worker 0, and brings them to the others from there."""
    options = [*ppo_words, *WORDS, f"allocation_mode={PLANS['replicas']}", "n_gpus_per_node=4",
               "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_steps=8"]  # fmt: skip
    whole = realhf_all("ppo-math", tmp_path, {"whole": options}, [])["whole"]
    assert changed_by_kill(whole, tmp_path / whom, options, 3, whom, "ppo-math") == []
