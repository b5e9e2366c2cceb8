"""Data of the stack language: demonstrations with mistakes, and rows with tests."""

import random
from collections.abc import Iterator
from pathlib import Path

from experiments.ppo_code.language import OPERATIONS, TASKS
from realhf.apps.demo.arithmetic import character_tokenizer, write_jsonl
from realhf.apps.demo.make_tokenizer import save_model_config, save_tokenizer

REPLACED, INSERTED = 0.5, 0.5
"""Probability of another operation, for each operation of a demonstration, and of one more."""
N_SFT, N_TRAIN, N_VALID, N_TESTS = 4000, 4000, 200, 5


def demonstrations(rng: random.Random) -> Iterator[dict]:
    for _ in range(N_SFT):
        name = rng.choice(list(TASKS))
        program = [rng.choice(OPERATIONS) if rng.random() < REPLACED else one for one in TASKS[name][2]]
        if rng.random() < INSERTED:
            program.insert(rng.randrange(len(program) + 1), rng.choice(OPERATIONS))
        yield {"prompt": f"{name}\n", "answer": "".join(program)}


def problems(n: int, prefix: str, rng: random.Random) -> Iterator[dict]:
    """Yield ``n`` rows, as many of each task, with tests of their own."""
    names = list(TASKS)
    for number in range(n):
        name = names[number % len(names)]
        n_arguments, result, _ = TASKS[name]
        drawn = [[rng.randrange(-9, 10) for _ in range(n_arguments)] for _ in range(N_TESTS)]
        tests = [[arguments, result(*arguments)] for arguments in drawn]
        yield {"query_id": f"{prefix}-{number}", "prompt": f"{name}\n", "tests": tests}


def make_task(folder: Path, hidden: int) -> None:
    """Write sft.jsonl, train.jsonl, valid.jsonl, tokenizer/ and model/."""
    rng = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "sft.jsonl", demonstrations(rng))
    write_jsonl(folder / "train.jsonl", problems(N_TRAIN, "train", rng))
    write_jsonl(folder / "valid.jsonl", problems(N_VALID, "valid", rng))
    characters = "".join(dict.fromkeys("\n" + "".join(TASKS) + OPERATIONS))
    tokenizer = character_tokenizer(characters)
    save_tokenizer(tokenizer, folder / "tokenizer")
    save_model_config(tokenizer, folder / "model", hidden, 3, positions=64)
    (folder / "done").touch()
