"""Kills runs at random times and resumes them: the results must equal those of an uninterrupted run byte for byte.

    python benchmarks/kill_and_resume.py [--kills N] [--seed N] [--jobs 'NAME;...'] [--faults 'NAME;...']

Each of ``JOBS`` has a feature with state that a checkpoint must contain. Faults: SIGKILL of the master, of a worker or
of all processes, at a random time or while a checkpoint or a best model is written; a full disk; a limit on the file
size of all processes; SIGKILL and a truncated shard of the last checkpoint. The disk that fills up is a tmpfs in a
mount namespace, which requires root. In jobs with environments also SIGKILL of a process of environments or of an
agent, which the run must survive. A fault counts only if the run was still in progress. Exits with 1 on any
difference in weights, best models, the last checkpoint, generations, or evaluations and metrics except those of time,
process size and retries (``NONDETERMINISTIC``). A job that resumes in other layouts is compared up to rounding.
"""

import argparse
import collections
import contextlib
import json
import math
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kill_jobs import AGENT, DISK_FULL, ENVIRONMENT, JOBS, REALHF, STEPS, TIMEOUT_S, Job, make_task

NONDETERMINISTIC = ("time/", "memory/", "tokens/per_s", "flops/model_per_s", "mfu/", "mbu/", "seconds",
                    "actor_gen/env_step_", "actor_gen/retried", "eval_gen/env_step_", "eval_gen/retried")  # fmt: skip
SURVIVED = (ENVIRONMENT, AGENT)
TIMED = ("master", "everything", "worker")
"""Faults at a random time."""
MAX_FREE = 20_000
"""Maximum of the free bytes on a full disk and of the file size limit: less than a shard."""
DISK = "256m"
OWN_NAMESPACE = ("unshare", "--mount", "--propagation", "private")


def outputs(root: Path) -> dict[str, bytes]:
    """Return all results that must not depend on faults."""
    lines = {path.name: [json.loads(line) for line in path.read_text().splitlines()]
             for path in root.glob("*.jsonl") if path.name in ("metrics.jsonl", "evaluation.jsonl")}  # fmt: skip
    kept = {name: [deterministic(line) for line in rows] for name, rows in lines.items()}
    files = (
        *root.glob("models/*/*/model.safetensors"),
        *root.glob("generations/*.jsonl"),
        root / "best" / "best.json",
        *root.glob("best/*/*/model.safetensors"),
        *root.glob(f"checkpoints/step_{STEPS}/*.safetensors"),
    )
    return {name: "".join(f"{json.dumps(row)}\n" for row in rows).encode() for name, rows in kept.items()} | {
        str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()
    }


