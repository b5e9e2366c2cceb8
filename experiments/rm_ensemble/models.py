"""The models of the study: a policy, a larger gold scorer, and reward models trained on its preferences."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import run as run_command
from typing import Any

from experiments.sums import ROOT, StudyOptions, make_task, run, start_model, supervised_model
from realhf.experiments.bon import by_prompt
from realhf.experiments.restem import newest_model, read_generations

POLICY, SMALL, LARGE = 64, 48, 160
"""Widths of the policy, the reward models and the gold scorer; all have three layers."""
POLICY_STEPS, BASE_STEPS, LARGE_STEPS = 130, 90, 200
GOLD_PROMPTS, PREFERENCE_PROMPTS = 2000, 1500
NOISE = 0.25
MEMBERS = (1, 2, 3, 4, 5)
GROUPS = {"shared": ("shared", NOISE), "own": ("own", NOISE), "own, no noise": ("own", 0.0)}
"""What the members of an ensemble are fine-tuned from, one pre-trained model or one each, and their label noise."""
REWARD_MODEL = ("dataset.train_bs_n_seqs=32", "dataset.eval_fraction=0.2", "model.optimizer.lr=1e-3")


@dataclass(frozen=True)
class Models:
    """Folders of the models; ``groups`` has those of the five members of each group."""

    policy: Path
    gold: Path
    groups: dict[str, list[Path]]
    accuracies: dict[str, list[float]]
    """Share of held-out pairs that a model ranks as its labels do: the gold scorer, and the members of each group."""


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sampled(folder: Path, name: str, policy: Path, begin: int, n: int, *options: str) -> Path:
    """Sample responses to ``n`` training prompts and score them; return the folder of the run."""
    lines = (folder / f"task{POLICY}" / "train.jsonl").read_text().splitlines(keepends=True)
    prompts = folder / f"{name}.jsonl"
    prompts.write_text("".join(lines[begin : begin + n]))
    return run(folder, name, *options, f"dataset.path={prompts}", "dataset.train_bs_n_seqs=250",
               "sampling.max_new_tokens=32")  # fmt: skip


def reward_model(folder: Path, name: str, base: Path, pairs: Path, *options: str) -> tuple[Path, float]:
    """Fine-tune a model on pairs of responses; return its folder and its accuracy on held-out pairs."""
    root = run(folder, name, "rw", f"dataset.path={pairs}", f"model.path={base}", *REWARD_MODEL, *options)
    last = (root / "evaluation.jsonl").read_text().splitlines()[-1]
    return newest_model(root), json.loads(last)["metrics"]["rw_eval/accuracy"]


def gold_scorer(folder: Path, policy: Path) -> tuple[Path, float]:
    """Train the large model on worked sums, then to rank right above wrong ones, worked and sampled ones."""
    base = supervised_model(folder, "large", LARGE, LARGE_STEPS)
    judged = sampled(folder, "judged", policy, 0, GOLD_PROMPTS, "gen", f"model.path={policy}", "sampling.n=8",
                     "judge=True", "reward.wrong_reward=0")  # fmt: skip
    pairs = folder / "gold-pairs.jsonl"
    build = [sys.executable, ROOT / "examples" / "build_pairs.py", judged / "generations", pairs, "--max-pairs", "4"]
    run_command(build, check=True, capture_output=True)
    with pairs.open("a") as file:
        file.write((folder / f"task{LARGE}" / "preferences.jsonl").read_text())
    return reward_model(folder, "gold", base, pairs, "dataset.max_pairs_per_prompt=4", "exp_ctrl.total_train_epochs=3")


def preferences(folder: Path, policy: Path, gold: Path) -> Path:
    """Write pairs of responses of the policy, the one with the higher gold score first."""
    root = sampled(folder, "compared", policy, GOLD_PROMPTS, PREFERENCE_PROMPTS, "score", f"policy.path={policy}",
                   "sampling.n=2", f"rew.path={gold}")  # fmt: skip
    rows = []
    for responses in by_prompt(read_generations(root)):
        worse, better = sorted(responses, key=lambda row: row["rewards"])
        if better["rewards"] > worse["rewards"] and worse["response"] and better["response"]:
            rows.append({"prompt": better["fields"]["prompt"], "pos_answers": [better["response"]],
                         "neg_answers": [worse["response"]]})  # fmt: skip
    return write_rows(folder / "pairs.jsonl", rows)


def member(folder: Path, pairs: Path, group: str, seed: int) -> tuple[Path, float]:
    """Train a reward model; with its own pre-training, the seed also gives the model it starts from."""
    kind, noise = GROUPS[group]
    base = folder / "sums" / f"small-{seed if kind == 'own' else MEMBERS[0]}" / "models" / "model"
    return reward_model(folder, f"rw-{'-'.join(group.replace(',', '').split())}-{seed}", base / f"step_{BASE_STEPS}",
                        pairs, f"seed={seed}", f"dataset.label_noise={noise}",
                        "exp_ctrl.total_train_epochs=4")  # fmt: skip


def pretrained(folder: Path, seed: int) -> Path:
    return supervised_model(folder, f"small-{seed}", SMALL, BASE_STEPS, f"seed={seed}")


def train_models(options: StudyOptions) -> Models:
    folder = options.folder
    for width in (POLICY, SMALL, LARGE):
        make_task(folder, width)
    policy = start_model(folder, POLICY, POLICY_STEPS)
    options.map(partial(pretrained, folder), MEMBERS)
    gold, accuracy = gold_scorer(folder, policy)
    pairs = preferences(folder, policy, gold)
    trained = options.map(partial(member, folder, pairs), list(GROUPS), MEMBERS)
    groups = {group: [path for path, _ in models] for (group,), models in trained.items()}
    accuracies = {group: [found for _, found in models] for (group,), models in trained.items()}
    return Models(policy, gold, groups, {"gold": [accuracy], **accuracies})
