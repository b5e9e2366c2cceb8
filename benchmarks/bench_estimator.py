"""Predictions against measured runs: step time and peak memory of many plans, through the real command line.

    python benchmarks/bench_estimator.py [--runs N] [--keep FOLDER] [--again MINUTES]

makes three tiny models, profiles this machine once for them, then runs PPO (with and without a critic) under plans of
one to four workers. Answers have a fixed length, so that the work is known beforehand; a run's step is the median of
its steps after the first. Prints one line per plan and the summary that TARGETS asks for.

Wants a quiet machine, and tells how quiet it was: all the while a loop of Python is timed on either core, twice a
second, in processor time, which others that share the cores of the host make longer. A run is disturbed when the loop
took more than ``DISTURBED`` more or less than during the profile, whatever came out of it. ``--again`` runs disturbed
plans again as long as there is time, and the last run of each counts; there is a summary of the undisturbed ones, too.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

REALHF = [sys.executable, "-c", "from realhf.apps.main import console; console()"]
SIZES = {"small": (128, 2), "middle": (192, 4), "large": (256, 6)}
"""Hidden width and layers of the models."""
STEPS = {"small": 30, "middle": 12, "large": 7}
"""Steps of a run: ten seconds or more, so that a spell of a slower machine is not all of it."""


@dataclass(frozen=True)
class Case:
    """A plan: size of the model, workers, allocation, and what differs from the common options."""

    size: str
    workers: int
    allocation: str
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.size:<7}{self.workers} {self.allocation:<62} {' '.join(w.partition('.')[2] for w in self.words)}"


LONG = ("ppo.gen.max_new_tokens=96", "ppo.gen.min_new_tokens=96", "dataset.train_bs_n_seqs=16")
GROUPS = ("ppo.disable_value=True", "ppo.group_size=4", "ppo.group_adv_norm=True", "dataset.train_bs_n_seqs=16")
TIGHT = ("actor_train.mb_spec.max_tokens_per_mb=512", "critic_train.mb_spec.max_tokens_per_mb=512")
CASES = [
    *(Case(size, 1, "d1") for size in SIZES),
    *(Case(size, 1, "d1", LONG) for size in SIZES),
    *(Case(size, 1, "d1", GROUPS) for size in SIZES),
    *(Case(size, 2, "d2") for size in SIZES),
    *(Case(size, 2, "t2") for size in SIZES),
    *(Case(size, 2, "p2") for size in SIZES),
    *(Case(size, 2, "d2", (*GROUPS, *LONG[:2])) for size in SIZES),
    *(Case(size, 2, "actor_gen:d2,*:d1") for size in SIZES),
    Case("middle", 2, "d2", TIGHT),
    Case("large", 2, "actor_gen:d2,ref_inf:t2,critic_inf:p2,*:d2", LONG),
    Case("large", 2, "actor_train:t2,critic_train:p2,*:d2"),
    Case("small", 3, "d3"),
    Case("large", 3, "d3", GROUPS),
    Case("middle", 4, "d4"),
    Case("large", 4, "d2t2"),
    Case("large", 4, "d2p2"),
    Case("middle", 4, "actor_gen:d4,ref_inf:t2,critic_inf:p2,critic_train:t2,*:d1t2p2"),
]


DISTURBED = 0.15


class Pace(threading.Thread):
    """Times the same little work all the while, in a thread of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.taken: list[tuple[float, float]] = []

    def run(self) -> None:
        for core in itertools.cycle(sorted(os.sched_getaffinity(0))):
            os.sched_setaffinity(0, {core})  # of this thread
            start, total = time.thread_time(), 0
            for number in range(60_000):
                total += number * number
            self.taken.append((time.monotonic(), time.thread_time() - start))
            time.sleep(0.5)

    def since(self, start: float) -> float:
        """Return the milliseconds that the work took on average."""
        return 1e3 * mean(took for at, took in self.taken if at >= start)


@dataclass(frozen=True)
class Found:
    """``pace`` is what the loop took during the run over what it took during the profile."""

    predicted_s: float
    measured_s: float
    predicted_gb: float
    measured_gb: float
    pace: float

    @property
    def is_disturbed(self) -> bool:
        return abs(self.pace - 1) > DISTURBED

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_gb / self.measured_gb - 1


def call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


REWARD = """
def share_of_digits(prompt: str, answer: str, row: dict) -> float:
    return sum(c.isdigit() for c in answer) / max(1, len(answer))
"""