def deterministic(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line without ``NONDETERMINISTIC`` values; those of evaluations are nested."""
    return {key: deterministic(value) if isinstance(value, dict) else value
            for key, value in line.items() if not key.startswith(NONDETERMINISTIC)}  # fmt: skip


def differences(expected: dict[str, bytes], actual: dict[str, bytes], is_exact: bool) -> list[str]:
    """Return the names of files that differ; if not ``is_exact``, responses, and metrics beyond rounding."""
    if is_exact:
        return sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))
    names = [name for name in expected if name.endswith(".jsonl")]
    return [name for name in names if not similar(expected[name], actual.get(name, b""))]


def similar(expected: bytes, actual: bytes) -> bool:
    rows, others = ([json.loads(line) for line in text.splitlines()] for text in (expected, actual))
    return len(rows) == len(others) and all(
        row.keys() == other.keys()
        and all(
            close(row[key], other[key]) for key in row if not key.startswith(("predicted/", "limit/"))
        )  # depends on the layout
        for row, other in zip(rows, others, strict=True)
    )


def close(expected: object, actual: object) -> bool:
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=1e-3, abs_tol=1e-4)
    return expected == actual


def command_lines() -> dict[int, list[bytes]]:
    """Return the words of all processes' command lines; zombies have none."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").split()
    return found


def processes(root: Path) -> list[int]:
    """Return the worker processes of a run."""
    return [
        pid for pid, words in command_lines().items() if b"realhf.apps.worker" in words and str(root).encode() in words
    ]


def environments(root: Path) -> list[int]:
    """Return the environment processes of a run."""
    return [pid for pid, words in children(processes(root)).items() if b"realhf.environments.server" in words]


def agents(root: Path) -> list[int]:
    """Return the processes of a run's agents."""
    return [pid for pid, words in children(environments(root)).items() if b"realhf.environments.server" not in words]


def children(parents: list[int]) -> dict[int, list[bytes]]:
    """Return the command lines of child processes that have not ended."""
    found = {}
    for pid, words in command_lines().items() if parents else ():
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            if words and int(parent) in parents:
                found[pid] = words
    return found


def mentions(path: Path) -> list[int]:
    """Return the processes with a path in their command lines."""
    return [pid for pid, words in command_lines().items() if any(str(path).encode() in word for word in words)]


def wait_for(event: str, condition: Callable[[], object], pause_s: float = 0.002) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for {event}")
        time.sleep(pause_s)


def whole_checkpoints(root: Path) -> list[Path]:
    return [
        path for path in (root / "checkpoints").glob("step_*/manifest.json") if "unfinished" not in path.parent.name
    ]


def launch(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def run_with_fault(process: subprocess.Popen, root: Path, fault: str, rng: random.Random, seconds: float) -> bool:
    """Inject a fault into a run that has been started, and end the run, unless it must survive the fault.

    Return False if the run ended before.
    """
    is_late = rng.random() < 0.7  # start-up takes most of the time
    first = rng.randrange(STEPS - 2) if fault in SURVIVED else 0
    triggers: dict[str, Callable[[], object]] = {
        **dict.fromkeys(("master", "everything"), lambda: not is_late or has_checkpoint(root)),
        "worker": lambda: processes(root) and (not is_late or has_checkpoint(root)),
        **dict.fromkeys(SURVIVED, lambda: n_steps(root) >= first and environments(root)),
        "while writing": lambda: any(root.glob("*/*.unfinished/*")),
        DISK_FULL: lambda: (root / "metrics.jsonl").exists(),
        "files limited": lambda: (root / "metrics.jsonl").exists(),
        "truncated shard": lambda: len(whole_checkpoints(root)) > 1,
    }
    is_triggered, is_injected = triggers.get(fault, lambda: True), False
    max_delay = (seconds / 8 if is_late else seconds) if fault in TIMED else 2.0 if fault in SURVIVED else 0.05
    try:
        wait_for(f"the trigger of '{fault}'", lambda: process.poll() is not None or is_triggered())
        end = time.monotonic() + rng.uniform(0, max_delay)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        is_injected = inject(process, root, fault, rng)
        return is_injected
    finally:
        if not is_injected or fault not in SURVIVED:
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
    if fault in SURVIVED:
        return kill_child(process, root, fault, rng)
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


def kill_child(process: subprocess.Popen, root: Path, fault: str, rng: random.Random) -> bool:
    """Kill a process of environments or an agent, once there is one; return False if no rollout follows."""
    find, pause_s = agents if fault == AGENT else environments, rng.uniform(0.02, 0.5)
    while process.poll() is None and n_steps(root) < STEPS - 1:
        if pids := find(root):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(rng.choice(pids), signal.SIGKILL)
                return True
        time.sleep(pause_s)
    return False


def n_steps(root: Path) -> int:
    path = root / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def fill(ballast: Path, left: int) -> None:
    """Write a file that leaves about ``left`` free bytes on the disk."""
    with ballast.open("wb") as file, contextlib.suppress(OSError):  # the run may have filled it meanwhile
        while (size := shutil.disk_usage(ballast.parent).free - left) > 0:
            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)


def has_checkpoint(root: Path) -> bool:
    return (root / "checkpoints" / "latest").exists()


def continuation(job: Job, root: Path, rng: random.Random) -> list[str]:
    """Return the command that resumes the run, or restarts it if there is no checkpoint."""
    if not has_checkpoint(root):
        return job.command(root)
    return [*REALHF, "resume", str(root), *(rng.choice(job.layouts).split() if job.layouts else ())]


@dataclass
class Tally:
    """Injected faults, number of resumptions from a checkpoint, and runs with differences."""

    faults: collections.Counter[str]
    resumed: int
    failures: list[str]


def check_job(job: Job, folder: Path, faults: list[str], rng: random.Random, tally: Tally) -> None:
    """Inject all faults into runs of a job, up to three per run, and compare the results."""
    reference = folder / job.name.replace(", ", "-").replace(" ", "-") / "reference"
    began = time.monotonic()
    subprocess.run(job.command(reference), check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    seconds, expected = time.monotonic() - began, outputs(reference)
    while faults:
        root, injected = reference.with_name(f"faulty-{len(faults)}"), list[str]()
        survivor: subprocess.Popen | None = None
        for fault in faults[: rng.randint(1, 3)]:
            if survivor is None:
                tally.resumed += has_checkpoint(root)
            process = survivor or launch(continuation(job, root, rng))
            if not run_with_fault(process, root, fault, rng, seconds):
                break  # the run has ended
            injected.append(fault)
            survivor = process if fault in SURVIVED else None
        if not injected:
            shutil.rmtree(root)
            continue
        faults = faults[len(injected) :]
        tally.faults.update(injected)
        problem = finish(job, root, survivor, rng, tally)
        if not problem and (names := differences(expected, outputs(root), is_exact=not job.layouts)):
            problem = f"{', '.join(names)} differ"
        line = f"{job.name:<24} x {job.workers}  {', '.join(injected):<45}"
        print(line, problem or f"{'similar' if job.layouts else 'identical'} ({len(expected)} files)", flush=True)
        tally.failures += [f"{line} {problem}"] if problem else []
        wait_for("environments to end after their worker", lambda: not mentions(folder / "task"), 0.2)
        shutil.rmtree(root)
    shutil.rmtree(reference.parent)


def finish(job: Job, root: Path, survivor: subprocess.Popen | None, rng: random.Random, tally: Tally) -> str:
    """Wait until a run that has survived its faults ends, or resume it; return the problem, if any."""
    code = -signal.SIGKILL if survivor is None else survivor.wait(TIMEOUT_S)
    if code != -signal.SIGKILL:
        return f"exit code {code}: {(root / 'error.txt').read_text()[-1500:]}" if code else ""
    tally.resumed += has_checkpoint(root)
    done = subprocess.run(continuation(job, root, rng), capture_output=True, text=True, timeout=TIMEOUT_S)
    return f"{done.stdout[-500:]}{done.stderr[-1000:]}" if done.returncode else ""


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
    parser.add_argument("--kills", type=int, default=3 * len(JOBS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", default="", help="names of jobs, separated by ';' (default: all)")
    parser.add_argument(
        "--faults", default="", help="names of faults, separated by ';' (default: all that a job can have)"
    )
    parser.add_argument("--own-namespace", action="store_true", help="internal: this process may mount")
    options = parser.parse_args()
    if not options.own_namespace and not subprocess.run([*OWN_NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode:
        os.execvp(OWN_NAMESPACE[0], [*OWN_NAMESPACE, sys.executable, *sys.argv, "--own-namespace"])
    rng, tally = random.Random(options.seed), Tally(collections.Counter(), 0, [])
    chosen = set(options.faults.split(";") if options.faults else {fault for job in JOBS for fault in job.faults})
    if DISK_FULL in chosen and not options.own_namespace:
        chosen.remove(DISK_FULL)
        print(f"skipping '{DISK_FULL}': this user may not mount a tmpfs")
    todo = [job for job in JOBS if not options.jobs or job.name in options.jobs.split(";")]
    with disk(options.own_namespace) as folder:
        make_task(folder)
        for i, job in enumerate(todo):  # each job starts with another fault, so that all faults reach many jobs
            turns = range(options.kills * i // len(todo), options.kills * (i + 1) // len(todo))
            faults = [fault for fault in job.faults if fault in chosen]
            check_job(job, folder, [faults[(turn + i) % len(faults)] for turn in turns], rng, tally)
    kinds = ", ".join(f"{number} {fault}" for fault, number in sorted(tally.faults.items()))
    print(f"{tally.faults.total()} faults ({kinds}); {tally.resumed} launches resumed from a checkpoint; "
          f"{len(tally.failures)} runs with differences (not compared: {', '.join(NONDETERMINISTIC)})")  # fmt: skip
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
