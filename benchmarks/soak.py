"""Whether a long run stays as small as it began: memory, open files, threads and number of its processes, by step.

    python benchmarks/soak.py [--steps 2000] [--dir DIR] [words of quickstart ...]

Runs PPO of a tiny model on two workers with judges through the command line and looks at every process of it twice a
second. The first fifth of the steps is warm-up. Compared are tenths of the steps: medians of memory, and the fewest
files and threads, since what is open for a moment is no leak. Exits with 1 where the memory of a process grows by more
than 2 %, where it holds more files or threads than after the warm-up, or where there are more processes.
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
LOOK_S = 0.5
GROWTH = 0.02
PARTS = {"warm": (0.2, 0.3), "half": (0.5, 0.6), "end": (0.9, 1.0)}
REWARD = '''
def graded(prompt: str, answer: str, row: dict) -> float:
    """Small numbers are good, and so are short answers."""
    return (answer.count("1") + 2 * answer.count("2") - len(answer) / 4) / 8
'''


@dataclass(frozen=True)
class Look:
    """What one process held at one moment."""

    step: int
    memory: int
    files: int
    threads: int


def family(root: int) -> Iterator[int]:
    """Yield a process and everything it started."""
    yield root
    for task in Path(f"/proc/{root}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):  # it may end while we look
                yield from family(int(child))


def words_of(pid: int) -> str:
    """Name a process by what tells it from the others: its module, and the rank of a worker."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    if "realhf.apps.worker" in words:
        return f"worker {words[words.index('realhf.apps.worker') + 2]}"
    return next((word.removeprefix("realhf.") for word in words if word.startswith("realhf")), "other")


def look(pid: int, step: int) -> Look:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    own = sum(int(status[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))
    return Look(step, own, sum(1 for _ in (process / "fd").iterdir()), int(status["Threads"]))


def follow(process: subprocess.Popen, metrics: Path) -> tuple[dict[tuple[int, str], list[Look]], list[tuple[int, int]]]:
    """Look at a run until it ends; return what every process held, and (step, number of processes)."""
    looks: dict[tuple[int, str], list[Look]] = {}
    counts: list[tuple[int, int]] = []
    while process.poll() is None:
        time.sleep(LOOK_S)
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        with contextlib.suppress(OSError, KeyError):  # a process that has just ended has no memory
            pids = list(family(process.pid))
            counts.append((step, len(pids)))
            for pid in pids:
                looks.setdefault((pid, words_of(pid)), []).append(look(pid, step))
    return looks, counts


def during(steps: int, part: str, looks: list[Look]) -> list[Look]:
    first, last = (share * steps for share in PARTS[part])
    return [seen for seen in looks if first <= seen.step < last]


def table(steps: int, looks: dict[tuple[int, str], list[Look]]) -> list[str]:
    """Print a line for every process that lived through the run; return what is wrong."""
    problems = []
    print(f"{'process':<16} {'MB warm':>8} {'half':>8} {'end':>8} {'growth':>7}  {'files':>9} {'threads':>9}")
    for (pid, name), seen in sorted(looks.items(), key=lambda item: item[0][1]):
        parts = {part: during(steps, part, seen) for part in PARTS}
        if not (parts["warm"] and parts["half"] and parts["end"]):
            continue
        memory = {part: statistics.median(s.memory for s in some) for part, some in parts.items()}
        files = [min(s.files for s in parts[part]) for part in ("warm", "end")]
        threads = [min(s.threads for s in parts[part]) for part in ("warm", "end")]
        growth = memory["end"] / memory["warm"] - 1
        sizes = " ".join(f"{size / 1e6:8.1f}" for size in memory.values())
        held = " ".join(f"{f'{a} > {b}':>9}" for a, b in (files, threads))
        print(f"{name:<16} {sizes} {growth:7.1%}  {held}")
        problems += [f"memory of {name} ({pid}) grows by {growth:.1%}"] if growth > GROWTH else []
        problems += [f"{name} ({pid}) opens files: {files[0]}, {files[1]}"] if files[1] > files[0] else []
        problems += [f"{name} ({pid}) starts threads: {threads[0]}, {threads[1]}"] if threads[1] > threads[0] else []
    return problems


def soak(folder: Path, steps: int, words: list[str]) -> int:
    made = [sys.executable, ROOT / "examples/arithmetic.py", folder, "--digits", "2", "--hidden", "32", "--layers", "2"]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
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
            looks, counts = follow(process, folder / "ppo-math" / "soak" / "metrics.jsonl")
        finally:
            process.terminate()
            code = process.wait()
    if code:
        print((folder / "soak.log").read_text()[-2000:])
        return code
    problems = table(steps, looks)
    warm, end = (max(n for step, n in counts if PARTS[p][0] * steps <= step < PARTS[p][1] * steps)
                 for p in ("warm", "end"))  # fmt: skip
    print(f"processes: {warm} after the warm-up, {end} at the end")
    problems += [f"there are more processes: {warm}, {end}"] if end > warm else []
    print(*(f"LEAK {problem}" for problem in problems), sep="\n", end="\n" if problems else "")
    return bool(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.steps < 200:
        parser.error(f"--steps {options.steps}: a tenth of them must be long enough to look at, so 200 at least")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(soak(folder.resolve(), options.steps, options.words))


if __name__ == "__main__":
    main()
