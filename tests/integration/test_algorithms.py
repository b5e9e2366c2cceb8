"""Policy-gradient runs: each algorithm has the same curve on one worker and on two."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Task
from tests.integration.conftest import Run, same_curve

pytestmark = [pytest.mark.dist, pytest.mark.slow]
Runs = dict[str, Run]
FEW = ["exp_ctrl.total_train_steps=2", "critic.optimizer.lr=1e-5", "ppo.group_size=3"]
CUT = ["n_gpus_per_node=2", "allocation_mode=actor_gen:d2,actor_train:t2,*:d2"]
KINDS = {
    "distill": [
        "ppo.distill.prompt='{solutions[0]} {prompt}'",
        "ppo.distill.objective=forward_kl",
        "ppo.distill.top_k=4",
    ],
    "grpo": ["ppo.dynamic_sampling=True", "ppo.overlong_buffer=4", "ppo.kl_monitor=[k2,k3]"],
    "rloo": ["ppo.recompute_logprobs=True", "ppo.entropy_coef=0.01", "teacher.path=ACTOR", "ppo.length_penalty=linear"],
    "reinforce-pp": ["ppo.policy_loss=cispo", "ppo.eps_clip_high=0.28"],
    "ppo-math": [
        "ppo.policy_loss=sapo",
        "ppo.advantage=opo",
        "ppo.disable_value=True",
        "ppo.recompute_logprobs=True",
        "ppo.importance=sequence_mis",
    ],
    "reinforce-pp, gdpo": [
        "reward.fn=math",  # the default: the rewards are those of fns
        "reward.fns=[FILE:graded,FILE:rare]",
        "reward.weights=[1,2]",
        "ppo.advantage=gdpo",
        "ppo.kl_in=loss",
        "ppo.policy_loss=kl_cov",
        "ppo.losses.kl_cov.share=0.2",
    ],
    "remax": ["ppo.kl_in=none"],
    "vineppo": ["vine.n_rollouts=2", "vine.max_states=2"],
}


@pytest.fixture(scope="module")
def runs(
    realhf_all: Callable[..., Runs],
    ppo_words: list[str],
    actor_folder: Path,
    reward_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    found: Runs = {}
    for name, words in KINDS.items():
        options = [word.replace("ACTOR", str(actor_folder)).replace("FILE", str(reward_file)) for word in words]
        variants = {name: options, f"{name}, cut": [*options, *CUT]}
        experiment = name.partition(",")[0]
        found |= realhf_all(experiment, tmp_path_factory.mktemp(experiment), variants, [*ppo_words, *FEW])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_does_not_depend_on_the_layout(kind: str, runs: Runs) -> None:
    whole, cut = runs[kind], runs[f"{kind}, cut"]
    assert len(whole.curve) == 2 and whole.curve[1]["actor_train/grad_norm"] > 0
    assert same_curve(whole, cut) == []
    for step in (1, 2):
        assert [row["response"] for row in cut.generations(step)] == [
            row["response"] for row in whole.generations(step)
        ]


def test_metrics_of_each_algorithm(runs: Runs) -> None:
    grpo, rloo, remax, vine, distill = (runs[name].curve[1] for name in ("grpo", "rloo", "remax", "vineppo", "distill"))
    assert grpo["actor_train/kl_k3"] > 0 and grpo["actor_train/kl_k2"] > 0 and grpo["actor_train/kl_loss"] > 0
    assert rloo["actor_train/logprob_diff"] < 1e-4 and rloo["actor_train/is_weight"] == pytest.approx(1.0, abs=1e-4)
    assert rloo["actor_train/teacher_kl"] != 0 and 0 < rloo["actor_train/entropy"] < 5
    assert distill["actor_train/distill_loss"] > 0 and distill["rew_inf/reward"] == 0
    assert "ref_inf" not in str(remax) and remax["greedy_rew/reward"] != remax["rew_inf/reward"]
    assert 1 <= vine["value_gen/states"] <= 2 and vine["value_gen/shared_states"] > 0.3


def test_rollout_one_step_ahead(
    realhf_all: Callable[..., Runs], ppo_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    apart = ["n_gpus_per_node=2", "allocation_mode=manual", "ppo.disable_value=True", "ppo.recompute_logprobs=True",
             "actor_gen.device_mesh=0", "rew_inf.device_mesh=0", "ref_inf.device_mesh=1", "actor_inf.device_mesh=1",
             "actor_train.device_mesh=1"]  # fmt: skip
    band = ["ppo.importance=icepop", "ppo.corrections.icepop.low=0.99", "ppo.corrections.icepop.high=1.01"]
    variants = {"abreast": [], "ahead": ["max_staleness=1"], "band": ["max_staleness=1", *band]}
    runs = realhf_all("ppo-math", tmp_path_factory.mktemp("stale"), variants, [*ppo_words, *apart])
    abreast, ahead = runs["abreast"].curve, runs["ahead"].curve
    assert abreast[0]["actor_train/logprob_diff"] == pytest.approx(ahead[0]["actor_train/logprob_diff"], abs=1e-6)
    assert all(line["actor_train/logprob_diff"] < 1e-4 for line in abreast)
    assert all(line["actor_train/logprob_diff"] > 1e-3 for line in ahead[1:])  # with the previous weights
    assert all(line["actor_train/importance_ratio"] == pytest.approx(1.0, abs=0.2) for line in ahead)
    assert all(line["actor_train/is_rejected"] == 0 for line in ahead)
    rejected = [line["actor_train/is_rejected"] for line in runs["band"].curve]
    assert rejected[0] == 0 and all(0 < share < 1 for share in rejected[1:])


def test_dynamic_sampling_fills_its_batches(
    realhf_all: Callable[..., Runs], ppo_words: list[str], reward_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Seventeen sums, seven per step; a third of the groups have equal rewards."""
    words = [*ppo_words, *FEW, f"reward.fn={reward_file}:rare", "ppo.dynamic_sampling=True", "n_logged_generations=-1",
             "exp_ctrl.total_train_epochs=2", "exp_ctrl.total_train_steps=4"]  # fmt: skip
    variants = {"whole": [], "cut": CUT, "no more": ["ppo.max_resamples=0"], "ahead": ["max_staleness=1"]}
    runs = realhf_all("grpo", tmp_path_factory.mktemp("dapo"), variants, words)
    assert same_curve(runs["whole"], runs["cut"]) == []
    used = [
        {row["prompt_id"] for row in runs["no more"].generations(step) if "rewards" in row} for step in (1, 2, 3, 4)
    ]
    assert min(map(len, used)) < 7 and "prompts/sampled" not in runs["no more"].metrics[0]
    for name in ("whole", "cut", "ahead"):
        assert all(line["prompts/used"] >= 7 for line in runs[name].metrics)
        assert max(line["prompts/sampled"] for line in runs[name].metrics) > 7
    for line in runs["whole"].metrics:
        rows = runs["whole"].generations(int(line["step"]))
        groups: dict[int, list[float]] = {}
        for row in rows:
            groups.setdefault(row["prompt_id"], []).extend([row["rewards"]] if "rewards" in row else [])
        assert len(groups) == line["prompts/sampled"]
        if line["step"] <= 2:  # later resamples cross the end of an epoch
            assert len({row["prompt"] for row in rows}) == min(17, len(groups))
        used = [rewards for rewards in groups.values() if rewards]
        assert len(used) == line["prompts/used"] and all(len(set(rewards)) == 2 for rewards in used)


def test_restem_is_a_multi_stage_experiment(
    realhf: Callable[..., Run], actor_folder: Path, reward_file: Path, task: Task, tmp_path: Path
) -> None:
    words = [f"model.path={actor_folder}", f"dataset.path={task.train}", f"valid_path={task.valid}", "n_rounds=1",
             f"reward.fn={reward_file}:graded", "threshold=-1", "sampling.n=2", "sampling.max_new_tokens=8", "epochs=1",
             "validation.n=2", "validation.max_new_tokens=8", "fit_batch=8", "dataset.train_bs_n_seqs=5"]  # fmt: skip
    root = realhf("restem", tmp_path, words).root
    result = json.loads((root / "restem.json").read_text())
    assert result["chosen"] == 1 and Path(result["model"], "model.safetensors").is_file()
    assert result["rounds"][0]["n_answers"] == 34 and 0 < result["rounds"][0]["n_kept"] <= 34
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"round1-sample", "round1-fit", "round1-valid"}
