"""Builds preference pairs of right and wrong responses from the generations of a run.

    realhf quickstart ppo-math ... n_logged_generations=-1
    python examples/build_pairs.py runs/ppo-math/trial/generations pairs.jsonl --max-pairs 8
    realhf quickstart dpo dataset.path=pairs.jsonl ...

A response is right if its reward exceeds --threshold. Prompts whose responses are all right or all wrong are skipped,
and empty responses.
"""

import argparse
import json
from pathlib import Path

from realhf.algorithms.preference.pairs import build_pairs
from realhf.base.seeds import stable_seed


def read_generations(folder: Path) -> dict[str, list[dict]]:
    """Return the rows of all files in ``folder`` by prompt; a prompt can occur in several steps."""
    prompts: dict[str, list[dict]] = {}
    for file in sorted(folder.glob("*.jsonl"), key=lambda f: int(f.stem.removeprefix("step_"))):
        with file.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                row["prompt"] = (row.get("fields") or row)["prompt"]  # as in the data file: text, or messages
                if "rewards" in row and row["response"]:  # not if scoring has failed; data sets have no empty answers
                    prompts.setdefault(json.dumps(row["prompt"]), []).append(row)
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", type=Path, help="folder generations/ of a run")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--max-pairs", type=int, default=8, help="maximum number of pairs per prompt")
    parser.add_argument("--threshold", type=float, default=0.0, help="responses with a higher reward are right")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    prompts = read_generations(args.generations)
    n_pairs = n_written = 0
    with args.out.open("w", encoding="utf-8") as out:
        for prompt, rows in prompts.items():
            right = [row["rewards"] > args.threshold for row in rows]
            pairs = build_pairs(right, args.max_pairs, stable_seed("pairs", args.seed, prompt))
            if pairs:
                good, bad = ([rows[pair[side]]["response"] for pair in pairs] for side in (0, 1))
                row = {"prompt": rows[0]["prompt"], "pos_answers": good, "neg_answers": bad}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                n_pairs, n_written = n_pairs + len(pairs), n_written + 1
    print(f"{args.out}: {n_pairs} pairs for {n_written} of {len(prompts)} prompts")


if __name__ == "__main__":
    main()
