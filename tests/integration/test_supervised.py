"""SFT, a reward model and PPO against it, from data files to Hugging Face folders."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.conftest import EXAMPLES, Task
from tests.integration.conftest import REPOSITORY, Run, same_curve

pytestmark = [pytest.mark.dist, pytest.mark.slow]
PREFERENCES = REPOSITORY.parent / "shared" / "data" / "gsm8k_preferences.jsonl"
N_PAIRS = 12
Runs = dict[str, Run]


@pytest.fixture(scope="module")
def sft(realhf_all: Callable[..., Runs], sft_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two epochs of forty rows, fifteen per step: six steps, the last with five rows."""
    variants = {
        "local": [],
        "inline": ["mode=inline"],
        "three": ["n_gpus_per_node=3", "exp_ctrl.save_freq_steps=2", "n_logged_generations=0"],
    }
    words = [*sft_words, "exp_ctrl.total_train_epochs=2", "model.optimizer.lr_scheduler_type=constant"]
    return realhf_all("sft", tmp_path_factory.mktemp("sft"), variants, words)


def test_sft_learns_and_saves_a_model(sft: Runs) -> None:
    run = sft["local"]
    losses = [line["loss"] for line in run.metrics]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    assert run.metrics[5]["sft_train/n_tokens"] > 5 and "saved   model" in run.output
    model = AutoModelForCausalLM.from_pretrained(run.model("model", 6))
    stored = load_file(run.model("model", 6) / "model.safetensors")
    assert torch.equal(model.get_input_embeddings().weight, stored["model.embed_tokens.weight"])


