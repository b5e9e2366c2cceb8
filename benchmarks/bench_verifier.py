"""Accuracy and speed of the maths verifier: python benchmarks/bench_verifier.py [--processes 2]

Accuracy on the labelled pairs of the tests, with the kinds that have errors; seconds for 1,000 responses to GSM8K (sums
if the data set is missing), half of them correct, including the start of the judges.
"""

import argparse
import json
import random
import time
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path

from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.verdict import Item, Status

ROOT = Path(__file__).parents[1]
PAIRS = ROOT / "tests/rewards/math/math_pairs.jsonl"
GSM8K = ROOT / "../shared/data/gsm8k_train.jsonl"
N_RESPONSES = 1000


def solutions() -> list[str]:
    """Return worked solutions that end in ``#### N``."""
    if GSM8K.is_file():
        with GSM8K.open() as lines:
            return [json.loads(line)["answer"] for line in islice(lines, N_RESPONSES)]
    numbers = random.Random(0)
    pairs = [(numbers.randrange(1000), numbers.randrange(1000)) for _ in range(N_RESPONSES)]
    return [f"We add {a} and {b}, that is {a}+{b} = <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}" for a, b in pairs]


def accuracy(processes: int) -> None:
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    began = time.perf_counter()
    with closing(JudgePool("math", timeout=20.0, processes=processes)) as pool:
        verdicts = pool.judge([("", pair["answer"], pair) for pair in pairs])
    seconds = time.perf_counter() - began
    kinds = Counter(pair["kind"] for pair in pairs)
    wrong = Counter(p["kind"] for p, v in zip(pairs, verdicts, strict=True) if v.score != p["right"])
    failed = sum(v.status is not Status.ok for v in verdicts)
    print(f"{len(pairs)} labelled pairs: {1 - wrong.total() / len(pairs):.2%} correct, "
          f"{failed} failed, {seconds:.2f} s")  # fmt: skip
    for kind, count in wrong.most_common():
        print(f"  {kind}: {count} of {kinds[kind]} wrong")


def speed(processes: int) -> None:
    golds = solutions()
    items: list[Item] = [("", s + "0" * (i % 2), {"solutions": [s]}) for i, s in enumerate(golds)]
    began = time.perf_counter()
    with closing(JudgePool("math", timeout=10.0, processes=processes)) as pool:
        pool.start()
        ready = time.perf_counter()
        verdicts = pool.judge(items)
    seconds = time.perf_counter() - began
    # an appended 0 makes a correct answer wrong unless the answer is 0
    expected = [float(i % 2 == 0 or s.endswith("#### 0")) for i, s in enumerate(golds)]
    right = sum(v.score == e for v, e in zip(verdicts, expected, strict=True))
    data_set = "GSM8K" if GSM8K.is_file() else "sums"
    print(f"{len(items)} responses to {data_set}: {seconds:.2f} s, {processes} processes, "
          f"{ready - began:.2f} s of it start-up; {right} scored correctly")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    accuracy(arguments.processes)
    speed(arguments.processes)
