"""Checkpoints whose cadence the planner chooses."""

import json
from pathlib import Path

import msgspec
import pytest

from realhf.apps.prepare.cadence import checkpoint_plan
from realhf.apps.prepare.options import updated
from realhf.apps.prepare.preflight import PlanReport, plan_report
from realhf.base.errors import UserError
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.goodput import CheckpointPlan, useful_share

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 512,
          "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000,
          "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
          "tie_word_embeddings": False}  # fmt: skip


def report(folder: Path, *words: str) -> PlanReport:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    models = [f"{role}.{key}" for role in ("actor", "critic", "ref", "rew")
              for key in ("init_from_scratch=True", f"config={folder}")]  # fmt: skip
    place = (
        "planner.hardware=h100",
        "n_nodes=2",
        "n_gpus_per_node=1",
        "dataset.train_bs_n_seqs=4",
        "ppo.gen.max_new_tokens=64",
        "dataset.max_prompt_len=64",
    )
    return plan_report("ppo", updated(PPOExperiment(), [*models, *place, *words]))


def chosen(folder: Path, *words: str) -> CheckpointPlan:
    plan = checkpoint_plan(report(folder, "exp_ctrl.ckpt_freq_steps=auto", *words))
    assert plan is not None
    return plan


def test_the_cadence_follows_the_failures(tmp_path: Path) -> None:
    plan = chosen(tmp_path)
    assert plan.rate.mtbf_s == pytest.approx(50_700 * 3600 / 2)
    assert plan.rate.down_s > 60 + 180  # a lost node has no heartbeat for 60 s; start-up
    assert plan.share == useful_share(plan.step_s, plan.cadence, plan.times, plan.rate) > 0.9
    often = chosen(tmp_path, "planner.mtbf_hours=50")
    assert often.cadence < plan.cadence and often.share < plan.share
    slow = chosen(tmp_path, "planner.checkpoint_s=3600", "planner.startup_s=10")
    assert slow.times.write_s == 3600 and slow.cadence > plan.cadence
    assert slow.rate.down_s == pytest.approx(plan.rate.down_s - 170)
    assert chosen(tmp_path, "exp_ctrl.total_train_steps=3").cadence == 3
    assert f"every {plan.cadence} steps" in str(plan) and "planner.mtbf_hours" in str(plan)


def test_the_cadence_survives_in_the_run_directory(tmp_path: Path) -> None:
    plan = chosen(tmp_path)
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(plan))), CheckpointPlan) == plan


def test_a_given_cadence_is_kept(tmp_path: Path) -> None:
    assert checkpoint_plan(report(tmp_path, "exp_ctrl.ckpt_freq_steps=7")) is None
    assert checkpoint_plan(report(tmp_path)) is None


@pytest.mark.parametrize("value, message", [("often", "expected a number of steps, or auto"), ("0", "must be >= 1"),
                                            ("2.5", "expected int"), ("True", "expected int")])  # fmt: skip
def test_invalid_cadences(value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        report(tmp_path, f"exp_ctrl.ckpt_freq_steps={value}")
