"""Checks a long run for leaks of memory, open files, threads and processes.

    python benchmarks/soak.py [--steps 2000] [--dir DIR] [words of quickstart ...]

Runs PPO of a tiny model on two workers with judges through the command line and samples each of its processes twice a
second. The first fifth of the steps is warm-up. Compares tenths of the steps: the median of memory, and the minimum of
files and threads, which excludes short-lived ones. Exits with 1 if the memory of a process grows by more than 2 %, or
if the number of files, threads or processes grows after the warm-up.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INTERVAL_S = 0.5
GROWTH = 0.02
PARTS = {"warm": (0.2, 0.3), "half": (0.5, 0.6), "end": (0.9, 1.0)}
REWARD = '''
def graded(prompt: str, answer: str, row: dict) -> float:
    """Reward small numbers and short responses."""
    return (answer.count("1") + 2 * answer.count("2") - len(answer) / 4) / 8
'''


@dataclass(frozen=True)
class Sample:
    """Resources of a process at one time; memory in bytes."""

    step: int
    memory: int
    files: int
    threads: int


Samples = dict[tuple[int, str], list[Sample]]
"""By (process, name)."""


def process_tree(root: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield root
    for task in Path(f"/proc/{root}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):  # it may have ended
                yield from process_tree(int(child))


def name_of(pid: int) -> str:
    """Return the module of a process, with the rank of a worker."""
    words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    if "realhf.apps.worker" in words:
        return f"worker {words[words.index('realhf.apps.worker') + 2]}"
    return next((word.removeprefix("realhf.") for word in words if word.startswith("realhf")), "other")


def sample(pid: int, step: int) -> Sample:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    own = sum(int(status[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))
    return Sample(step, own, sum(1 for _ in (process / "fd").iterdir()), int(status["Threads"]))


def monitor(process: subprocess.Popen, metrics: Path) -> tuple[Samples, list[tuple[int, int]]]:
    """Sample a run until it ends; return the samples and (step, number of processes)."""
    samples: Samples = {}
    counts: list[tuple[int, int]] = []
    while process.poll() is None:
        time.sleep(INTERVAL_S)
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        with contextlib.suppress(OSError, KeyError):  # a process may have ended
            pids = list(process_tree(process.pid))
            counts.append((step, len(pids)))
            for pid in pids:
                samples.setdefault((pid, name_of(pid)), []).append(sample(pid, step))
    return samples, counts


def during(steps: int, part: str, samples: list[Sample]) -> list[Sample]:
    first, last = (share * steps for share in PARTS[part])
    return [s for s in samples if first <= s.step < last]


def table(steps: int, samples: Samples) -> list[str]:
    """Print a line for every process that ran from warm-up to end; return the leaks."""
    problems = []
    print(f"{'process':<16} {'MB warm':>8} {'half':>8} {'end':>8} {'growth':>7}  {'files':>9} {'threads':>9}")
    for (pid, name), own in sorted(samples.items(), key=lambda item: item[0][1]):
        parts = {part: during(steps, part, own) for part in PARTS}
        if not (parts["warm"] and parts["half"] and parts["end"]):
            continue
        memory = {part: statistics.median(s.memory for s in some) for part, some in parts.items()}
        files = [min(s.files for s in parts[part]) for part in ("warm", "end")]
        threads = [min(s.threads for s in parts[part]) for part in ("warm", "end")]
        growth = memory["end"] / memory["warm"] - 1
        sizes = " ".join(f"{size / 1e6:8.1f}" for size in memory.values())
        counts = " ".join(f"{f'{a} > {b}':>9}" for a, b in (files, threads))
        print(f"{name:<16} {sizes} {growth:7.1%}  {counts}")
        problems += [f"memory of {name} ({pid}) grows by {growth:.1%}"] if growth > GROWTH else []
        problems += [f"open files of {name} ({pid}) grow: {files[0]}, {files[1]}"] if files[1] > files[0] else []
        problems += [f"threads of {name} ({pid}) grow: {threads[0]}, {threads[1]}"] if threads[1] > threads[0] else []
    return problems


def soak(folder: Path, steps: int, words: list[str]) -> int:
    example = [
        sys.executable,
        ROOT / "examples/arithmetic.py",
        folder,
        "--digits",
        "2",
        "--hidden",
        "32",
        "--layers",
        "2",
    ]
    subprocess.run(example, check=True, stdout=subprocess.DEVNULL)
    (folder / "rewards.py").write_text(REWARD)
    run = [f"fileroot={folder}", "trial_name=soak", "overwrite=True", "device=cpu", "threads_per_worker=1",
           "n_gpus_per_node=2", "actor.init_from_scratch=True", f"actor.config={folder}/model",
           f"actor.tokenizer={folder}/tokenizer", f"dataset.path={folder}/train.jsonl", "dataset.train_bs_n_seqs=4",
           f"reward.fn={folder}/rewards.py:graded", "ppo.gen.max_new_tokens=6", "ppo.group_size=2",
           f"exp_ctrl.total_train_epochs={steps}", f"exp_ctrl.total_train_steps={steps}",
           f"exp_ctrl.ckpt_freq_steps={steps // 20}", "n_logged_generations=1"]  # fmt: skip
    with (folder / "soak.log").open("w") as log:
        command = [sys.executable, "-m", "realhf", "quickstart", "ppo-math", *run, *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            samples, counts = monitor(process, folder / "ppo-math" / "soak" / "metrics.jsonl")
        finally:
            process.terminate()
            code = process.wait()
    if code:
        print((folder / "soak.log").read_text()[-2000:])
        return code
    problems = table(steps, samples)
    warm, end = (max(n for step, n in counts if PARTS[p][0] * steps <= step < PARTS[p][1] * steps)
                 for p in ("warm", "end"))  # fmt: skip
    print(f"processes: {warm} after the warm-up, {end} at the end")
    problems += [f"the number of processes grows: {warm}, {end}"] if end > warm else []
    print(*(f"LEAK {problem}" for problem in problems), sep="\n", end="\n" if problems else "")
    return bool(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.steps < 200:
        parser.error(f"--steps {options.steps}: must be at least 200")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(soak(folder.resolve(), options.steps, options.words))


if __name__ == "__main__":
    main()
