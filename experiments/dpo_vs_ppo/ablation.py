"""Why PPO fails on sums: the same runs with the verifier in place of the reward model.

    python -m experiments.dpo_vs_ppo.ablation [FOLDER] [--jobs N]

Added after the results of study.py, whose folder it continues. Writes ablation.md.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.dpo_vs_ppo.study import HERE, HIDDEN, PPO, SFT_STEPS
from experiments.studies import cell, markdown
from experiments.sums import held_out_accuracy, run, start_model, study_options
from realhf.experiments.restem import newest_model

SEEDS = (1, 2, 3)
VERIFIED = "PPO with the verifier"


def verified(folder: Path, start: Path, seed: int) -> float:
    """Return the accuracy after PPO whose rewards are those of the verifier."""
    options = [option for option in PPO if not option.startswith("score.")]
    root = run(folder, f"verified-ppo-{seed}", "ppo-math", f"actor.path={start}", *options, f"seed={seed}",
               f"dataset.path={folder}/task{HIDDEN}/train.jsonl")  # fmt: skip
    return held_out_accuracy(folder, f"verified-PPO-{seed}-valid", HIDDEN, newest_model(root), f"seed={seed}")


def held_out_pairs(folder: Path, seed: int) -> float:
    """Return the reward model's accuracy on pairs that it was not trained on."""
    lines = (folder / "sums" / f"rewards-{seed}" / "evaluation.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["metrics"]["eval/accuracy"])


def table(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    return markdown(["", "accuracy"], [[name, cell(values)] for name, values in rows])


def main() -> None:
    options = study_options(__doc__, "dpo-vs-ppo-run", jobs=2)
    start = start_model(options.folder, HIDDEN, SFT_STEPS)
    found = options.map(partial(verified, options.folder, start), SEEDS)[()]
    pairs = [held_out_pairs(options.folder, seed) for seed in SEEDS]
    (HERE / "ablation.md").write_text(table([(VERIFIED, found), ("reward model, held-out pairs", pairs)]))
    print((HERE / "ablation.md").read_text())


if __name__ == "__main__":
    main()