def prepare(folder: Path) -> None:
    """Make tasks and models of every size, a reward function, and the profile."""
    (folder / "reward.py").write_text(REWARD)
    example = Path(__file__).parent.parent / "examples" / "arithmetic.py"
    for size, (hidden, layers) in SIZES.items():
        call(sys.executable, str(example), str(folder / size), "--hidden", str(hidden), "--layers", str(layers))
    models = ",".join(str(folder / size / "model") for size in SIZES)
    call(*REALHF, "profile", f"model={models}", "n_gpus_per_node=4", "device=cpu", f"out={folder / 'profile.json'}")


def run(case: Case, folder: Path, number: int, pace: Pace, usual: float) -> Found:
    task, root, began = folder / case.size, folder / "runs" / str(number), time.monotonic()
    call(*REALHF, "quickstart", "ppo-math", f"fileroot={root}", "experiment_name=e", "trial_name=t", "overwrite=True",
         "device=cpu",
         f"actor.config={task / 'model'}", "actor.init_from_scratch=True", f"actor.tokenizer={task / 'tokenizer'}",
         f"dataset.path={task / 'train.jsonl'}", "dataset.train_bs_n_seqs=32", "ppo.gen.max_new_tokens=32",
         "ppo.gen.min_new_tokens=32", "ppo.ppo_n_minibatches=2", f"n_gpus_per_node={case.workers}",
         "threads_per_worker=1", f"allocation_mode={case.allocation}", f"planner.profile={folder / 'profile.json'}",
         f"exp_ctrl.total_train_steps={STEPS[case.size]}", "save_roles=[]", "n_logged_generations=0",
         "tensorboard.enabled=False",
         f"reward.fn={folder / 'reward.py'}:share_of_digits", *case.words)  # fmt: skip
    lines = [json.loads(line) for line in (root / "e" / "t" / "metrics.jsonl").read_text().splitlines()]
    expected = json.loads((root / "e" / "t" / "plan.json").read_text())["expected"]
    assert "profile" in expected["source"], expected["source"]
    steps = median(line["time/step_s"] for line in lines[1:])
    peak = max(line["memory/worker_peak_gb"] for line in lines)
    parts = {k: median(line[k] for line in lines[1:]) for k in lines[-1] if k.startswith("time/")}
    for name, seconds in expected["calls"].items():
        print(f"        {name:<14} predicted {seconds:7.3f}  measured {parts.get(f'time/{name}_s', 0.0):7.3f}")
    found = Found(expected["step_s"], steps, expected["peak_bytes"] / 1e9, peak, pace.since(began) / usual)
    print(
        f"{case}\n    step predicted {found.predicted_s:.3f} s, measured {found.measured_s:.3f} s "
        f"({100 * found.error:+.0f}%); peak {found.predicted_gb:.3f} GB, {found.measured_gb:.3f} GB "
        f"({100 * found.memory_error:+.0f}%); pace {found.pace:.2f}{' (disturbed)' * found.is_disturbed}",
        flush=True,
    )
    return found


def ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [float(order.index(i)) for i in range(len(values))]


def spearman(a: list[float], b: list[float]) -> float:
    """Return the rank correlation of two lists without ties."""
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True)) / (n * (n * n - 1))


def summary(found: list[Found]) -> str:
    errors = sorted(abs(f.error) for f in found)
    memory = sorted(abs(f.memory_error) for f in found)
    correlation = spearman([f.predicted_s for f in found], [f.measured_s for f in found])
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return (
        f"{len(found)} plans: step median error {100 * median(errors):.1f}%, p90 {100 * p90:.1f}%, "
        f"Spearman {correlation:.3f}; peak memory median error {100 * median(memory):.1f}%, "
        f"worst {100 * memory[-1]:.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=len(CASES), help="only the first plans")
    parser.add_argument("--keep", type=Path, help="folder for models, profile and runs; an existing profile is used")
    parser.add_argument("--again", type=float, default=0, help="minutes in which disturbed plans are run again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        pace, began = Pace(), time.monotonic()
        pace.start()
        if not (folder / "profile.json").exists():
            prepare(folder)
            (folder / "pace.json").write_text(json.dumps(pace.since(began)))
        usual = json.loads((folder / "pace.json").read_text())
        print(f"the loop took {usual:.1f} ms during the profile", flush=True)
        found = {i: run(case, folder, i, pace, usual) for i, case in enumerate(CASES[: options.runs])}
        print(summary([*found.values()]), flush=True)
        end = time.monotonic() + 60 * options.again
        while time.monotonic() < end and (disturbed := [i for i, one in found.items() if one.is_disturbed]):
            for i in disturbed:
                found[i] = run(CASES[i], folder, i, pace, usual) if time.monotonic() < end else found[i]
        quiet = [one for one in found.values() if not one.is_disturbed]
        print(f"all, disturbed ones done again: {summary([*found.values()])}\n"
              f"undisturbed ones alone: {summary(quiet) if quiet else 'none'}")  # fmt: skip


if __name__ == "__main__":
    main()
