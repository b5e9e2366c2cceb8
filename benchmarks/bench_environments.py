"""Multi-turn rollouts with slow environments, and many episodes at a time, on CPU.

    python benchmarks/bench_environments.py [latency] [concurrent] [tail] [rewards] [--rounds N]

``latency``: seconds of the rollout of 128 episodes of 4 turns with 16 slots, for environments that wait 0, 10
or 100 ms per call, or 10 ms with a heavy tail (2 % of the calls 300 ms). ``overlap``: the calls of a process overlap
(async methods); ``release``: an episode that waits has no slot, so that 128 episodes are open instead of 16. All
four run in turns. ``concurrent``: 1,000 open episodes whose environments wait 1 s per call: memory and lost episodes.
``tail``: tokens generated per second of single responses whose lengths have a heavy tail (Pareto, exponent 1.2, from 20
to 1,000 tokens), 8 prompts with 16 responses and 64 slots: in two calls without refill (64 rows each wait for their
longest), in one call that refills slots, and with ``env.partial_tokens``, which refills across steps; in turns.
``rewards``: seconds of a step of GRPO with 128 responses of up to 300 tokens whose verification takes 40 ms in one of
two processes: after the rollout (``reward.fn``) or during it (``SingleReply``), in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = f'''
import asyncio, random, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from realhf.environments import Turn
from realhf.environments.single_reply import SingleReply


class Game:
    """Any text is a guess; the number of turns is a function of the seed and the replies."""

    def __init__(self, seconds, tail=0.0):
        self.seconds, self.tail = seconds, tail

    def reset(self, row, seed):
        self.random, self.count = random.Random(seed), 0
        return Turn()

    def wait_s(self):
        return self.seconds + (0.3 if self.random.random() < self.tail else 0.0)

    def answer(self, reply):
        self.count += 1
        return Turn(text="+\\n", reward=float(len(reply.tokens)), done=self.count >= 4)

    def step(self, reply):
        time.sleep(self.wait_s())
        return self.answer(reply)


class AsyncGame(Game):
    async def step(self, reply):
        await asyncio.sleep(self.wait_s())
        return self.answer(reply)


class Tail(SingleReply):
    def __init__(self):
        super().__init__(lambda prompt, answer, row: 0.0)

    def reset(self, row, seed):
        return Turn(max_tokens=min(1000, int(20 * random.Random(seed).paretovariate(1.2))))


def slow_score(prompt, answer, row):
    time.sleep(0.04)
    return float(len(answer))
'''
LATENCIES = {"0 ms": (0.0, 0.0), "10 ms": (0.01, 0.0), "100 ms": (0.1, 0.0), "10 ms, tail": (0.01, 0.02)}
MODES = {"overlap, release": (True, 128), "overlap": (True, 16), "release": (False, 128), "neither": (False, 16)}


def run(folder: Path, words: list[str], steps: int) -> list[dict[str, float]]:
    """Run steps of GRPO without updates; return their metrics."""
    with tempfile.TemporaryDirectory() as root:
        common = [f"fileroot={root}", "experiment_name=b", "trial_name=t", "device=cpu", "threads_per_worker=1"]
        model = ["actor.init_from_scratch=True", f"actor.config={folder}/model", f"actor.tokenizer={folder}/tokenizer"]
        more = [f"dataset.path={folder}/train.jsonl", "dataset.train_bs_n_seqs=8", "ppo.gen.max_new_tokens=4",
                "actor.optimizer.lr=0", "ppo.kl_in=none", f"exp_ctrl.total_train_steps={steps}", "env.max_turns=8",
                "tensorboard.enabled=False", "exp_ctrl.total_train_epochs=100"]  # fmt: skip
        command = [sys.executable, "-m", "realhf", "quickstart", "grpo", *common, *model, *more, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=600)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        lines = (Path(root) / "b" / "t" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def latency(folder: Path, rounds: int) -> None:
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, (wait, tail) in LATENCIES.items():
            for mode, (overlaps, n_open) in MODES.items():
                cls = f"{folder}/env.py:{'AsyncGame' if overlaps else 'Game'}"
                words = [f"env.cls={cls}", f"env.options={{seconds: {wait}, tail: {tail}}}", "ppo.group_size=16",
                         "ppo.gen.max_num_seqs=16", f"env.max_episodes={n_open}"]  # fmt: skip
                steps = run(folder, [*words, "env.max_concurrency=256", "env.seed_per_sample=True"], 2)[1:]
                seconds.setdefault((name, mode), []).extend(line["time/actor_gen_s"] for line in steps)
    print("| latency per call | " + " | ".join(MODES) + " | neither / both |\n|---" + "|---" * (len(MODES) + 1) + "|")
    for name in LATENCIES:
        found = [statistics.median(seconds[name, mode]) for mode in MODES]
        print(f"| {name} | " + " | ".join(f"{s:.2f} s" for s in found) + f" | {found[-1] / found[0]:.1f} |")


def concurrent(folder: Path) -> None:
    words = [f"env.cls={folder}/env.py:AsyncGame", "env.options={seconds: 1.0}", "ppo.group_size=125",
             "ppo.gen.max_num_seqs=64", "env.max_episodes=1000", "env.max_concurrency=1000"]  # fmt: skip
    (line,) = run(folder, words, 1)
    turns, seconds = line["env/turns"], line["time/actor_gen_s"]
    print(f"1,000 open episodes, 1 s per call, {turns:.0f} turns: rollout {seconds:.1f} s, "
          f"failed {line['env/failed']:.0%}, worker {line['memory/worker_peak_gb']:.2f} GB at most")  # fmt: skip


def wide_model(folder: Path) -> list[str]:
    """Write the config of a model of 3.3 M parameters, and return the options for it."""
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
               "head_dim": 64, "intermediate_size": 704, "max_position_embeddings": 2048}  # fmt: skip
    (folder / "wide").mkdir(exist_ok=True)
    (folder / "wide" / "config.json").write_text(json.dumps(config))
    return [f"actor.config={folder}/wide", "ppo.group_size=16", "ppo.gen.max_num_seqs=64"]


def rewards(folder: Path, rounds: int) -> None:
    words = [*wide_model(folder), "ppo.gen.max_new_tokens=300"]
    file = folder / "env.py"
    modes = {
        "after": [f"reward.fn={file}:slow_score", "reward.processes=2"],
        "during": [
            "env.cls=realhf.environments.single_reply:SingleReply",
            f"env.options={{fn: {file}:slow_score}}",
            "env.workers=2",
        ],
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, more in modes.items():
            steps = run(folder, [*words, *more], 5)[1:]
            seconds.setdefault(name, []).extend(line["time/step_s"] for line in steps)
    after, during = (statistics.median(seconds[name]) for name in modes)
    print(
        f"verification after the rollout: {after:.2f} s per step, during it: {during:.2f}; {after / during:.2f} times"
    )


def tail(folder: Path, rounds: int) -> None:
    """Compare rollouts without refill, with it, and across steps, after the first ones with few carried episodes."""
    # the sampled tokens are not compared: greedy decoding of random weights has no stop token
    words = [*wide_model(folder), f"env.cls={folder}/env.py:Tail", "env.seed_per_sample=True",
             "ppo.gen.max_new_tokens=1000", "ppo.gen.greedy=True"]  # fmt: skip
    modes = {"no refill": ["actor_gen.prompts_per_call=4"], "refill": [], "across steps": ["env.partial_tokens=250"]}
    speeds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, more in modes.items():
            steps = run(folder, [*words, *more], 16)[8:]
            tokens = sum(line["tokens/generated"] for line in steps)
            speeds.setdefault(name, []).append(tokens / sum(line["time/actor_gen_s"] for line in steps))
    found = {name: statistics.median(some) for name, some in speeds.items()}
    print("heavy tail: " + ", ".join(f"{name} {speed:.0f} tokens/s ({speed / found['no refill']:.2f})"
                                     for name, speed in found.items()))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["latency", "concurrent"])
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        game = [sys.executable, REPOSITORY / "examples" / "guess_number.py", folder, "--games", "10"]
        subprocess.run(game, check=True, env=environment, stdout=subprocess.DEVNULL)
        (folder / "env.py").write_text(ENVIRONMENT)
        if "latency" in args.parts:
            latency(folder, args.rounds)
        if "concurrent" in args.parts:
            concurrent(folder)
        if "tail" in args.parts:
            tail(folder, args.rounds)
        if "rewards" in args.parts:
            rewards(folder, args.rounds)


if __name__ == "__main__":
    main()
