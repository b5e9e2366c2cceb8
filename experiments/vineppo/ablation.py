"""Whether Monte-Carlo values gain more on longer solutions: the same runs on sums of four digits.

    python -m experiments.vineppo.ablation [FOLDER] [--jobs N]

Added after the results of study.py. Runs in FOLDER (default: vineppo-long-run), writes ablation.md.
"""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import fmean

from experiments.studies import cell, markdown
from experiments.sums import ROOT, metrics, run, study_options
from experiments.vineppo.study import EVAL_EVERY, HERE, HIDDEN, OPTIONS, OWN, PROMPTS

DIGITS, SFT_STEPS, SEEDS, GAINED = 4, 200, (1, 2, 3), 0.1
STEPS = {"vineppo": 40, "ppo-math": 80, "grpo": 80}
Points = list[tuple[float, float, float]]


def start(folder: Path) -> Path:
    """Create the task and return the model from which runs start."""
    task = folder / "task"
    if not (folder / "sums" / "start" / "done").exists():
        words: list[str | Path] = [task, "--digits", str(DIGITS), "--hidden", str(HIDDEN), "--layers", "3"]
        subprocess.run([sys.executable, ROOT / "examples" / "arithmetic.py", *words], check=True, capture_output=True)
    run(folder, "start", "sft", f"dataset.path={task}/sft.jsonl", "dataset.train_bs_n_seqs=64",
        "model.init_from_scratch=True", f"model.config={task}/model", f"model.tokenizer={task}/tokenizer",
        "model.optimizer.lr=3e-3", "model.optimizer.lr_scheduler_type=constant", "exp_ctrl.total_train_epochs=100",
        f"exp_ctrl.total_train_steps={SFT_STEPS}")  # fmt: skip
    return folder / "sums" / "start" / "models" / "model" / f"step_{SFT_STEPS}"


def train(folder: Path, model: Path, algorithm: str, seed: int) -> Points:
    """Return step, time and held-out accuracy at each evaluation, from step 0 on."""
    task = folder / "task"
    root = run(folder, f"{algorithm}-{seed}", algorithm, f"dataset.path={task}/train.jsonl", f"actor.path={model}",
               f"dataset.eval_path={task}/valid.jsonl", f"dataset.train_bs_n_seqs={PROMPTS}", *OPTIONS,
               *OWN.get(algorithm, ()), "ppo.gen.max_new_tokens=72", f"exp_ctrl.total_train_steps={STEPS[algorithm]}",
               "exp_ctrl.total_train_epochs=100", f"exp_ctrl.eval_freq_steps={EVAL_EVERY}", "evaluation.n=2",
               "evaluation.greedy=False", f"seed={seed}")  # fmt: skip
    points, seconds = Points(), 0.0
    for line in metrics(root):
        seconds += line.get("time/step_s", 0.0)
        if "eval/accuracy" in line:
            points.append((line["step"], seconds, line["eval/accuracy"]))
    print(f"{algorithm} seed {seed}: {[round(point[2], 2) for point in points]}", flush=True)
    return points


def to_gain(points: Points, target: float, column: int) -> float:
    return next((point[column] for point in points if point[2] >= target), math.inf)


def main() -> None:
    options = study_options(__doc__, "vineppo-long-run", jobs=2)
    found = options.map(partial(train, options.folder, start(options.folder)), list(STEPS), SEEDS)
    first = fmean(points[0][2] for runs in found.values() for points in runs)
    goal = first + GAINED
    rows = [[name, *(", ".join(f"{to_gain(points, goal, column):.0f}" for points in runs) for column in (0, 1)),
             cell([points[-1][2] for points in runs])] for (name,), runs in found.items()]  # fmt: skip
    target = f"to {goal:.0%}, by seed"
    text = markdown(["algorithm", f"steps {target}", f"seconds {target}", "accuracy at the end"], rows)
    (HERE / "ablation.md").write_text(f"Accuracy at the start: {first:.3f}.\n\n{text}")
    print(text)


if __name__ == "__main__":
    main()
