"""Times untrusted programs: python benchmarks/bench_sandbox.py [--humaneval FILE.jsonl.gz]

Programs per second in one sandbox, and seconds to score HumanEval's own solutions with two judges. On a shared machine,
take the best of several runs.
"""

import argparse
import gzip
import json
import time
from contextlib import closing
from pathlib import Path

from realhf.rewards.judge.pool import JudgePool
from realhf.rewards.sandbox.sandbox import Sandbox

HUMAN_EVAL = Path(__file__).parents[1] / "../shared/data/HumanEval.jsonl.gz"
PROGRAM = "print(sum(map(int, input().split())))"


def programs_per_second(sandbox: Sandbox, seconds: float) -> float:
    """Return the rate of small programs that run one after another."""
    sandbox.run(PROGRAM, "1 2")
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        if sandbox.run(PROGRAM, "1 2").stdout != "3\n":
            raise SystemExit("the sandbox does not work on this machine")
        count += 1
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--humaneval", type=Path, default=HUMAN_EVAL)
    parser.add_argument("--seconds", type=float, default=3.0, help="of running small programs")
    options = parser.parse_args()
    for namespaces in (True, False):
        begin = time.perf_counter()
        with closing(Sandbox(namespaces=namespaces)) as sandbox:
            sandbox.open()
            start = time.perf_counter() - begin
            rate = programs_per_second(sandbox, options.seconds)
            print(f"{rate:7.1f} programs/s   start-up {start:.3f} s   {sandbox.description}")
    if not options.humaneval.is_file():
        print(f"skipping HumanEval: no file {options.humaneval}")
        return
    with gzip.open(options.humaneval, "rt") as lines:
        rows = [json.loads(line) | {"stub": json.loads(line)["prompt"]} for line in lines]
    begin = time.perf_counter()
    with closing(JudgePool("code", timeout=30.0, processes=2)) as pool:
        verdicts = pool.judge([(row["prompt"], row["canonical_solution"], row) for row in rows])
    right = sum(verdict.score for verdict in verdicts)
    print(f"HumanEval: {right:.0f} of {len(rows)} correct in {time.perf_counter() - begin:.2f} s, including start-up")


if __name__ == "__main__":
    main()
