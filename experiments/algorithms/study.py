"""Held-out accuracy and time of every algorithm, from the same initial model on the arithmetic task.

    python experiments/algorithms/study.py [--only NAME,...] [--workers N] [--jobs N]

Writes results.json and table.md to this folder; docs/algorithms.md shows them. All runs use the command line, with two
workers of one thread, one run at a time. Algorithms have their default options; the options of the optimizer and of the
task are the same for all.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
REALHF = [sys.executable, "-m", "realhf"]
EXAMPLE = HERE.parents[1] / "examples" / "arithmetic.py"
SFT_STEPS = 90
LEARN = ("actor.optimizer.lr=3e-4", "actor.optimizer.lr_scheduler_type=constant", "ppo.gen.max_new_tokens=32",
         "dataset.train_bs_n_seqs=64", "exp_ctrl.total_train_epochs=20")  # fmt: skip
STEPS = {"ppo-math": 200, "grpo": 80, "rloo": 100, "reinforce-pp": 100, "remax": 400, "vineppo": 30}
OWN = {"ppo-math": ("critic.optimizer.lr=1e-3", "critic.optimizer.lr_scheduler_type=constant")}
RESTEM = ("model.optimizer.lr=1e-3", "sampling.max_new_tokens=32", "validation.max_new_tokens=32", "n_rounds=1",
          "dataset.train_bs_n_seqs=200")  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Accuracy on held-out sums, with responses sampled at temperature 1."""

    algorithm: str
    steps: int
    before: float
    after: float
    seconds: float
    command: str


def call(*arguments: str) -> None:
    done = subprocess.run([*REALHF, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"realhf {' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def accuracy(folder: Path, name: str, model: Path) -> float:
    """Return the accuracy over four responses to each held-out sum."""
    call("quickstart", "gen", *directory(folder, f"{name}-valid"), f"model.path={model}", "judge=True",
         f"dataset.path={folder}/task/valid.jsonl", "dataset.train_bs_n_seqs=100", "sampling.n=4",
         "sampling.max_new_tokens=32")  # fmt: skip
    lines = (folder / "study" / f"{name}-valid" / "metrics.jsonl").read_text().splitlines()
    accuracies = [json.loads(line)["rew_inf/accuracy"] for line in lines]
    return sum(accuracies) / len(accuracies)


def directory(folder: Path, name: str) -> tuple[str, ...]:
    return (f"fileroot={folder}", "experiment_name=study", f"trial_name={name}", "overwrite=True", "device=cpu",
            "threads_per_worker=1", "tensorboard.enabled=False")  # fmt: skip


def initial_model(folder: Path) -> Path:
    """Create the task, train a weak model on its worked examples, and return the model."""
    subprocess.run([sys.executable, str(EXAMPLE), str(folder / "task"), "--hidden", "96", "--layers", "3"], check=True,
                   capture_output=True)  # fmt: skip
    task = folder / "task"
    call("quickstart", "sft", *directory(folder, "sft"), f"dataset.path={task}/sft.jsonl", "dataset.train_bs_n_seqs=64",
         "model.init_from_scratch=True", f"model.config={task}/model", f"model.tokenizer={task}/tokenizer",
         "model.optimizer.lr=3e-3", "model.optimizer.lr_scheduler_type=constant",
         f"exp_ctrl.total_train_steps={SFT_STEPS}", "exp_ctrl.total_train_epochs=10")  # fmt: skip
    thousand = (task / "train.jsonl").read_text().splitlines(keepends=True)[:1000]
    (task / "train1000.jsonl").write_text("".join(thousand))
    return folder / "study" / "sft" / "models" / "model" / f"step_{SFT_STEPS}"


def study(folder: Path, name: str, start: Path, before: float, workers: int) -> Result:
    layout = (f"n_gpus_per_node={workers}", f"allocation_mode=d{workers}")
    start_time = time.monotonic()
    if name == "restem":
        options = (f"dataset.path={folder}/task/train1000.jsonl", f"valid_path={folder}/task/valid.jsonl",
                 f"model.path={start}", *RESTEM)  # fmt: skip
    else:
        options = (f"dataset.path={folder}/task/train.jsonl", f"actor.path={start}", *LEARN, *OWN.get(name, ()),
                 f"exp_ctrl.total_train_steps={STEPS[name]}")  # fmt: skip
    call("quickstart", name, *directory(folder, name), *layout, *options)
    seconds, root = time.monotonic() - start_time, folder / "study" / name
    if name == "restem":
        model, steps = Path(json.loads((root / "restem.json").read_text())["model"]), 1
    else:
        model, steps = root / "models" / "actor" / f"step_{STEPS[name]}", STEPS[name]
    command = " ".join(["realhf quickstart", name, *layout, *options]).replace(str(folder), "DIR")
    return Result(name, steps, before, accuracy(folder, name, model), seconds, command)


def table(results: list[Result]) -> str:
    lines = ["| algorithm | steps | seconds | accuracy before | after | gain |", "|---|---|---|---|---|---|"]
    lines += [f"| {r.algorithm} | {r.steps} | {r.seconds:.0f} | {r.before:.2f} | {r.after:.2f} "
              f"| {r.after - r.before:+.2f} |"
              for r in results]  # fmt: skip
    commands = [f"{r.command}" for r in results]
    return "\n".join([*lines, "", "```", *commands, "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join([*STEPS, "restem"]))
    parser.add_argument("--workers", type=int, default=2, help="workers per run, one core each")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = initial_model(folder)
        before = accuracy(folder, "sft", start)
        with ThreadPoolExecutor(args.jobs) as pool:
            pending = pool.map(lambda name: study(folder, name, start, before, args.workers), args.only.split(","))
            results = []
            for result in pending:
                print(f"{result.algorithm:<14} {result.before:.3f} -> {result.after:.3f} in {result.seconds:.0f} s")
                results.append(result)
    (HERE / "results.json").write_text(json.dumps([asdict(r) for r in results], indent=1))
    (HERE / "table.md").write_text(table(results))


if __name__ == "__main__":
    main()
