"""DPO, iterative DPO and PPO: probability of unseen responses in a toy task, and accuracy on sums.

    python -m experiments.dpo_vs_ppo.study [FOLDER] [--jobs N]

Runs in FOLDER (default: dpo-vs-ppo-run; finished runs are kept), writes results.json, table.md and figure.svg here.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.dpo_vs_ppo.toy import POLICIES, unseen_mass
from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, verdict_of
from experiments.sums import ROOT, StudyOptions, held_out_accuracy, run, start_model, training_part
from realhf.experiments.restem import newest_model, read_generations

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, N_PROMPTS, N_SAMPLES, ROUNDS, SHIFT = 64, 120, 600, 8, 3, 700
SEEDS, TOY_SEEDS, MOST, LEAST = (1, 2, 3, 4, 5), range(1, 11), 0.9, 0.1
METHODS = ("start", "DPO", "iterative DPO", "PPO")
DPO = ("dpo.beta=0.1", "dataset.train_bs_n_seqs=32", "dataset.max_pairs_per_prompt=4", "actor.optimizer.lr=2e-4",
       "actor.optimizer.lr_scheduler_type=constant")  # fmt: skip
RW = ("dataset.train_bs_n_seqs=32", "dataset.max_pairs_per_prompt=4", "dataset.eval_fraction=0.1",
      "model.optimizer.lr=1e-3", "exp_ctrl.total_train_epochs=4")  # fmt: skip
PPO = ("save_roles=[actor]", "ppo.group_size=4", "ppo.kl_ctl=0.05", "ppo.gen.max_new_tokens=32",
       "dataset.train_bs_n_seqs=32",
       "actor.optimizer.lr=3e-4", "critic.optimizer.lr=1e-3", "actor.optimizer.lr_scheduler_type=constant",
       "exp_ctrl.total_train_steps=60", "exp_ctrl.total_train_epochs=100", "score.normalise=True")  # fmt: skip
SAMPLING = (f"sampling.n={N_SAMPLES}", "sampling.max_new_tokens=32", "n_logged_generations=-1",
            "dataset.train_bs_n_seqs=100")  # fmt: skip


def verified_pairs(folder: Path, start: Path, seed: int) -> Path:
    """Sample responses of the initial policy; return the file of pairs of right and wrong ones."""
    prompts = training_part(folder, f"pairs-{seed}", HIDDEN, SHIFT * seed, N_PROMPTS)
    root = run(folder, f"samples-{seed}", "gen", f"model.path={start}", f"dataset.path={prompts}", *SAMPLING,
               "judge=True", "reward.wrong_reward=0", f"seed={seed}")  # fmt: skip
    file = folder / f"verified-{seed}.jsonl"
    builder = ROOT / "examples" / "build_pairs.py"
    subprocess.run([sys.executable, builder, root / "generations", file, "--max-pairs", "4"], check=True,
                   capture_output=True)  # fmt: skip
    return file


def scored_pairs(folder: Path, policy: Path, rewards: Path, seed: int, part: int) -> Path:
    """Sample responses of a policy; return the file of pairs of the best and the worst by the reward model."""
    n = N_PROMPTS // ROUNDS
    prompts = training_part(folder, f"scored-{seed}-{part}", HIDDEN, SHIFT * seed + n * part, n)
    root = run(folder, f"scored-{seed}-{part}", "score", f"policy.path={policy}", f"rew.path={rewards}", *SAMPLING,
               f"dataset.path={prompts}", f"seed={seed + 100 * part}")  # fmt: skip
    groups: dict[str, list[dict]] = {}
    for row in read_generations(root):
        if row["response"]:  # data sets have no empty answers
            groups.setdefault(row["prompt"], []).append(row)
    pairs = []
    for prompt, rows in groups.items():
        rows.sort(key=lambda row: row["rewards"])
        worst, best = rows[0]["response"], rows[-1]["response"]
        if worst != best:
            pairs.append({"prompt": prompt, "pos_answers": [best], "neg_answers": [worst]})
    file = folder / f"scored-pairs-{seed}-{part}.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return file


def dpo(folder: Path, name: str, policy: Path, pairs: Path, epochs: int, seed: int) -> Path:
    root = run(folder, name, "dpo", f"actor.path={policy}", f"dataset.path={pairs}", *DPO,
               f"exp_ctrl.total_train_epochs={epochs}", f"seed={seed}")  # fmt: skip
    return newest_model(root)


def train(folder: Path, start: Path, seed: int) -> dict[str, float]:
    """Return the accuracy of every method."""
    pairs = verified_pairs(folder, start, seed)
    rewards = newest_model(run(folder, f"rewards-{seed}", "rw", f"model.path={start}", f"dataset.path={pairs}", *RW,
                               f"seed={seed}"))  # fmt: skip
    policies = {"start": start, "DPO": dpo(folder, f"dpo-{seed}", start, pairs, ROUNDS, seed)}
    policy = start
    for part in range(ROUNDS):
        scored = scored_pairs(folder, policy, rewards, seed, part)
        policy = dpo(folder, f"iterative-{seed}-{part}", policy, scored, ROUNDS, seed)
    policies["iterative DPO"] = policy
    root = run(folder, f"ppo-{seed}", "ppo", f"actor.path={start}", f"rew.path={rewards}", *PPO,
               f"dataset.path={folder}/task{HIDDEN}/train.jsonl", f"seed={seed}")  # fmt: skip
    policies["PPO"] = newest_model(root)
    found = {name: held_out_accuracy(folder, f"{name.replace(' ', '-')}-{seed}-valid", HIDDEN, path, f"seed={seed}")
             for name, path in policies.items()}  # fmt: skip
    print(f"seed {seed}: {found}", flush=True)
    return found


def toy() -> dict[str, list[float]]:
    return {f"{algorithm}, {policy}": [unseen_mass(policy, algorithm, seed) for seed in TOY_SEEDS]
            for algorithm in ("DPO", "PPO") for policy in POLICIES}  # fmt: skip


def verdict(results: Results) -> Verdict:
    masses = {name: fmean(values) for name, values in results["toy"].items()}
    found = {name: [one[name] for one in results["sums"]] for name in METHODS}
    gains = [mean_and_error([one["PPO"] - one["DPO"] for one in results["sums"]]),
             mean_and_error([one["iterative DPO"] - one["DPO"] for one in results["sums"]])]  # fmt: skip
    conditions = [
        masses["DPO, shared"] > MOST and masses["PPO, shared"] < LEAST,
        masses["DPO, tabular"] < LEAST,
        gains[0][0] > 2 * gains[0][1],
        gains[1][0] > 2 * gains[1][1] and fmean(found["PPO"]) > fmean(found["iterative DPO"]),
    ]
    figures = ("unseen responses: " + ", ".join(f"{name} {value:.2f}" for name, value in masses.items())
               + "; accuracy: " + ", ".join(f"{name} {cell(values)}" for name, values in found.items()))  # fmt: skip
    return verdict_of(conditions, figures)


def table(results: Results) -> str:
    masses = [[name, cell(values)] for name, values in results["toy"].items()]
    found = [[name, cell([one[name] for one in results["sums"]])] for name in METHODS]
    return "\n".join([markdown(["toy task", "probability of unseen responses"], masses),
                      markdown(["sums", "held-out accuracy"], found)])  # fmt: skip


def draw(results: Results, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    for panel, bars, label in (
        (left, results["toy"], "probability of unseen responses"),
        (right, {name: [one[name] for one in results["sums"]] for name in METHODS}, "held-out accuracy"),
    ):
        means, errors = zip(*map(mean_and_error, bars.values()), strict=True)
        panel.bar(range(len(means)), means, yerr=errors, capsize=3, color="#00798c")
        panel.set(ylabel=label, xticks=range(len(means)), ylim=(0, 1))
        panel.set_xticklabels(list(bars), rotation=15)


def collect(options: StudyOptions) -> Results:
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    return {"sums": options.map(partial(train, options.folder, model), SEEDS)[()], "toy": toy()}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (9, 3.6))

if __name__ == "__main__":
    STUDY.main()
