"""Kills runs at random moments and resumes them: the end must be, byte for byte, that of a run left in peace.

    python benchmarks/kill_and_resume.py [--kills N] [--seed N]

SFT, PPO and GRPO with one and two workers. A blow is a SIGKILL of the master, of a worker or of everything, at a random
moment or inside of a checkpoint's writing; a disk that takes no more; or a SIGKILL and a shard that loses its end.
Exits with 1 when weights, metrics (but for times and memory) or generations differ anywhere.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REALHF = [sys.executable, "-m", "realhf"]
EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.py"
CLOCK = ("time/", "memory/", "tokens/per_s", "flops/model_per_s", "predicted/")
BLOWS = ("master", "worker", "everything", "while writing", "disk full", "truncated shard")
STEPS, PATIENCE_S = 8, 120.0
SHORT = 20_000
"""Bytes that a file may have on the disk that is full: less than a shard, more than anything else before it."""


@dataclass(frozen=True)
class Job:
    experiment: str
    workers: int
    words: tuple[str, ...]

    def command(self, root: Path) -> list[str]:
        """Return what starts the run in ``root``, or starts it over."""
        return [*REALHF, "quickstart", self.experiment, f"fileroot={root.parent.parent}", "overwrite=True",
                f"experiment_name={root.parent.name}", f"trial_name={root.name}", "device=cpu",
                f"n_gpus_per_node={self.workers}",
                "threads_per_worker=1", "tensorboard.enabled=False", "exp_ctrl.ckpt_freq_steps=1",
                "exp_ctrl.total_train_epochs=9", f"exp_ctrl.total_train_steps={STEPS}", *self.words]  # fmt: skip


def jobs(task: Path) -> list[Job]:
    scratch = {role: (f"{role}.init_from_scratch=True", f"{role}.config={task}/model", f"{role}.optimizer.lr=1e-3",
                      f"{role}.tokenizer={task}/tokenizer") for role in ("model", "actor")}  # fmt: skip
    learn = (*scratch["actor"], f"dataset.path={task}/train.jsonl", "dataset.train_bs_n_seqs=6",
             "ppo.gen.max_new_tokens=10", "ppo.group_size=2", "ppo.ppo_n_minibatches=2")  # fmt: skip
    kinds = {
        "sft": (*scratch["model"], f"dataset.path={task}/sft.jsonl", "dataset.train_bs_n_seqs=6"),
        "ppo-math": (*learn, "ppo.use_adaptive_kl_ctl=True", "critic.init_from_scratch=True",
                     f"critic.config={task}/model"),
        "grpo": learn,
    }  # fmt: skip
    return [Job(name, workers, words) for name, words in kinds.items() for workers in (1, 2)]


def remains(root: Path) -> dict[str, object]:
    """Return all that must not depend on blows."""
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, object] = {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(CLOCK)} for line in lines]
    }
    for path in (*root.glob("models/*/*/model.safetensors"), *root.glob("generations/*.jsonl")):
        found[str(path.relative_to(root))] = path.read_bytes()
    return found


def processes(root: Path) -> list[int]:
    """Return the workers of a run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"realhf.apps.worker" in words and str(root).encode() in words:
            found.append(int(entry.name))
    return found


def take_no_more() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHORT, SHORT))


def strike(command: Sequence[str], root: Path, blow: str, chance: random.Random, seconds: float) -> bool:
    """Start something and strike it; False where it was over before."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                               preexec_fn=take_no_more if blow == "disk full" else None)  # fmt: skip
    end = time.monotonic() + (PATIENCE_S if blow in ("while writing", "disk full") else chance.uniform(0.2, seconds))
    while process.poll() is None and time.monotonic() < end:
        if blow == "while writing" and any((root / "checkpoints").glob("*.unfinished/*")):
            time.sleep(chance.uniform(0, 0.01))
            break
        time.sleep(0.002)
    if process.poll() is not None:
        return blow == "disk full" and process.returncode != 0
    workers = processes(root)
    if blow == "worker" and workers:
        os.kill(chance.choice(workers), signal.SIGKILL)
    else:
        for pid in workers if blow == "everything" else []:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    process.wait(PATIENCE_S)
    while processes(root):  # workers leave when their launcher is gone
        time.sleep(0.01)
    if blow == "truncated shard" and len(whole := sorted((root / "checkpoints").glob("step_*/manifest.json"))) > 1:
        newest = (root / "checkpoints" / (root / "checkpoints" / "latest").read_text()).glob("*.safetensors")
        os.truncate(chance.choice(sorted(newest)), 100)
        assert whole
    return True


def go_on(job: Job, root: Path) -> list[str]:
    """Return the command that goes on: resume, or the launch again where nothing was saved yet."""
    return [*REALHF, "resume", str(root)] if (root / "checkpoints" / "latest").exists() else job.command(root)


def torment(job: Job, folder: Path, n_blows: int, chance: random.Random) -> tuple[int, list[str]]:
    """Return how many blows were struck, and what came out differently."""
    straight = folder / job.experiment / f"straight-{job.workers}"
    began = time.monotonic()
    subprocess.run(job.command(straight), check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    seconds, expected = time.monotonic() - began, remains(straight)
    struck, wrong = 0, []
    while struck < n_blows:
        root = folder / job.experiment / f"struck-{job.workers}-{struck}"
        blows = []
        for _ in range(min(chance.randint(1, 3), n_blows - struck)):
            blow = BLOWS[(struck + len(blows) + job.workers) % len(BLOWS)]
            if strike(go_on(job, root), root, blow, chance, seconds):
                blows.append(blow)
        struck += len(blows)
        done = subprocess.run(go_on(job, root), capture_output=True, text=True, timeout=PATIENCE_S)
        problem = ""
        if done.returncode:
            problem = f"{done.stdout[-500:]}{done.stderr[-1000:]}"
        elif (found := remains(root)) != expected:
            names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            problem = f"{', '.join(names)} differ"
        line = f"{job.experiment:<9} x {job.workers}  {', '.join(blows):<45}"
        print(line, problem or "as if nothing had been", flush=True)
        wrong += [f"{line} {problem}"] if problem else []
        shutil.rmtree(root)
    return struck, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, total, wrong = random.Random(options.seed), 0, list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = ("--digits", "1", "--hidden", "32", "--layers", "2", "--sft-rows", "40", "--train-rows", "20",
                "--valid-rows", "5")  # fmt: skip
        subprocess.run([sys.executable, str(EXAMPLE), str(folder / "task"), *size], check=True, capture_output=True)
        todo = jobs(folder / "task")
        for i, job in enumerate(todo):
            share = options.kills * (i + 1) // len(todo) - options.kills * i // len(todo)
            struck, more = torment(job, folder, share, chance)
            total, wrong = total + struck, wrong + more
    print(f"{total} blows, {len(wrong)} runs that came out differently")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