def test_sft_inline_is_sft_local_bit_for_bit(sft: Runs) -> None:
    assert sft["local"].curve == sft["inline"].curve
    files = [sft[name].model("model", 6) / "model.safetensors" for name in ("local", "inline")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_sft_does_not_depend_on_the_number_of_workers(sft: Runs) -> None:
    for expected, line in zip(sft["local"].curve, sft["three"].curve, strict=True):
        assert line == {name: pytest.approx(value, abs=1e-4, rel=1e-4) for name, value in expected.items()}


def test_models_are_saved_at_the_configured_frequency(sft: Runs) -> None:
    folders = sorted((sft["three"].root / "models" / "model").iterdir())
    assert [folder.name for folder in folders] == ["step_2", "step_4", "step_6"]
    tensors = [load_file(folder / "model.safetensors")["model.norm.weight"] for folder in folders]
    assert not torch.equal(tensors[0], tensors[1]) and not torch.equal(tensors[1], tensors[2])
    assert not (sft["three"].root / "generations").exists()


@dataclass(frozen=True)
class PairTask:
    """Pairs of responses, a byte-pair tokenizer trained on them, and a model config."""

    pairs: Path
    words: Path


@pytest.fixture(scope="module")
def pair_task(tmp_path_factory: pytest.TempPathFactory) -> PairTask:
    root = tmp_path_factory.mktemp("pairs")
    pairs, words = root / "pairs.jsonl", root / "words"
    if PREFERENCES.exists():
        with PREFERENCES.open() as file:
            pairs.write_text("".join(next(file) for _ in range(N_PAIRS)))
    else:
        asked = ((f"What is {i} and {i + 1}?", f"It is {2 * i + 1}.") for i in range(N_PAIRS))
        rows = ({"prompt": prompt, "pos_answers": [good], "neg_answers": ["No idea!"]} for prompt, good in asked)
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = [sys.executable, str(EXAMPLES / "make_tokenizer.py"), str(pairs), str(words)]
    subprocess.run([*program, "--vocab", "300", "--hidden", "32", "--layers", "2"], check=True)
    return PairTask(pairs, words)


@pytest.fixture(scope="module")
def reward_model(realhf: Callable[..., Run], pair_task: PairTask, tmp_path_factory: pytest.TempPathFactory) -> Run:
    words = [
        "model.init_from_scratch=True",
        f"model.config={pair_task.words}",
        f"model.tokenizer={pair_task.words}",
        f"dataset.path={pair_task.pairs}",
        "dataset.train_bs_n_seqs=5",
        "dataset.max_seqlen=300",
        f"dataset.eval_path={pair_task.pairs}",
        "exp_ctrl.total_train_epochs=3",
        "exp_ctrl.eval_freq_steps=6",
        "model.optimizer.lr=3e-3",
        "n_gpus_per_node=2",
    ]
    return realhf("rw", tmp_path_factory.mktemp("rw"), words)


def test_a_reward_model_learns_its_pairs(reward_model: Run) -> None:
    lines = reward_model.metrics[1:]
    assert len(lines) == 8 and lines[0]["loss"] == pytest.approx(0.7, abs=0.1)
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["rw_train/accuracy"] > 0.5
    scorer = AutoModelForSequenceClassification.from_pretrained(reward_model.model("model", 8))
    assert scorer.config.num_labels == 1


def test_a_reward_model_is_evaluated_on_held_out_pairs(reward_model: Run) -> None:
    at_start, first, last = reward_model.evaluations
    assert (at_start["step"], first["step"], last["step"]) == (0, 6, 8) and first["metrics"] != last["metrics"]
    assert last["counts"]["rw_eval/accuracy"] == N_PAIRS and last["counts"]["rw_eval/score"] == 2 * N_PAIRS
    assert json.loads((reward_model.model("model", 8) / "evaluation.json").read_text()) == last
    assert f"eval    step 8: accuracy {last['metrics']['rw_eval/accuracy']:.4f}" in reward_model.output


def test_ppo_against_the_reward_model(
    realhf: Callable[..., Run], pair_task: PairTask, reward_model: Run, tmp_path: Path
) -> None:
    words = [
        "actor.init_from_scratch=True",
        f"actor.config={pair_task.words}",
        f"actor.tokenizer={pair_task.words}",
        f"rew.path={reward_model.model('model', 8)}",
        f"dataset.path={pair_task.pairs}",
        "dataset.train_bs_n_seqs=5",
        "ppo.gen.max_new_tokens=8",
        "ppo.group_size=2",
        "ppo.ppo_n_minibatches=2",
        "score.normalise=True",
        "exp_ctrl.total_train_steps=2",
        "n_gpus_per_node=2",
        "allocation_mode=rew_inf:d1,*:d2",
        "n_logged_generations=-1",
    ]
    run = realhf("ppo", tmp_path, words)
    assert [line["step"] for line in run.metrics] == [1, 2]
    for line in run.metrics:
        rewards = [row["rewards"] for row in run.generations(int(line["step"]))]
        assert len(set(rewards)) == 10 and line["reward/mean"] == pytest.approx(sum(rewards) / 10)
    assert {p.name for p in (run.root / "models").iterdir()} == {"actor", "critic"}  # the reward model is not trained


@pytest.fixture(scope="module")
def dpo(
    realhf_all: Callable[..., Runs], task: Task, actor_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """Seventeen pairs, four held out; four epochs of the others, five per step: eleven steps."""
    variants = {
        "local": [],
        "cut": ["n_gpus_per_node=2", "allocation_mode=ref_inf:d2,actor_train:p2", "ref.offload=True"],
        "kto": ["dpo.loss=kto", "n_gpus_per_node=2"],
        "orpo": ["dpo.loss=orpo"],
    }
    words = [
        f"actor.path={actor_folder}",
        f"dataset.path={task.root / 'preferences.jsonl'}",
        "dataset.eval_fraction=0.25",
        "dataset.train_bs_n_seqs=5",
        "exp_ctrl.eval_freq_steps=5",
        "exp_ctrl.total_train_epochs=4",
        "actor.optimizer.lr=3e-3",
    ]
    return realhf_all("dpo", tmp_path_factory.mktemp("dpo"), variants, words)


def test_dpo_starts_at_log_two_and_trains(dpo: Runs) -> None:
    losses = [line["loss"] for line in dpo["local"].metrics[1:]]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5) and len(losses) == 11 and losses[-1] < 0.6
    assert dpo["kto"].metrics[1]["loss"] == pytest.approx(0.5, abs=1e-5)
    assert "ref_inf" not in dpo["orpo"].output and dpo["orpo"].metrics[-1]["loss"] < dpo["orpo"].metrics[1]["loss"]
    assert {p.name for p in (dpo["local"].root / "models").iterdir()} == {"actor"}


def test_dpo_and_its_evaluation_do_not_depend_on_the_layout(dpo: Runs) -> None:
    assert not same_curve(dpo["local"], dpo["cut"])
    trials = [dpo[name].evaluations for name in ("local", "cut")]
    assert [found["step"] for found in trials[0]] == [0, 5, 10, 11]
    for one, cut in zip(*trials, strict=True):
        assert one["counts"] == cut["counts"] and cut["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("kind", "file"), [("outcome", "outcomes"), ("process", "steps"), ("ranked", "preferences")])
def test_reward_models_of_every_kind(
    kind: str, file: str, realhf: Callable[..., Run], task: Task, actor_folder: Path, tmp_path: Path
) -> None:
    words = [
        f"model.path={actor_folder}",
        f"rw.type={kind}",
        f"dataset.path={task.root / file}.jsonl",
        "dataset.eval_fraction=0.25",
        "dataset.train_bs_n_seqs=5",
        "exp_ctrl.total_train_epochs=4",
        "model.optimizer.lr=3e-3",
    ]
    run = realhf("rw", tmp_path, words)
    assert run.metrics[-1]["loss"] < run.metrics[1]["loss"] and run.metrics[1]["loss"] == pytest.approx(0.7, abs=0.15)
    _, trial = run.evaluations
    assert trial["counts"]["rw_eval/loss"] == 4 and 0 <= trial["metrics"]["rw_eval/accuracy"] <= 1
