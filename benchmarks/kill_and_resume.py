"""Kills runs at random moments and resumes them: the end must be, byte for byte, that of a run left in peace.

    python benchmarks/kill_and_resume.py [--kills N] [--seed N]

SFT, PPO and GRPO with one and two workers. A blow is a SIGKILL of the master, of a worker or of everything, at a random
moment or while a checkpoint is being written; a disk that is full from a random moment on, or takes no file beyond a
size (a limit that every process of the run is given); or a SIGKILL, after which a shard of the last checkpoint loses
its end. The disk that fills up is a small one of its own, in a mount namespace, which only root can make.
What did not happen, because the run was over before, is no blow. Exits with 1 when anything differs: weights, last
checkpoint, generations, or metrics but for those that a clock or the size of processes makes (``CLOCK``).
"""

import argparse
import collections
import contextlib
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

REALHF = [sys.executable, "-m", "realhf"]
EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.py"
CLOCK = ("time/", "memory/", "tokens/per_s", "flops/model_per_s", "mfu/", "mbu/")
DISK_FULL = "disk full"
BLOWS = ("master", "worker", "everything", "while writing", DISK_FULL, "truncated shard", "files limited")
STEPS, PATIENCE_S = 8, 240.0
SHORT = 20_000
"""Bytes that a full disk still takes, and beyond which no limited file grows, at the most: less than a shard."""
DISK = "256m"
OWN_NAMESPACE = ("unshare", "--mount", "--propagation", "private")


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


def remains(root: Path) -> dict[str, bytes]:
    """Return all that must not depend on blows."""
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    kept = [json.dumps({k: v for k, v in line.items() if not k.startswith(CLOCK)}) for line in lines]
    files = (*root.glob("models/*/*/model.safetensors"), *root.glob("generations/*.jsonl"),
             *root.glob(f"checkpoints/step_{STEPS}/*.safetensors"))  # fmt: skip
    return {"metrics.jsonl": "\n".join(kept).encode()} | {str(p.relative_to(root)): p.read_bytes() for p in files}


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


def wait_for(what: str, is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s for {what}")
        time.sleep(0.002)


def whole_checkpoints(root: Path) -> list[Path]:
    return [
        path for path in (root / "checkpoints").glob("step_*/manifest.json") if "unfinished" not in path.parent.name
    ]


def strike(command: list[str], root: Path, blow: str, chance: random.Random, seconds: float) -> bool:
    """Start something and strike it at its moment; False where it was over before."""
    moments: dict[str, Callable[[], object]] = {
        "worker": lambda: processes(root),
        "while writing": lambda: any((root / "checkpoints").glob("*.unfinished/*")),
        DISK_FULL: lambda: (root / "metrics.jsonl").exists(),
        "files limited": lambda: (root / "metrics.jsonl").exists(),
        "truncated shard": lambda: len(whole_checkpoints(root)) > 1,
    }
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    has_come = moments.get(blow, lambda: True)
    longest = {"master": seconds, "everything": seconds, "worker": seconds / 2}.get(blow, 0.05)
    try:
        wait_for(f"the moment of '{blow}'", lambda: process.poll() is not None or has_come())
        end = time.monotonic() + chance.uniform(0, longest)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        return hit(process, root, blow, chance)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        wait_for("workers to leave, whose launcher is gone", lambda: not processes(root))


def hit(process: subprocess.Popen, root: Path, blow: str, chance: random.Random) -> bool:
    workers = processes(root)
    if process.poll() is not None or (blow == "worker" and not workers):
        return False
    if blow == DISK_FULL:
        fill(ballast := root.parent / "ballast", chance.randint(0, SHORT))
        code = process.wait(PATIENCE_S)
        ballast.unlink()
        return code != 0
    if blow == "files limited":
        limit = chance.randint(0, SHORT)
        for pid in (process.pid, *workers):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
        return process.wait(PATIENCE_S) != 0
    if blow == "worker":
        os.kill(chance.choice(workers), signal.SIGKILL)
        return process.wait(PATIENCE_S) != 0
    process.kill()
    for pid in workers if blow == "everything" else []:
        os.kill(pid, signal.SIGKILL)
    if blow == "truncated shard":
        process.wait(PATIENCE_S)
        last = root / "checkpoints" / (root / "checkpoints" / "latest").read_text()
        shard = chance.choice(sorted(last.glob("*.safetensors")))
        os.truncate(shard, chance.randrange(shard.stat().st_size))
    return True


def fill(ballast: Path, left: int) -> None:
    """Leave about so many bytes of a disk."""
    with ballast.open("wb") as file, contextlib.suppress(OSError):  # the run may have filled it meanwhile
        while (size := shutil.disk_usage(ballast.parent).free - left) > 0:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)


