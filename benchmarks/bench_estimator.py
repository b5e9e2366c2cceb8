"""Predictions against measured runs: step time and peak memory of many plans, through the real command line.

    python benchmarks/bench_estimator.py [--runs N] [--keep FOLDER] [--again MINUTES]

creates three tiny models, takes one profile of this machine for them, and runs PPO (with and without a critic) with
plans of one to four workers. Responses have a fixed length, so that the work is known beforehand; the measured step
time is the median over steps without the first. Prints one line per plan and a summary.

A quiet machine is required. To detect disturbances, a loop in Python is timed on each core twice a second, in processor
time, which grows if other virtual machines share the host's cores. Before and after the profile and every run, while
nothing else runs here, passes over a large array are timed, which grow if they share its caches and memory. A run is
disturbed if one of these times differs by more than ``DISTURBED`` from that of the profile. ``--again`` repeats
disturbed plans within a time limit; the last run of each counts. A second summary covers the undisturbed runs only.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

REALHF = [sys.executable, "-c", "from realhf.apps.main import console; console()"]
SIZES = {"small": (128, 2), "middle": (192, 4), "large": (256, 6)}
"""Hidden width and layers of the models."""
STEPS = {"small": 30, "middle": 12, "large": 7}
"""Steps of a run: at least ten seconds, longer than most disturbances."""


@dataclass(frozen=True)
class Case:
    """A plan: model size, workers, allocation, and additional options."""

    size: str
    workers: int
    allocation: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.size:<7}{self.workers} {self.allocation:<62} {' '.join(w.partition('.')[2] for w in self.options)}"
        )


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


class ClockSpeed(threading.Thread):
    """Times constant work continuously, in a thread."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []

    def run(self) -> None:
        for core in itertools.cycle(sorted(os.sched_getaffinity(0))):
            os.sched_setaffinity(0, {core})  # of this thread
            start, total = time.thread_time(), 0
            for number in range(60_000):
                total += number * number
            self.samples.append((time.monotonic(), time.thread_time() - start))
            time.sleep(0.5)

    def since(self, start: float) -> float:
        """Return the mean milliseconds of the work since ``start``."""
        return 1e3 * mean(seconds for at, seconds in self.samples if at >= start)


def stream_ms() -> float:
    """Return the median milliseconds of a pass over an array that the caches of a core do not hold."""
    array, times = np.zeros(4 << 20, np.float32), []
    for _ in range(60):
        start = time.thread_time()
        np.add(array, 1.0, out=array)
        times.append(time.thread_time() - start)
    return 1e3 * median(times)


@dataclass(frozen=True)
class MachineState:
    """Mean times of the loop and of a pass over memory, in milliseconds."""

    loop: float
    memory: float

    def relative_to(self, other: "MachineState") -> "MachineState":
        return MachineState(self.loop / other.loop, self.memory / other.memory)

    def __str__(self) -> str:
        return f"loop {self.loop:.2f}, memory {self.memory:.2f}"


@dataclass(frozen=True)
class Comparison:
    """Prediction and measurement of a run; ``slowdown`` is relative to the profile."""

    predicted_s: float
    measured_s: float
    predicted_gb: float
    measured_gb: float
    slowdown: MachineState

    @property
    def is_disturbed(self) -> bool:
        return max(abs(self.slowdown.loop - 1), abs(self.slowdown.memory - 1)) > DISTURBED

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_gb / self.measured_gb - 1


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


REWARD = """
def share_of_digits(prompt: str, answer: str, row: dict) -> float:
    return sum(c.isdigit() for c in answer) / max(1, len(answer))
"""


def prepare(folder: Path) -> None:
    """Create tasks and models of all sizes, a reward function, and the profile."""
    (folder / "reward.py").write_text(REWARD)
    example = Path(__file__).parent.parent / "examples" / "arithmetic.py"
    for size, (hidden, layers) in SIZES.items():
        call(sys.executable, str(example), str(folder / size), "--hidden", str(hidden), "--layers", str(layers))
    models = ",".join(str(folder / size / "model") for size in SIZES)
    call(*REALHF, "profile", f"model={models}", "n_gpus_per_node=4", "device=cpu", f"out={folder / 'profile.json'}")


