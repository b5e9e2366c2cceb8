"""Kills runs at random times and resumes them: the results must equal those of an uninterrupted run byte for byte.

    python benchmarks/kill_and_resume.py [--kills N] [--seed N] [--jobs 'NAME;...']

Each of ``JOBS`` has a feature with state that a checkpoint must contain. Faults: SIGKILL of the master, of a worker or
of all processes, at a random time or while a checkpoint or a best model is written; a full disk; a limit on the file
size of all processes; SIGKILL and a truncated shard of the last checkpoint. The disk that fills up is a tmpfs in a
mount namespace, which requires root. A fault counts only if the run was still in progress. Exits with 1 on any
difference in weights, best models, the last checkpoint, generations, or evaluations and metrics except those of time
and process size (``NONDETERMINISTIC``). A job that resumes in other layouts is compared up to rounding.
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

REALHF = [sys.executable, "-m", "realhf"]
EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.py"
NONDETERMINISTIC = ("time/", "memory/", "tokens/per_s", "flops/model_per_s", "mfu/", "mbu/", "seconds")
DISK_FULL = "disk full"
FAULTS = ("master", "worker", "everything", "while writing", DISK_FULL, "truncated shard", "files limited")
STEPS, TIMEOUT_S = 8, 900.0
MAX_FREE = 20_000
"""Maximum of the free bytes on a full disk and of the file size limit: less than a shard."""
DISK = "256m"
OWN_NAMESPACE = ("unshare", "--mount", "--propagation", "private")
REWARDS = '''"""Rewards of random text."""


def graded(prompt: str, answer: str, row: dict) -> float:
    """Almost every answer has its own reward."""
    return (answer.count("1") + 2 * answer.count("2") - len(answer) / 4) / 8


def rare(prompt: str, answer: str, row: dict) -> float:
    """All answers to a prompt may have the same reward."""
    return float("1" in answer)
'''


@dataclass(frozen=True)
class Job:
    """A run on ``workers``; ``layouts`` are the options of other layouts, one of which each resume chooses."""

    name: str
    experiment: str
    workers: int
    words: str
    layouts: tuple[str, ...] = ()

    def command(self, root: Path) -> list[str]:
        """Return the command that starts or restarts the run in ``root``."""
        return [*REALHF, "quickstart", self.experiment, f"fileroot={root.parent.parent}", "overwrite=True",
                f"experiment_name={root.parent.name}", f"trial_name={root.name}", "device=cpu",
                f"n_gpus_per_node={self.workers}", "threads_per_worker=1", "startup_timeout=900",
                "heartbeat_timeout=600", "tensorboard.enabled=False", "exp_ctrl.ckpt_freq_steps=1",
                "exp_ctrl.total_train_epochs=9", f"exp_ctrl.total_train_steps={STEPS}", "dataset.train_bs_n_seqs=6",
                *self.words.format(task=root.parents[1] / "task").split()]  # fmt: skip


def scratch(role: str) -> str:
    return (f"{role}.init_from_scratch=True {role}.config={{task}}/model {role}.tokenizer={{task}}/tokenizer "
            f"{role}.optimizer.lr=1e-3 ")  # fmt: skip


SFT = scratch("model") + "dataset.path={task}/sft.jsonl "
GRPO = (scratch("actor") + "dataset.path={task}/train.jsonl ppo.gen.max_new_tokens=10 ppo.group_size=2 "
        "ppo.ppo_n_minibatches=2 ")  # fmt: skip
GRADED = GRPO + "reward.fn={task}/rewards.py:graded "
PPO = GRADED + "critic.init_from_scratch=True critic.config={task}/model ppo.use_adaptive_kl_ctl=True "
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train")


def layout(mode: str, workers: int = 2, generation: int | None = None, training: int | None = None) -> str:
    """Return the options of an allocation; with ``mode=manual``, of generation and training on one worker each."""
    meshes = {call: generation if call == "actor_gen" else training for call in CALLS}
    return " ".join(
        (
            f"n_gpus_per_node={workers} allocation_mode={mode}",
            *(f"{call}.device_mesh={'null' if mesh is None else mesh}" for call, mesh in meshes.items()),
        )
    )


STALE = f"{PPO} max_staleness=2 {layout('manual', generation=0, training=1)}"
OTHER_LAYOUTS = (layout("d1", 1), layout("d2"), layout("t2"), layout("manual", generation=1, training=0))
ROUTED = {"model_type": "qwen3_moe", "num_experts": 300, "num_experts_per_tok": 4, "moe_intermediate_size": 16,
          "norm_topk_prob": True, "mlp_only_layers": [0]}  # fmt: skip
EVALUATED = "dataset.eval_fraction=0.2 exp_ctrl.eval_freq_steps=1 exp_ctrl.save_freq_steps=2 "
MEMBERS = ("1", "2")  # seeds of the reward models
JOBS = (
    Job("sft", "sft", 1, f"{SFT} {EVALUATED} exp_ctrl.keep_best=-eval/loss"),
    Job("sft pp", "sft", 2, f"{SFT} allocation_mode=p2"),
    Job("dpo", "dpo", 1, scratch("actor") + "dataset.path={task}/preferences.jsonl"),
    Job("ppo", "ppo-math", 1, PPO),
    Job("ppo dp", "ppo-math", 2, PPO),
    Job("ppo tp", "ppo-math", 2, f"{PPO} allocation_mode=t2"),
    Job("ppo pp", "ppo-math", 2, f"{PPO} allocation_mode=actor_gen:d2,*:p2"),
    Job("staleness", "ppo-math", 2, STALE),
    Job("staleness, other layouts", "ppo-math", 2,
        f"{STALE} actor.optimizer.lr=1e-4 critic.optimizer.lr=1e-4", OTHER_LAYOUTS),
    Job("grpo", "grpo", 2, GRADED),
    Job("resamples", "grpo", 1, GRPO + "reward.fn={task}/rewards.py:rare ppo.dynamic_sampling=True"),
    Job("best of n, EMA", "ppo-math", 2, f"{PPO} ppo.generation_size=4 ppo.ref_ema_eta=0.1"),
    Job("keep_best", "grpo", 1, f"{GRADED} {EVALUATED} exp_ctrl.keep_best=eval/reward"),
    Job("ensemble", "ppo", 1, PPO.replace("reward.fn={task}/rewards.py:graded", "ensemble.objective=UWO "
        f"ensemble.members=[{','.join(f'{{task}}/member-{seed}/models/model/step_1' for seed in MEMBERS)}]")),
    Job("lora", "grpo", 2, GRADED + "actor.lora.rank=4 actor.lora.dropout=0.1"),
    Job("router replay", "grpo", 2, GRADED.replace("{task}/model", "{task}/routed")
        + "ppo.router_replay=True ppo.recompute_logprobs=True max_staleness=1 allocation_mode=t2"),
    Job("distill, averages", "distill", 1, GRPO + "ppo.distill.prompt={{prompt}} ppo.distill.objective=forward_kl "
        "ppo.distill.top_k=4 ppo.actor_ema_eta=0.3"),
    Job("critic first", "ppo-math", 2, f"{PPO} ppo.value_pretrain_steps=3 ppo.gae_lambda_alpha=0.5"),
    Job("curriculum", "grpo", 2, GRPO + "reward.fn={task}/rewards.py:rare dataset.curriculum.max_pass_rate=0.9 "
        "dataset_filter_threshold=0.5 dataset_max_filter_percentage=0.2"),
    Job("vineppo", "vineppo", 1, f"{GRADED} vine.n_rollouts=2 vine.max_states=2"),
)  # fmt: skip


def make_task(folder: Path) -> None:
    """Write data, a model config, rewards and the members of an ensemble of reward models."""
    size = ("--digits", "1", "--hidden", "32", "--layers", "2", "--sft-rows", "40", "--train-rows", "20",
            "--valid-rows", "5")  # fmt: skip
    task = folder / "task"
    subprocess.run([sys.executable, str(EXAMPLE), str(task), *size], check=True, capture_output=True)
    (task / "rewards.py").write_text(REWARDS)
    dense = json.loads((task / "model" / "config.json").read_text())
    (task / "routed").mkdir()
    (task / "routed" / "config.json").write_text(json.dumps({**dense, **ROUTED}))
    words = (f"{scratch('model')} dataset.path={{task}}/preferences.jsonl dataset.train_bs_n_seqs=6 device=cpu "
             "exp_ctrl.total_train_steps=1 mode=inline tensorboard.enabled=False fileroot={task}/.. "
             "experiment_name=task").format(task=task).split()  # fmt: skip
    for seed in MEMBERS:
        subprocess.run([*REALHF, "quickstart", "rw", *words, f"trial_name=member-{seed}", f"seed={seed}"], check=True,
                       stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)  # fmt: skip


def outputs(root: Path) -> dict[str, bytes]:
    """Return all results that must not depend on faults."""
    lines = {path.name: [json.loads(line) for line in path.read_text().splitlines()]
             for path in root.glob("*.jsonl") if path.name in ("metrics.jsonl", "evaluation.jsonl")}  # fmt: skip
    kept = {name: [{k: v for k, v in line.items() if not k.startswith(NONDETERMINISTIC)} for line in rows]
            for name, rows in lines.items()}  # fmt: skip
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


def processes(root: Path) -> list[int]:
    """Return the worker processes of a run."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").split() if entry.name.isdigit() else []
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
    is_late = rng.random() < 0.7  # start-up takes most of the time
    triggers: dict[str, Callable[[], object]] = {
        **dict.fromkeys(("master", "everything"), lambda: not is_late or has_checkpoint(root)),
        "worker": lambda: processes(root) and (not is_late or has_checkpoint(root)),
        "while writing": lambda: any(root.glob("*/*.unfinished/*")),
        DISK_FULL: lambda: (root / "metrics.jsonl").exists(),
        "files limited": lambda: (root / "metrics.jsonl").exists(),
        "truncated shard": lambda: len(whole_checkpoints(root)) > 1,
    }
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    is_triggered = triggers.get(fault, lambda: True)
    max_delay = (seconds / 8 if is_late else seconds) if fault in ("master", "everything", "worker") else 0.05
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
        for fault in faults[: rng.randint(1, 3)]:
            tally.resumed += has_checkpoint(root)
            if not run_with_fault(continuation(job, root, rng), root, fault, rng, seconds):
                break  # the run has ended
            injected.append(fault)
        if not injected:
            shutil.rmtree(root)
            continue
        faults = faults[len(injected) :]
        tally.faults.update(injected)
        tally.resumed += has_checkpoint(root)
        done = subprocess.run(continuation(job, root, rng), capture_output=True, text=True, timeout=TIMEOUT_S)
        problem = ""
        if done.returncode:
            problem = f"{done.stdout[-500:]}{done.stderr[-1000:]}"
        elif names := differences(expected, outputs(root), is_exact=not job.layouts):
            problem = f"{', '.join(names)} differ"
        line = f"{job.name:<24} x {job.workers}  {', '.join(injected):<45}"
        print(line, problem or f"{'similar' if job.layouts else 'identical'} ({len(expected)} files)", flush=True)
        tally.failures += [f"{line} {problem}"] if problem else []
        shutil.rmtree(root)
    shutil.rmtree(reference.parent)


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
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", default="", help="names of jobs, separated by ';' (default: all)")
    parser.add_argument("--own-namespace", action="store_true", help="internal: this process may mount")
    options = parser.parse_args()
    if not options.own_namespace and not subprocess.run([*OWN_NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode:
        os.execvp(OWN_NAMESPACE[0], [*OWN_NAMESPACE, sys.executable, *sys.argv, "--own-namespace"])
    rng, tally = random.Random(options.seed), Tally(collections.Counter(), 0, [])
    faults = [fault for fault in FAULTS if options.own_namespace or fault != DISK_FULL]
    if DISK_FULL not in faults:
        print(f"skipping '{DISK_FULL}': this user may not mount a tmpfs")
    todo = [job for job in JOBS if not options.jobs or job.name in options.jobs.split(";")]
    with disk(options.own_namespace) as folder:
        make_task(folder)
        for i, job in enumerate(todo):  # each job starts with another fault, so that all faults reach many jobs
            turns = range(options.kills * i // len(todo), options.kills * (i + 1) // len(todo))
            check_job(job, folder, [faults[(turn + i) % len(faults)] for turn in turns], rng, tally)
    kinds = ", ".join(f"{number} {fault}" for fault, number in sorted(tally.faults.items()))
    print(f"{tally.faults.total()} faults ({kinds}); {tally.resumed} launches resumed from a checkpoint; "
          f"{len(tally.failures)} runs with differences (not compared: {', '.join(NONDETERMINISTIC)})")  # fmt: skip
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