def can_go_on(root: Path) -> bool:
    return (root / "checkpoints" / "latest").exists()


def go_on(job: Job, root: Path) -> list[str]:
    """Return the command that goes on: resume, or the launch again where nothing was saved yet."""
    return [*REALHF, "resume", str(root)] if can_go_on(root) else job.command(root)


@dataclass
class Tally:
    """What was struck, how often a checkpoint was there to go on from, and what came out differently."""

    blows: collections.Counter[str]
    resumed: int
    wrong: list[str]


def torment(job: Job, folder: Path, blows: list[str], chance: random.Random, tally: Tally) -> None:
    """Strike runs of a job, up to three times each, until every blow of the list has hit."""
    straight = folder / job.experiment / f"straight-{job.workers}"
    began = time.monotonic()
    subprocess.run(job.command(straight), check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    seconds, expected = time.monotonic() - began, remains(straight)
    while blows:
        root, struck = folder / job.experiment / f"struck-{job.workers}-{len(blows)}", list[str]()
        for blow in blows[: chance.randint(1, 3)]:
            tally.resumed += can_go_on(root)
            if not strike(go_on(job, root), root, blow, chance, seconds):
                break  # this run is over
            struck.append(blow)
        if not struck:
            shutil.rmtree(root)
            continue
        blows = blows[len(struck) :]
        tally.blows.update(struck)
        tally.resumed += can_go_on(root)
        done = subprocess.run(go_on(job, root), capture_output=True, text=True, timeout=PATIENCE_S)
        problem = ""
        if done.returncode:
            problem = f"{done.stdout[-500:]}{done.stderr[-1000:]}"
        elif (found := remains(root)) != expected:
            names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            problem = f"{', '.join(names)} differ"
        line = f"{job.experiment:<9} x {job.workers}  {', '.join(struck):<45}"
        print(line, problem or f"as if nothing had been ({len(expected)} files)", flush=True)
        tally.wrong += [f"{line} {problem}"] if problem else []
        shutil.rmtree(root)


@contextlib.contextmanager
def disk(own: bool) -> Iterator[Path]:
    """A folder for everything; on a small disk of its ``own`` it is gone with this process and its namespace."""
    with tempfile.TemporaryDirectory() as temporary:
        if own:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", temporary], check=True)
        try:
            yield Path(temporary)
        finally:
            if own:
                subprocess.run(["umount", "--lazy", temporary], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own-namespace", action="store_true", help="said by this program to itself: it may mount")
    options = parser.parse_args()
    if not options.own_namespace and not subprocess.run([*OWN_NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode:
        os.execvp(OWN_NAMESPACE[0], [*OWN_NAMESPACE, sys.executable, *sys.argv, "--own-namespace"])
    chance, tally = random.Random(options.seed), Tally(collections.Counter(), 0, [])
    blows = [blow for blow in BLOWS if options.own_namespace or blow != DISK_FULL]
    if DISK_FULL not in blows:
        print("no disk is filled: this user may not mount one")
    with disk(options.own_namespace) as folder:
        size = ("--digits", "1", "--hidden", "32", "--layers", "2", "--sft-rows", "40", "--train-rows", "20",
                "--valid-rows", "5")  # fmt: skip
        subprocess.run([sys.executable, str(EXAMPLE), str(folder / "task"), *size], check=True, capture_output=True)
        todo = jobs(folder / "task")
        for i, job in enumerate(todo):  # every job begins with another blow, so that all meet all
            turns = range(options.kills * i // len(todo), options.kills * (i + 1) // len(todo))
            torment(job, folder, [blows[(turn + i) % len(blows)] for turn in turns], chance, tally)
    kinds = ", ".join(f"{number} {blow}" for blow, number in sorted(tally.blows.items()))
    print(f"{tally.blows.total()} blows ({kinds}); {tally.resumed} launches went on from a checkpoint; "
          f"{len(tally.wrong)} runs came out differently (not compared: {', '.join(CLOCK)})")  # fmt: skip
    raise SystemExit(1 if tally.wrong else 0)


if __name__ == "__main__":
    main()