def run(case: Case, folder: Path, number: int, clock_speed: ClockSpeed, during_profile: MachineState) -> Comparison:
    task, root = folder / case.size, folder / "runs" / str(number)
    memory_ms, began = stream_ms(), time.monotonic()
    call(*REALHF, "quickstart", "ppo-math", f"fileroot={root}", "experiment_name=e", "trial_name=t", "overwrite=True",
         "device=cpu",
         f"actor.config={task / 'model'}", "actor.init_from_scratch=True", f"actor.tokenizer={task / 'tokenizer'}",
         f"dataset.path={task / 'train.jsonl'}", "dataset.train_bs_n_seqs=32", "ppo.gen.max_new_tokens=32",
         "ppo.gen.min_new_tokens=32", "ppo.ppo_n_minibatches=2", f"n_gpus_per_node={case.workers}",
         "threads_per_worker=1", f"allocation_mode={case.allocation}", f"planner.profile={folder / 'profile.json'}",
         f"exp_ctrl.total_train_steps={STEPS[case.size]}", "save_roles=[]", "n_logged_generations=0",
         "tensorboard.enabled=False",
         f"reward.fn={folder / 'reward.py'}:share_of_digits", *case.options)  # fmt: skip
    lines = [json.loads(line) for line in (root / "e" / "t" / "metrics.jsonl").read_text().splitlines()]
    expected = json.loads((root / "e" / "t" / "plan.json").read_text())["expected"]
    assert "profile" in expected["source"], expected["source"]
    steps = median(line["time/step_s"] for line in lines[1:])
    peak = max(line["memory/worker_peak_gb"] for line in lines)
    parts = {k: median(line[k] for line in lines[1:]) for k in lines[-1] if k.startswith("time/")}
    for name, seconds in expected["calls"].items():
        print(f"        {name:<14} predicted {seconds:7.3f}  measured {parts.get(f'time/{name}_s', 0.0):7.3f}")
    state = MachineState(clock_speed.since(began), (memory_ms + stream_ms()) / 2)
    slowdown = state.relative_to(during_profile)
    result = Comparison(expected["step_s"], steps, expected["peak_bytes"] / 1e9, peak, slowdown)
    print(
        f"{case}\n    step predicted {result.predicted_s:.3f} s, measured {result.measured_s:.3f} s "
        f"({100 * result.error:+.0f}%); peak {result.predicted_gb:.3f} GB, {result.measured_gb:.3f} GB "
        f"({100 * result.memory_error:+.0f}%); times of {slowdown}{' (disturbed)' * result.is_disturbed}",
        flush=True,
    )
    return result


def ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [float(order.index(i)) for i in range(len(values))]


def spearman(a: list[float], b: list[float]) -> float:
    """Return the rank correlation of two lists; there must be no ties."""
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True)) / (n * (n * n - 1))


def summary(results: list[Comparison]) -> str:
    errors = sorted(abs(f.error) for f in results)
    memory = sorted(abs(f.memory_error) for f in results)
    correlation = spearman([f.predicted_s for f in results], [f.measured_s for f in results])
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return (
        f"{len(results)} plans: step median error {100 * median(errors):.1f}%, p90 {100 * p90:.1f}%, "
        f"Spearman {correlation:.3f}; peak memory median error {100 * median(memory):.1f}%, "
        f"worst {100 * memory[-1]:.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=len(CASES), help="only the first plans")
    parser.add_argument("--keep", type=Path, help="folder for models, profile and runs; reuses a profile in it")
    parser.add_argument("--again", type=float, default=0, help="minutes for repeating disturbed plans")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        clock_speed, began = ClockSpeed(), time.monotonic()
        clock_speed.start()
        if not (folder / "profile.json").exists():
            memory_ms = stream_ms()
            prepare(folder)
            state = MachineState(clock_speed.since(began), (memory_ms + stream_ms()) / 2)
            (folder / "machine_state.json").write_text(json.dumps(asdict(state)))
        during_profile = MachineState(**json.loads((folder / "machine_state.json").read_text()))
        print(f"during the profile, in ms: {during_profile}", flush=True)
        results = {i: run(case, folder, i, clock_speed, during_profile) for i, case in enumerate(CASES[: options.runs])}
        print(summary([*results.values()]), flush=True)
        end = time.monotonic() + 60 * options.again
        while time.monotonic() < end and (disturbed := [i for i, one in results.items() if one.is_disturbed]):
            for i in disturbed:
                if time.monotonic() < end:
                    results[i] = run(CASES[i], folder, i, clock_speed, during_profile)
        quiet = [one for one in results.values() if not one.is_disturbed]
        print(f"all, after repeating disturbed runs: {summary([*results.values()])}\n"
              f"undisturbed runs only: {summary(quiet) if quiet else 'none'}")  # fmt: skip


if __name__ == "__main__":
    main()
