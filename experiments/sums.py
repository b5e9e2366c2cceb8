"""What studies on sums share: the task, models of any width, runs of the command line, and their curves."""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
REALHF = [sys.executable, "-m", "realhf"]
R = TypeVar("R")
Curve = list[tuple[float, float]]
"""Sampled tokens in training and accuracy on held-out sums."""


@dataclass(frozen=True)
class StudyOptions:
    """Where a study runs, and how many runs at a time."""

    folder: Path
    jobs: int

    def map(self, study: Callable[..., R], *axes: Sequence[Any]) -> dict[tuple[Any, ...], list[R]]:
        """Return the results of ``study`` on the product of the axes, the last of which are seeds, by the others."""
        cases = list(product(*axes))
        with ThreadPoolExecutor(self.jobs) as pool:
            found = list(pool.map(lambda case: study(*case), cases))
        results: dict[tuple[Any, ...], list[R]] = {}
        for (*labels, _), result in zip(cases, found, strict=True):
            results.setdefault(tuple(labels), []).append(result)
        return results


def study_options(description: str | None, folder: str, jobs: int = 1) -> StudyOptions:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", nargs="?", default=folder, type=Path)
    parser.add_argument("--jobs", type=int, default=jobs, help="number of concurrent runs")
    args = parser.parse_args()
    return StudyOptions(args.folder.resolve(), args.jobs)


def make_task(folder: Path, hidden: int) -> Path:
    """Create the task with the config of a model of three layers; the data is the same for every width."""
    task = folder / f"task{hidden}"
    example: list[str | Path] = [sys.executable, ROOT / "examples" / "arithmetic.py", task, "--hidden", str(hidden),
                                 "--layers", "3"]  # fmt: skip
    subprocess.run(example, check=True, capture_output=True)
    return task


def run(folder: Path, name: str, experiment: str, *options: str) -> Path:
    """Run ``realhf quickstart`` with one worker of one thread, unless the run exists, and return its directory."""
    root = folder / "sums" / name
    if (root / "done").exists():
        return root
    place = (f"fileroot={folder}", "experiment_name=sums", f"trial_name={name}", "overwrite=True", "device=cpu",
             "threads_per_worker=1", "tensorboard.enabled=False")  # fmt: skip
    done = subprocess.run([*REALHF, "quickstart", experiment, *place, *options], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{experiment} {' '.join(options)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (root / "done").touch()
    return root


def supervised_model(folder: Path, name: str, hidden: int, steps: int, *options: str) -> Path:
    """Train a model from scratch on worked examples."""
    task = make_task(folder, hidden)
    run(folder, name, "sft", f"dataset.path={task}/sft.jsonl", "dataset.train_bs_n_seqs=64",
        "model.init_from_scratch=True", f"model.config={task}/model", f"model.tokenizer={task}/tokenizer",
        "model.optimizer.lr=3e-3", f"exp_ctrl.total_train_steps={steps}", "exp_ctrl.total_train_epochs=100",
        *options)  # fmt: skip
    return folder / "sums" / name / "models" / "model" / f"step_{steps}"


def start_model(folder: Path, hidden: int, steps: int) -> Path:
    """Train the model from which a study starts, with a constant learning rate."""
    return supervised_model(folder, "start", hidden, steps, "model.optimizer.lr_scheduler_type=constant")


def held_out_accuracy(folder: Path, name: str, hidden: int, model: Path, *options: str) -> float:
    """Return the accuracy of four sampled responses to each held-out sum."""
    root = run(folder, name, "gen", f"model.path={model}", f"dataset.path={folder}/task{hidden}/valid.jsonl",
               "dataset.train_bs_n_seqs=100", "judge=True", "sampling.n=4", "sampling.max_new_tokens=32",
               *options)  # fmt: skip
    return fmean(line["rew_inf/accuracy"] for line in metrics(root))


def training_part(folder: Path, name: str, hidden: int, begin: int, n: int) -> Path:
    """Write ``n`` rows of the training data from row ``begin`` on, and go on at the first row after the last one."""
    lines = (folder / f"task{hidden}" / "train.jsonl").read_text().splitlines(keepends=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(lines[(begin + i) % len(lines)] for i in range(n)))
    return file


def task_options(folder: Path, hidden: int, model: Path, prompts: int, steps: int, eval_every: int) -> list[str]:
    """Return the options of a policy-gradient run: data, initial model, length, and two sampled answers in tests."""
    task = folder / f"task{hidden}"
    return [f"dataset.path={task}/train.jsonl", f"dataset.eval_path={task}/valid.jsonl", f"actor.path={model}",
            f"dataset.train_bs_n_seqs={prompts}", "ppo.gen.max_new_tokens=32", "exp_ctrl.total_train_epochs=100",
            f"exp_ctrl.total_train_steps={steps}", f"exp_ctrl.eval_freq_steps={eval_every}", "evaluation.n=4",
            "evaluation.greedy=False"]  # fmt: skip


def metrics(root: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def curve(root: Path, metric: str = "eval/accuracy") -> Curve:
    """Return the sampled tokens so far and the held-out accuracy at each evaluation."""
    points, tokens = [], 0.0
    for line in metrics(root):
        tokens += line.get("tokens/generated", 0.0)
        if metric in line:
            points.append((tokens, line[metric]))
    return points


def tokens_to(points: Curve, accuracy: float) -> float:
    """Return the sampled tokens at the first evaluation that reaches an accuracy; inf if none does."""
    return next((tokens for tokens, found in points if found >= accuracy), math.inf)
