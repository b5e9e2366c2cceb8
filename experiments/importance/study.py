"""Importance corrections with generators that are wrong on purpose: accuracy after equal steps of GRPO on sums.

    python -m experiments.importance.study [FOLDER] [--jobs N]

Runs everything in FOLDER (default: importance-run; finished runs are kept), writes results.json and table.md here.
"""

import json
from functools import partial
from pathlib import Path

from experiments.studies import cell
from experiments.sums import curve, metrics, run, study_options, supervised_model, task_options

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, STEPS, PROMPTS = 64, 120, 100, 64
WRONG = {
    "exact": (),
    "bfloat16": ("wrong_bf16=True",),
    "temperature + 5 %": ("wrong_temperature=1.05",),
    "three steps old": ("max_staleness=3",),
}
METHODS = ("none", "tis", "mis", "icepop", "sequence_mis")
SEEDS = (1, 2, 3)
OPTIONS = ("ppo.group_size=4", "ppo.recompute_logprobs=True", "ppo.kl_in=none", "actor.optimizer.lr=3e-4",
           "actor.optimizer.lr_scheduler_type=constant")  # fmt: skip


def study(folder: Path, model: Path, wrong: str, method: str, seed: int) -> dict[str, float]:
    """Return the accuracy after the last step and means over the steps."""
    name = f"{'-'.join(wrong.split())}-{method}-{seed}".replace("%", "").replace("+", "more")
    task = task_options(folder, HIDDEN, model, PROMPTS, STEPS, STEPS)
    options = (*task, *OPTIONS, *WRONG[wrong], f"ppo.importance={method}", f"seed={seed}")
    root = run(folder, name, f"{HERE}/mismatch.py:WrongGRPO", *options)
    lines = [line for line in metrics(root) if "actor_train/logprob_diff" in line]
    means = {key: sum(line[f"actor_train/{key}"] for line in lines) / len(lines)
             for key in ("logprob_diff", "is_weight", "is_rejected")}  # fmt: skip
    print(f"{name} {curve(root)[-1][1]:.3f}", flush=True)
    return {"accuracy": curve(root)[-1][1], **means}


def table(results: dict[str, list[dict[str, float]]]) -> str:
    rows = ["| generator | difference (nats) | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 2) + "|"]
    for wrong in WRONG:
        runs = {method: results[f"{wrong}/{method}"] for method in METHODS}
        difference = sum(one["logprob_diff"] for one in runs["none"]) / len(SEEDS)
        cells = [cell([one["accuracy"] for one in some]) for some in runs.values()]
        rows.append(f"| {wrong} | {difference:.4f} | {' | '.join(cells)} |")
    rows += [
        "",
        "Rejected tokens:",
        "",
        "| generator | " + " | ".join(METHODS) + " |",
        "|---" * (len(METHODS) + 1) + "|",
    ]
    for wrong in WRONG:
        shares = [sum(one["is_rejected"] for one in results[f"{wrong}/{method}"]) / len(SEEDS) for method in METHODS]
        rows.append(f"| {wrong} | {' | '.join(f'{share:.4f}' for share in shares)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    options = study_options(__doc__, "importance-run")
    constant = "model.optimizer.lr_scheduler_type=constant"
    model = supervised_model(options.folder, "student", HIDDEN, SFT_STEPS, constant)
    found = options.map(partial(study, options.folder, model), WRONG, METHODS, SEEDS)
    results = {f"{wrong}/{method}": runs for (wrong, method), runs in found.items()}
    (HERE / "results.json").write_text(json.dumps(results, indent=1))
    (HERE / "table.md").write_text(table(results))


if __name__ == "__main__":
    main()
