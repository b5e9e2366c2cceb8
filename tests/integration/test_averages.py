"""The Polyak average of the actor: saved and evaluated, and the same in every layout and after a resume."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import Run, same_curve

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ETA = 0.3
OPTIONS = [f"ppo.actor_ema_eta={ETA}", "exp_ctrl.save_freq_steps=1", "dataset.eval_fraction=0.2",
           "exp_ctrl.eval_freq_steps=1", "ppo.disable_value=True"]  # fmt: skip
CUT = ["n_gpus_per_node=2", "allocation_mode=actor_gen:d2,actor_train:t2,*:d2"]


def weights(run: Run, role: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.root / "models" / role / f"step_{step}" / "model.safetensors")


def test_the_average_is_saved_and_evaluated(
    realhf_all: Callable[..., dict[str, Run]], ppo_words: list[str], actor_folder: Path, tmp_path: Path
) -> None:
    variants = {"one": [], "cut": CUT, "all": ["ppo.actor_ema_eta=1"], "none": ["ppo.actor_ema_eta=0"]}
    runs = realhf_all("ppo-math", tmp_path, variants, [*ppo_words, *OPTIONS])
    assert same_curve(runs["one"], runs["cut"]) == []
    average = load_file(actor_folder / "model.safetensors")
    for step in (1, 2):
        actor = weights(runs["one"], "actor", step)
        average = {name: ETA * actor[name] + (1 - ETA) * average[name] for name in actor}
        for name in ("one", "cut"):
            found = weights(runs[name], "actor_ema", step)
            assert all(torch.allclose(found[key], value, atol=1e-6) for key, value in average.items())
        last = weights(runs["all"], "actor", step), weights(runs["all"], "actor_ema", step)
        assert all(torch.allclose(value, last[1][key], atol=1e-7) for key, value in last[0].items())
    rewards = {
        name: [line["eval/reward"] for line in run.metrics if "eval/reward" in line] for name, run in runs.items()
    }
    assert len(set(rewards["none"])) == 1 < len(set(rewards["all"]))  # the initial weights are evaluated again
