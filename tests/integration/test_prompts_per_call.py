"""Calls of a part of a step's prompts have the results of whole steps."""
# ruff: noqa: F401, F811  (fixtures)

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Run, same_curve
from tests.integration.kills import changed_by_kill
from tests.integration.test_algorithms import FEW
from tests.integration.test_algorithms import KINDS as ALGORITHMS
from tests.integration.test_curriculum import words as curriculum
from tests.integration.test_episodes import KINDS as EPISODES
from tests.integration.test_episodes import loose, words
from tests.integration.test_forwarding import PLANS, WORDS
from tests.scaling import subset

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
APART = ["n_gpus_per_node=2", "allocation_mode=actor_gen:d1@0,actor_train:d1@0,*:d1@1"]
ONE = [
    f"{call}.prompts_per_call={n}" for call, n in (("actor_gen", 1), ("rew_inf", 1), ("ref_inf", 2), ("critic_inf", 1))
]
PARTS = ["actor_gen.prompts_per_call=3", "rew_inf.prompts_per_call=2"]


def responses(run: Run) -> list[str]:
    files = sorted((run.root / "generations").glob("step_*.jsonl"))
    return [json.loads(line)["response"] for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("kind", subset(ALGORITHMS, 4))
def test_the_curve_is_that_of_whole_steps(
    kind: str,
    realhf_all: Callable[..., Runs],
    ppo_words: list[str],
    actor_folder: Path,
    reward_file: Path,
    tmp_path: Path,
) -> None:
    options = [word.replace("ACTOR", str(actor_folder)).replace("FILE", str(reward_file)) for word in ALGORITHMS[kind]]
    variants = {"whole": options, "parts": [*options, *PARTS], "apart": [*options, *PARTS, *APART]}
    runs = realhf_all(kind.partition(",")[0], tmp_path, variants, [*ppo_words, *FEW])
    assert len(runs["whole"].curve) == 2
    for name in ("parts", "apart"):
        assert same_curve(runs["whole"], runs[name]) == [], name
        assert responses(runs[name]) == responses(runs["whole"])


@pytest.mark.parametrize("kind", subset(EPISODES, 1))
@pytest.mark.parametrize("partial", [[], ["env.partial_tokens=4", "ppo.recompute_logprobs=True"]])
def test_episodes_are_those_of_whole_steps(
    kind: str, partial: list[str], words: list[str], loose: str, realhf_all: Callable[..., Runs], tmp_path: Path
) -> None:
    options = [*words, loose, *EPISODES[kind], *partial, "exp_ctrl.total_train_steps=3"]
    variants = {"whole": [], "parts": PARTS, "apart": [*PARTS, *APART]}
    runs = realhf_all(kind, tmp_path, variants, options)
    for name in ("parts", "apart"):
        assert same_curve(runs["whole"], runs[name]) == [], name


def test_rollouts_ahead_of_training_in_parts(
    realhf_all: Callable[..., Runs], ppo_words: list[str], tmp_path: Path
) -> None:
    options = [*ppo_words, *WORDS]
    variants = {"whole": ["n_gpus_per_node=1"]}
    for name, n_workers in (("two meshes", 2), ("replicas", 4)):
        variants[name] = [f"allocation_mode={PLANS[name]}", f"n_gpus_per_node={n_workers}", *PARTS]
    runs = realhf_all("ppo-math", tmp_path, variants, options)
    for name in ("two meshes", "replicas"):
        assert same_curve(runs["whole"], runs[name]) == [], name


def test_one_prompt_per_call_on_many_workers(
    realhf_all: Callable[..., Runs], ppo_words: list[str], tmp_path: Path
) -> None:
    """Most data-parallel ranks have no row of a call."""
    meshes = {
        "dp": "actor_gen:d4@0-3,ref_inf:d2@0-1,critic_inf:t2@2-3,*:d4@0-3",
        "pp": "actor_gen:p2@0-1,ref_inf:p2@2-3,critic_inf:d1@3,*:d2t2@0-3",
    }
    variants = {name: [*ONE, "n_gpus_per_node=4", f"allocation_mode={text}"] for name, text in meshes.items()}
    runs = realhf_all("ppo-math", tmp_path, {"whole": [], **variants}, ppo_words)
    for name in meshes:
        assert same_curve(runs["whole"], runs[name]) == [], name
        assert responses(runs[name]) == responses(runs["whole"])


@pytest.mark.parametrize("options", [
    ["ppo.generation_size=5"],
    ["ppo.dynamic_sampling=True", "ppo.max_resamples=3"],
    ["dataset.eval_fraction=0.3", "exp_ctrl.eval_freq_steps=1", "dataset.train_bs_n_seqs=5"],
], ids=["best of n", "resampled prompts", "evaluation"])  # fmt: skip
def test_selected_and_held_out_rows(
    options: list[str], realhf_all: Callable[..., Runs], ppo_words: list[str], tmp_path: Path
) -> None:
    runs = realhf_all("ppo-math", tmp_path, {"whole": options, "parts": [*options, *ONE, *APART]}, ppo_words)
    assert same_curve(runs["whole"], runs["parts"]) == []


def test_a_curriculum_in_parts(realhf_all: Callable[..., Runs], curriculum: list[str], tmp_path: Path) -> None:
    runs = realhf_all("grpo", tmp_path, {"whole": [], "parts": [*PARTS, *APART]}, curriculum)
    assert same_curve(runs["whole"], runs["parts"]) == []


@pytest.mark.parametrize("whom", ["master", "worker"])
def test_a_kill_between_parts_changes_nothing(
    whom: str, realhf_all: Callable[..., Runs], ppo_words: list[str], tmp_path: Path
) -> None:
    options = [*ppo_words, *WORDS, *PARTS, f"allocation_mode={PLANS['replicas']}", "n_gpus_per_node=4",
               "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.total_train_steps=8"]  # fmt: skip
    whole = realhf_all("ppo-math", tmp_path, {"whole": options}, [])["whole"]
    assert changed_by_kill(whole, tmp_path / whom, options, 3, whom, "ppo-math") == []
