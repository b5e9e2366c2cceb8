"""GRPO on sums with LoRA adapters and with full fine-tuning: accuracy after equal steps, five seeds.

    python -m experiments.lora.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: lora-run; finished runs are kept) and writes results.json and table.md here.
"""

import json
from functools import partial
from pathlib import Path

from experiments.studies import cell
from experiments.sums import curve, run, start_model, study_options, task_options

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, STEPS, PROMPTS, EVAL_EVERY = 128, 100, 120, 32, 24
SEEDS = (1, 2, 3, 4, 5)
METHODS = {
    "full fine-tuning": ("actor.optimizer.lr=5e-4",),
    "LoRA, rank 16": ("actor.lora.rank=16", "actor.optimizer.lr=3e-3"),
}
OPTIONS = ("ppo.group_size=8", "actor.optimizer.lr_scheduler_type=linear")


def study(folder: Path, model: Path, method: str, seed: int) -> list[float]:
    """Return the accuracy at each evaluation."""
    name = f"{'-'.join(method.replace(',', '').split())}-{seed}"
    task = task_options(folder, HIDDEN, model, PROMPTS, STEPS, EVAL_EVERY)
    found = [
        accuracy for _, accuracy in curve(run(folder, name, "grpo", *task, *OPTIONS, *METHODS[method], f"seed={seed}"))
    ]
    print(name, *(f"{accuracy:.3f}" for accuracy in found), flush=True)
    return found


def table(results: dict[str, list[list[float]]]) -> str:
    steps = range(0, STEPS + 1, EVAL_EVERY)
    rows = ["| method | " + " | ".join(f"step {step}" for step in steps) + " |", "|---" * (len(steps) + 1) + "|"]
    for method, runs in results.items():
        rows.append(f"| {method} | {' | '.join(cell(found) for found in zip(*runs, strict=True))} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    options = study_options(__doc__, "lora-run")
    model = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(study, options.folder, model), METHODS, SEEDS)
    results = {method: runs for (method,), runs in found.items()}
    (HERE / "results.json").write_text(json.dumps(results, indent=1))
    (HERE / "table.md").write_text(table(results))


if __name__ == "__main__":
    main()
