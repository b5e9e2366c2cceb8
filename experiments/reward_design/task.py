"""Sums whose solutions may state a line again: data for a policy, a process reward model, and training."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

from realhf.apps.demo.arithmetic import character_tokenizer, worked_sum, write_jsonl, wrong_sum
from realhf.apps.demo.make_tokenizer import save_model_config, save_tokenizer

RESTATED = 0.15
"""Probability that a line of the training data is stated once more, again and again."""
N_SFT, N_STEPS, N_TRAIN, N_VALID = 2000, 2000, 4000, 200


def restate(lines: Iterable[str], rng: random.Random) -> list[str]:
    found = []
    for line in lines:
        found.append(line)
        while rng.random() < RESTATED:
            found.append(line)
    return found


def restated_solution(answer: str, rng: random.Random) -> str:
    *steps, result = answer.split("\n")
    return "\n".join([*restate(steps, rng), result])


def labelled_steps(prompt: str, right: str, rng: random.Random) -> dict:
    """Return a right or wrong solution with a label per line; a line that states a step again has its label."""
    answer, labels = (right, None) if rng.random() < 0.5 else wrong_sum(prompt, rng)
    *steps, result = answer.split("\n")
    given = [1.0] * len(steps) if labels is None else labels
    parts, found = [], []
    for step, label in zip(steps, given, strict=True):
        repeated = restate([step], rng)
        parts += repeated
        found += [label] * len(repeated)
    return {"prompt": prompt, "steps": [*parts[:-1], f"{parts[-1]}\n{result}"], "labels": found}


def make_task(folder: Path, hidden: int) -> None:
    """Write sft.jsonl, steps.jsonl, train.jsonl, valid.jsonl, tokenizer/ and model/ for sums of two-digit numbers."""
    rng = random.Random(1)
    picks = rng.sample(range(90 * 90), N_SFT + N_TRAIN + N_VALID)
    sums = [worked_sum(10 + pick // 90, 10 + pick % 90) for pick in picks]
    folder.mkdir(parents=True, exist_ok=True)
    problems = [{"query_id": f"sum-{i}", "prompt": prompt, "solutions": [answer.splitlines()[-1]]}
                for i, (prompt, answer) in enumerate(sums)]  # fmt: skip
    some = ({"prompt": prompt, "answer": restated_solution(answer, rng)} for prompt, answer in sums[:N_SFT])
    write_jsonl(folder / "sft.jsonl", some)
    write_jsonl(folder / "steps.jsonl", (labelled_steps(*sums[N_SFT + i], rng) for i in range(N_STEPS)))
    write_jsonl(folder / "train.jsonl", problems[N_SFT : N_SFT + N_TRAIN])
    write_jsonl(folder / "valid.jsonl", problems[N_SFT + N_TRAIN :])
    tokenizer = character_tokenizer()
    save_tokenizer(tokenizer, folder / "tokenizer")
    save_model_config(tokenizer, folder / "model", hidden, 3, positions=256)
    (folder / "done").write_text(json.dumps({"sums": len(sums)}))
