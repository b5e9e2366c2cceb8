"""Times start-ups of the command line: help, an invalid option, a plan, and a run up to its first training step.

python benchmarks/start_up.py [--runs 7] [--python OTHER]     (--python: the interpreter of another checkout, in turns)
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = ["--hidden", "96", "--layers", "3"]  # the demo's


def seconds(python: str, words: list[str], code: int = 0) -> float:
    start = time.monotonic()
    done = subprocess.run([python, *words], capture_output=True)
    assert done.returncode == code, done.stderr.decode()
    return time.monotonic() - start


def to_first_step(python: str, words: list[str], folder: Path) -> float:
    """Return the time from the command to the first line of metrics.jsonl."""
    start = time.monotonic()
    with subprocess.Popen([python, *words], stdout=subprocess.DEVNULL) as process:
        while not any(file.read_bytes() for file in folder.glob("*/*/metrics.jsonl")):
            assert process.poll() is None
            time.sleep(0.01)
        found = time.monotonic() - start
    assert process.returncode == 0
    return found


def commands(task: Path) -> dict[str, tuple[list[str], int]]:
    model = [f"actor.config={task}/model", f"actor.tokenizer={task}/tokenizer", f"critic.config={task}/model"]
    options = ["actor.init_from_scratch=True", "critic.init_from_scratch=True", f"dataset.path={task}/train.jsonl",
               "dataset.train_bs_n_seqs=64", "ppo.group_size=4", "ppo.gen.max_new_tokens=32", "device=cpu",
               "n_gpus_per_node=2", "exp_ctrl.total_train_steps=1"]  # fmt: skip
    return {
        "python -c pass": (["-c", "pass"], 0),
        "realhf --help": (["-m", "realhf", "--help"], 0),
        "realhf quickstart ppo --help": (["-m", "realhf", "quickstart", "ppo", "--help"], 0),
        "an invalid option": (["-m", "realhf", "quickstart", "ppo-math", "learning_rate=1"], 2),
        "realhf plan ppo-math": (["-m", "realhf", "plan", "ppo-math", *model, *options], 0),
        "to the first step of ppo-math": (["-m", "realhf", "quickstart", "ppo-math", *model, *options], 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--python", default="")
    arguments = parser.parse_args()
    pythons = [sys.executable, *filter(None, [arguments.python])]
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "task")
        subprocess.run(
            [sys.executable, "-m", "realhf.apps.demo.arithmetic", task, *MODEL], check=True, capture_output=True
        )
        for name, (words, code) in commands(task).items():
            times: dict[str, list[float]] = {python: [] for python in pythons}
            for number in range(arguments.runs):
                for python in pythons:
                    root = Path(folder, f"{number}-{pythons.index(python)}")
                    run = "first step" in name
                    took = (
                        to_first_step(python, [*words, f"fileroot={root}"], root)
                        if run
                        else seconds(python, words, code)
                    )
                    times[python].append(took)
            medians = [statistics.median(found) for found in times.values()]
            print(
                f"{name:<30} {medians[0]:.3f} s" + "".join(f", other {other:.3f} s" for other in medians[1:]),
                flush=True,
            )


if __name__ == "__main__":
    main()
