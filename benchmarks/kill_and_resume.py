"""Kills runs at random times and resumes them: the results must equal those of an uninterrupted run byte for byte.

    python benchmarks/kill_and_resume.py [--kills N] [--seed N]

SFT, PPO and GRPO with one and two workers. Faults: SIGKILL of the master, of a worker or of all processes, at a random
time or while a checkpoint is written; a full disk; a limit on the file size of all processes; SIGKILL and a truncated
shard of the last checkpoint. The disk that fills up is a tmpfs in a mount namespace, which requires root.
A fault counts only if the run was still in progress. Exits with 1 on any difference in weights, the last checkpoint,
generations, or metrics except those of time and process size (``NONDETERMINISTIC``).
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
NONDETERMINISTIC = ("time/", "memory/", "tokens/per_s", "flops/model_per_s", "mfu/", "mbu/")
DISK_FULL = "disk full"
FAULTS = ("master", "worker", "everything", "while writing", DISK_FULL, "truncated shard", "files limited")
STEPS, TIMEOUT_S = 8, 240.0
MAX_FREE = 20_000
"""Maximum of the free bytes on a full disk and of the file size limit: less than a shard."""
DISK = "256m"
OWN_NAMESPACE = ("unshare", "--mount", "--propagation", "private")


@dataclass(frozen=True)
class Job:
    experiment: str
    workers: int
    words: tuple[str, ...]

    def command(self, root: Path) -> list[str]:
        """Return the command that starts or restarts the run in ``root``."""
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


def outputs(root: Path) -> dict[str, bytes]:
    """Return all results that must not depend on faults."""
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    kept = [json.dumps({k: v for k, v in line.items() if not k.startswith(NONDETERMINISTIC)}) for line in lines]
    files = (*root.glob("models/*/*/model.safetensors"), *root.glob("generations/*.jsonl"),
             *root.glob(f"checkpoints/step_{STEPS}/*.safetensors"))  # fmt: skip
    return {"metrics.jsonl": "\n".join(kept).encode()} | {str(p.relative_to(root)): p.read_bytes() for p in files}


def processes(root: Path) -> list[int]:
    """Return the worker processes of a run."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"realhf.apps.worker" in words and str(root).encode() in words:
            pids.append(int(entry.name))
    return pids


def wait_for(event: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for {event}")
        time.sleep(0.002)


def whole_checkpoints(root: Path) -> list[Path]:
    return [
        path for path in (root / "checkpoints").glob("step_*/manifest.json") if "unfinished" not in path.parent.name
    ]


def run_with_fault(command: list[str], root: Path, fault: str, rng: random.Random, seconds: float) -> bool:
    """Start a run and inject a fault; return False if the run ended before."""
    triggers: dict[str, Callable[[], object]] = {
        "worker": lambda: processes(root),
        "while writing": lambda: any((root / "checkpoints").glob("*.unfinished/*")),
        DISK_FULL: lambda: (root / "metrics.jsonl").exists(),
        "files limited": lambda: (root / "metrics.jsonl").exists(),
        "truncated shard": lambda: len(whole_checkpoints(root)) > 1,
    }
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    is_triggered = triggers.get(fault, lambda: True)
    max_delay = {"master": seconds, "everything": seconds, "worker": seconds / 2}.get(fault, 0.05)
    try:
        wait_for(f"the trigger of '{fault}'", lambda: process.poll() is not None or is_triggered())
        end = time.monotonic() + rng.uniform(0, max_delay)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        return inject(process, root, fault, rng)
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        wait_for("workers to end after their launcher", lambda: not processes(root))


def inject(process: subprocess.Popen, root: Path, fault: str, rng: random.Random) -> bool:
    workers = processes(root)
    if process.poll() is not None or (fault == "worker" and not workers):
        return False
    if fault == DISK_FULL:
        fill(ballast := root.parent / "ballast", rng.randint(0, MAX_FREE))
        code = process.wait(TIMEOUT_S)
        ballast.unlink()
        return code != 0
    if fault == "files limited":
        limit = rng.randint(0, MAX_FREE)
        for pid in (process.pid, *workers):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, limit))
        return process.wait(TIMEOUT_S) != 0
    if fault == "worker":
        os.kill(rng.choice(workers), signal.SIGKILL)
        return process.wait(TIMEOUT_S) != 0
    process.kill()
    for pid in workers if fault == "everything" else []:
        os.kill(pid, signal.SIGKILL)
    if fault == "truncated shard":
        process.wait(TIMEOUT_S)
        last = root / "checkpoints" / (root / "checkpoints" / "latest").read_text()
        shard = rng.choice(sorted(last.glob("*.safetensors")))
        os.truncate(shard, rng.randrange(shard.stat().st_size))
    return True


