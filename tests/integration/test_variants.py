"""Options of PPO and of generation in whole runs."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import EXAMPLES, Task
from tests.integration.conftest import Run

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TWO = "n_gpus_per_node=2"
FIRST = ["ppo.group_size=4", "ppo.gen.keep_first=2", "n_logged_generations=-1"]
Runs = dict[str, Run]


@pytest.fixture(scope="module")
def runs(
    realhf_all: Callable[..., Runs],
    ppo_words: list[str],
    reward_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    variants = {
        "best": [
            TWO,
            "ppo.generation_size=5",
            "ppo.use_adaptive_kl_ctl=True",
            "ppo.adaptive_kl_target=0.01",
            "ppo.adaptive_kl_horizon=100",
            "n_logged_generations=-1",
        ],
        "no_critic": [
            TWO,
            "ppo.disable_value=True",
            "ppo.group_adv_norm=True",
            "ppo.group_size=3",
            "ppo.mask_too_long=True",
        ],
        "bf16": [
            "actor.bf16=True",
            "actor.gradient_checkpointing=True",
            "critic.gradient_checkpointing=True",
            "critic.recompute_granularity=selective",
            "exp_ctrl.total_train_epochs=2",
            "exp_ctrl.total_train_steps=4",
            "ppo.value_norm_type=ma",
        ],
        "failing": [TWO, f"reward.fn={reward_file}:failing", "reward.max_failures=1", "n_logged_generations=-1"],
        "custom": [f"reward.fn={EXAMPLES}/custom_reward.py:reward", "exp_ctrl.total_train_steps=1"],
        "first": FIRST,
        "first_two": [*FIRST, TWO, "allocation_mode=actor_gen:p2,*:d2", "ppo.gen.max_num_seqs=5"],
        "math": ["reward.fn=math", "exp_ctrl.total_train_steps=1", "ppo.gen.greedy=True", "save_roles=[actor]"],
    }
    return realhf_all("ppo-math", tmp_path_factory.mktemp("variants"), variants, ppo_words)


def test_every_variant_runs_all_steps(runs: Runs) -> None:
    steps = {"best": 3, "no_critic": 3, "bf16": 4, "failing": 3, "custom": 1, "math": 1, "first": 3,
             "first_two": 3}  # fmt: skip
    assert {name: len(run.metrics) for name, run in runs.items()} == steps
    for run in runs.values():
        for line in run.metrics:
            assert all(math.isfinite(value) for value in line.values())


def test_the_best_of_n_responses_are_trained_on(runs: Runs) -> None:
    for line in runs["best"].metrics:
        rows = runs["best"].generations(int(line["step"]))
        prompts = {row["prompt_id"] for row in rows}
        assert len(rows) == 5 * len(prompts)
        kept = [row for row in rows if "rewards" in row]
        assert len(kept) == 2 * len(prompts) and len({(r["prompt_id"], r["sample"]) for r in kept}) == len(kept)
        mean = sum(row["rewards"] for row in kept) / len(kept)
        assert mean > line["rew_inf/reward"] + 0.05  # the mean of all five is lower
        assert line["actor_train/reward"] == pytest.approx(mean, abs=1e-5)


def test_the_kl_coefficient_adapts_and_is_the_same_for_both(runs: Runs) -> None:
    coefficients = [line["actor_train/kl_coef"] for line in runs["best"].metrics]
    assert coefficients[0] == pytest.approx(0.05) and coefficients[1] < coefficients[0]  # starts below the target
    assert len(set(coefficients)) == 3
    assert coefficients == [line["critic_train/kl_coef"] for line in runs["best"].metrics]


def test_without_values_there_is_no_critic(runs: Runs) -> None:
    run = runs["no_critic"]
    assert {p.name for p in (run.root / "models").iterdir()} == {"actor"}
    assert not any(name.startswith("critic") for line in run.metrics for name in line)
    assert all(line["actor_train/grad_norm"] > 0 for line in run.metrics)


def test_bfloat16_is_stored_as_it_is_computed(runs: Runs, actor_folder: Path) -> None:
    run = runs["bf16"]
    actor, critic = (load_file(run.model(role, 4) / "model.safetensors") for role in ("actor", "critic"))
    assert {t.dtype for t in actor.values()} == {torch.bfloat16} and {t.dtype for t in critic.values()} == {
        torch.float32
    }
    before = load_file(actor_folder / "model.safetensors")
    moved = max(float((actor[name].float() - before[name]).abs().max()) for name in actor)
    assert 1e-3 < moved < 0.1
    assert abs(run.metrics[0]["actor_train/importance_ratio"] - 1.0) < 0.05


def test_a_reward_function_that_raises_is_counted(runs: Runs) -> None:
    for line in runs["failing"].metrics:
        rows = runs["failing"].generations(int(line["step"]))
        failed = [row for row in rows if "3" in row["response"]]
        assert not any("rewards" in row for row in failed) and line["rew_inf/verifier_timeout"] == 0
        assert {row["rewards"] for row in rows if row not in failed} <= {1.0}
        assert line["rew_inf/failed"] == line["rew_inf/verifier_error"] == pytest.approx(len(failed) / len(rows))
    assert any(line["rew_inf/verifier_error"] > 0 for line in runs["failing"].metrics)


def test_rewards_of_the_example_and_of_math(runs: Runs) -> None:
    assert 0.0 <= runs["custom"].metrics[0]["reward/mean"] <= 1.0 and "reward/accuracy" not in runs["custom"].metrics[0]
    line = runs["math"].metrics[0]
    assert line["reward/mean"] == pytest.approx(2 * line["reward/accuracy"] - 1)
    assert {p.name for p in (runs["math"].root / "models").iterdir()} == {"actor"}


@pytest.fixture(scope="module")
def generated(
    realhf_all: Callable[..., Runs], task: Task, actor_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    words = [
        f"model.path={actor_folder}",
        f"dataset.path={task.train}",
        "dataset.train_bs_n_seqs=10",
        "dataset.shuffle=False",
        "sampling.n=3",
        "sampling.max_new_tokens=10",
        "sampling.temperature=0.8",
    ]
    variants = {
        "one": ["mode=inline"],
        "two": [TWO, "sampling.max_num_seqs=4", "dataset.train_bs_n_seqs=17"],
        "first": [TWO, "allocation_mode=p2", "sampling.max_num_seqs=4", "sampling.keep_first=2"],
    }
    return realhf_all("gen", tmp_path_factory.mktemp("gen"), variants, words)


def test_generation_writes_every_response(generated: Runs, task: Task) -> None:
    rows = generated["one"].generations(1) + generated["one"].generations(2)
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [(p, s) for p in range(17) for s in range(3)]
    for row, line in zip(rows[::3], task.train.read_text().splitlines(), strict=True):
        assert f'"{row["fields"]["query_id"]}"' in line and row["prompt"] == row["fields"]["prompt"]
    assert not (generated["one"].root / "models").exists()
    lengths = [row["answer_tokens"] for row in rows]
    assert max(lengths) == 10 and all(row["answer_tokens"] == 10 for row in rows if row["truncated"])


def test_responses_do_not_depend_on_layout_or_batching(generated: Runs) -> None:
    rows = generated["one"].generations(1) + generated["one"].generations(2)
    assert generated["two"].generations(1) == rows


def test_the_responses_that_end_first_are_written(generated: Runs) -> None:
    rows = generated["one"].generations(1) + generated["one"].generations(2)
    groups = [sorted(rows[i : i + 3], key=lambda row: (row["answer_tokens"], row["sample"])) for i in range(0, 51, 3)]
    expected = [row for group in groups for row in sorted(group[:2], key=lambda row: row["sample"])]
    assert generated["first"].generations(1) + generated["first"].generations(2) == expected


def test_training_on_the_responses_that_end_first(runs: Runs) -> None:
    """The policy learns from two of four responses, on one worker and on two, and evaluates all."""
    one, two = runs["first"], runs["first_two"]
    for line, other in zip(one.metrics, two.metrics, strict=True):
        rows = one.generations(int(line["step"]))
        prompts = {row["prompt_id"] for row in rows}
        assert len(rows) == 2 * len(prompts) and two.generations(int(line["step"])) == rows
        assert line["actor_gen/response_length"] == pytest.approx(sum(r["answer_tokens"] for r in rows) / len(rows))
        assert other["actor_train/grad_norm"] == pytest.approx(line["actor_train/grad_norm"], rel=1e-4)
