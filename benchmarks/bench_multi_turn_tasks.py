"""Trains three tasks of several turns from a warm start by the command line: a table, and curves as JSON.

    python benchmarks/bench_multi_turn_tasks.py --task guess --seed 1 --out /tmp/guess

Tasks are ``guess`` (a number with hints), ``calculator`` (sums with a tool, and a control without the tool) and
``textarena`` (tic-tac-toe). Further words are options of every reinforcement-learning run. The figures need a quiet
machine with two cores; the load of the machine is in the JSON.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
FIRST, LAST = 5, 20
"""Steps whose mean is the start and the end of a curve."""


@dataclass(frozen=True)
class Task:
    """A task: its example, the options of its runs, and the columns of its curve by metric.

    ``control`` are options of a second run of reinforcement learning, from the same warm start.
    """

    example: str
    data: tuple[str, ...]
    sft: tuple[str, ...]
    rl: tuple[str, ...]
    columns: dict[str, str]
    control: tuple[str, ...] = ()
    random_play: tuple[str, ...] = ()


SFT = ("model.optimizer.lr=3e-3", "dataset.train_bs_n_seqs=64")
RL = (
    "ppo.group_size=16", "ppo.kl_ctl=0", "ppo.kl_in=none", "ppo.ppo_n_minibatches=4",
    "env.workers=1", "exp_ctrl.total_train_epochs=10000",
)  # fmt: skip
TASKS = {
    "guess": Task(
        example="guess_number.py",
        data=("--games", "8000", "--careless", "0.6"),
        sft=(*SFT, "exp_ctrl.total_train_epochs=4"),
        rl=(*RL, f"env.cls={EXAMPLES}/guess_number.py:GuessNumber", "env.max_turns=12", "ppo.gen.max_new_tokens=4",
            "ppo.advantage=turn", "dataset.train_bs_n_seqs=16", "actor.optimizer.lr=2e-3",
            "exp_ctrl.total_train_steps=250"),
        columns={"turns": "env/turns", "right": "actor_gen/info_right", "reward": "reward/mean"},
    ),
    "calculator": Task(
        example="calculator_sums.py",
        data=(),
        sft=(*SFT, "exp_ctrl.total_train_epochs=4"),
        rl=(*RL, "env.cls=realhf.environments.tools:CalculatorEnv", "env.tool_format=pythonic",
            "env.options={as_text: true}", "env.max_turns=3", "ppo.gen.max_new_tokens=32",
            "dataset.train_bs_n_seqs=16", "actor.optimizer.lr=3e-4", "exp_ctrl.total_train_steps=150"),
        columns={"accuracy": "reward/mean", "calls": "actor_gen/info_tool_calls", "turns": "env/turns"},
        control=("env.max_turns=1",),
    ),
    "textarena": Task(
        example="textarena_game.py",
        data=("--games", "6000"),
        sft=(*SFT, "exp_ctrl.total_train_epochs=3"),
        rl=(*RL, f"env.cls={EXAMPLES}/textarena_game.py:TicTacToe", "env.seed_per_sample=True", "env.max_turns=9",
            "env.max_episode_len=120", "ppo.gen.max_new_tokens=2", "dataset.train_bs_n_seqs=16",
            "actor.optimizer.lr=1e-3", "exp_ctrl.total_train_steps=150"),
        columns={"won": "actor_gen/info_won", "lost": "actor_gen/info_lost", "reward": "reward/mean",
                 "invalid": "actor_gen/info_invalid_moves"},
        random_play=("--random-games", "20000"),
    ),
}  # fmt: skip


def run(words: list[str], log: Path) -> dict[str, Any]:
    """Run a command with its output in a file; return its seconds, CPU seconds, and the load of the machine."""
    load, start, used = os.getloadavg()[0], time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("w") as output:
        code = subprocess.run(
            words, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        ).returncode
    if code:
        sys.exit(f"{' '.join(words)}\n{log.read_text()[-3000:]}\n{log}: exit code {code}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    loads = {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)}
    return {"seconds": round(time.monotonic() - start, 1), "cpu_seconds": round(cpu, 1), "load": loads}


def quickstart(experiment: str, trial: str, out: Path, seed: int, options: list[str]) -> dict[str, Any]:
    names = [f"fileroot={out}/runs", "experiment_name=task", f"trial_name={trial}", "overwrite=True"]
    common = ["device=cpu", "n_gpus_per_node=2", f"seed={seed}", *names]
    words = [sys.executable, "-m", "realhf", "quickstart", experiment, *options, *common]
    (out / f"{trial}.command").write_text(" ".join(words) + "\n")
    return run(words, out / f"{trial}.log")


def curve_of(out: Path, trial: str, columns: dict[str, str]) -> dict[str, list[float]]:
    """Return the columns of a run's metrics, a value per step."""
    lines = [json.loads(line) for line in (out / "runs" / "task" / trial / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    return {name: [round(line.get(metric, 0.0), 4) for line in steps] for name, metric in columns.items()}


def train(task: Task, trial: str, out: Path, seed: int, options: list[str]) -> dict[str, Any]:
    """Train from the warm start; return the command's seconds, the curve, and its means at the start and the end."""
    (start,) = (out / "runs" / "task" / "sft" / "models" / "model").glob("step_*")
    model = [f"actor.path={start}", f"dataset.path={out}/data/train.jsonl"]
    timing = quickstart("grpo", trial, out, seed, [*model, *task.rl, *options])
    curve = curve_of(out, trial, task.columns)
    ends = {
        name: {"step_1": values[0], "first": statistics.mean(values[:FIRST]), "last": statistics.mean(values[-LAST:])}
        for name, values in curve.items()
    }
    return {**timing, "steps": len(next(iter(curve.values()))), "ends": ends, "curve": curve}


def table(result: dict) -> str:
    lines = [f"{'run':<10} {'metric':<10} {'step 1':>8} {f'first {FIRST}':>8} {f'last {LAST}':>8} {'change':>8}"]
    for trial in ("rl", "control"):
        for name, ends in result.get(trial, {}).get("ends", {}).items():
            change = f"{ends['last'] / ends['first'] - 1:+.0%}" if ends["first"] else ""
            figures = " ".join(f"{ends[key]:8.3f}" for key in ("step_1", "first", "last"))
            lines.append(f"{trial:<10} {name:<10} {figures} {change:>8}")
    if result.get("random_play"):
        lines.append("random play: " + ", ".join(f"{key} {value:.3f}" for key, value in result["random_play"].items()))
    for trial in ("sft", "rl", "control"):
        if trial in result:
            lines.append("{}: {seconds} s, {cpu_seconds} CPU seconds, load {load}".format(trial, **result[trial]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--keep-sft", action="store_true", help="start from the warm start that is in the folder")
    arguments, options = parser.parse_known_args()
    task, out = TASKS[arguments.task], arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    example = [sys.executable, str(EXAMPLES / task.example), str(out / "data")]
    result: dict[str, Any] = {"task": arguments.task, "seed": arguments.seed, "options": options}
    if not arguments.keep_sft:
        run([*example, *task.data], out / "data.log")
        model = [f"model.config={out}/data/model", f"model.tokenizer={out}/data/tokenizer"]
        sft = [*model, "model.init_from_scratch=True", f"dataset.path={out}/data/sft.jsonl", *task.sft]
        result["sft"] = quickstart("sft", "sft", out, arguments.seed, sft)
    if task.random_play:
        run([*example, *task.random_play], out / "random.log")
        result["random_play"] = json.loads((out / "random.log").read_text())
    result["rl"] = train(task, "rl", out, arguments.seed, options)
    if task.control:
        result["control"] = train(task, "control", out, arguments.seed, [*options, *task.control])
    (out / "result.json").write_text(json.dumps(result) + "\n")
    print(f"{arguments.task}, seed {arguments.seed}: {result['rl']['steps']} steps\n{table(result)}\n{out}/result.json")


if __name__ == "__main__":
    main()
