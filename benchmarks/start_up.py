"""Times the start-up of the command line: ``realhf --help``, ``realhf quickstart ppo --help``, a bare interpreter.

python benchmarks/start_up.py [--runs 7]
"""

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "realhf --help": ["-m", "realhf", "--help"],
    "realhf quickstart ppo --help": ["-m", "realhf", "quickstart", "ppo", "--help"],
}


def seconds(words: list[str]) -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    bare = statistics.median(seconds(COMMANDS["python -c pass"]) for _ in range(runs))
    for name, words in COMMANDS.items():
        median = statistics.median(seconds(words) for _ in range(runs))
        print(f"{name:<30} {median:.3f} s, {median / bare:.1f} x a bare interpreter")


if __name__ == "__main__":
    main()