def fill(ballast: Path, left: int) -> None:
    """Write a file that leaves about ``left`` free bytes on the disk."""
    with ballast.open("wb") as file, contextlib.suppress(OSError):  # the run may have filled it meanwhile
        while (size := shutil.disk_usage(ballast.parent).free - left) > 0:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)


def has_checkpoint(root: Path) -> bool:
    return (root / "checkpoints" / "latest").exists()


def continuation(job: Job, root: Path) -> list[str]:
    """Return the command that resumes the run, or restarts it if there is no checkpoint."""
    return [*REALHF, "resume", str(root)] if has_checkpoint(root) else job.command(root)


@dataclass
class Tally:
    """Injected faults, number of resumptions from a checkpoint, and runs with differences."""

    faults: collections.Counter[str]
    resumed: int
    failures: list[str]


def check_job(job: Job, folder: Path, faults: list[str], rng: random.Random, tally: Tally) -> None:
    """Inject all faults into runs of a job, up to three per run, and compare the results."""
    reference = folder / job.experiment / f"reference-{job.workers}"
    began = time.monotonic()
    subprocess.run(job.command(reference), check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    seconds, expected = time.monotonic() - began, outputs(reference)
    while faults:
        root, injected = folder / job.experiment / f"faulty-{job.workers}-{len(faults)}", list[str]()
        for fault in faults[: rng.randint(1, 3)]:
            tally.resumed += has_checkpoint(root)
            if not run_with_fault(continuation(job, root), root, fault, rng, seconds):
                break  # the run has ended
            injected.append(fault)
        if not injected:
            shutil.rmtree(root)
            continue
        faults = faults[len(injected) :]
        tally.faults.update(injected)
        tally.resumed += has_checkpoint(root)
        done = subprocess.run(continuation(job, root), capture_output=True, text=True, timeout=TIMEOUT_S)
        problem = ""
        if done.returncode:
            problem = f"{done.stdout[-500:]}{done.stderr[-1000:]}"
        elif (actual := outputs(root)) != expected:
            names = sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))
            problem = f"{', '.join(names)} differ"
        line = f"{job.experiment:<9} x {job.workers}  {', '.join(injected):<45}"
        print(line, problem or f"identical ({len(expected)} files)", flush=True)
        tally.failures += [f"{line} {problem}"] if problem else []
        shutil.rmtree(root)


@contextlib.contextmanager
def disk(own: bool) -> Iterator[Path]:
    """Yield a temporary folder; with ``own``, on a tmpfs in this process's mount namespace."""
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
    parser.add_argument("--own-namespace", action="store_true", help="internal: this process may mount")
    options = parser.parse_args()
    if not options.own_namespace and not subprocess.run([*OWN_NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode:
        os.execvp(OWN_NAMESPACE[0], [*OWN_NAMESPACE, sys.executable, *sys.argv, "--own-namespace"])
    rng, tally = random.Random(options.seed), Tally(collections.Counter(), 0, [])
    faults = [fault for fault in FAULTS if options.own_namespace or fault != DISK_FULL]
    if DISK_FULL not in faults:
        print(f"skipping '{DISK_FULL}': this user may not mount a tmpfs")
    with disk(options.own_namespace) as folder:
        size = ("--digits", "1", "--hidden", "32", "--layers", "2", "--sft-rows", "40", "--train-rows", "20",
                "--valid-rows", "5")  # fmt: skip
        subprocess.run([sys.executable, str(EXAMPLE), str(folder / "task"), *size], check=True, capture_output=True)
        todo = jobs(folder / "task")
        for i, job in enumerate(todo):  # each job starts with another fault, so that all jobs get all faults
            turns = range(options.kills * i // len(todo), options.kills * (i + 1) // len(todo))
            check_job(job, folder, [faults[(turn + i) % len(faults)] for turn in turns], rng, tally)
    kinds = ", ".join(f"{number} {fault}" for fault, number in sorted(tally.faults.items()))
    print(f"{tally.faults.total()} faults ({kinds}); {tally.resumed} launches resumed from a checkpoint; "
          f"{len(tally.failures)} runs with differences (not compared: {', '.join(NONDETERMINISTIC)})")  # fmt: skip
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
