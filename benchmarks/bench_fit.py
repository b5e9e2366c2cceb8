"""Checks the prediction that a plan fits into memory, near a limit that the kernel enforces (cgroup v1, as root).

    python benchmarks/bench_fit.py --keep FOLDER

uses the models and the profile of bench_estimator.py in FOLDER. Every plan is predicted, then run with each worker in a
control group of ``LIMIT`` bytes; a worker that exceeds it is killed.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from realhf.plan.machines.hardware import read_hardware

REALHF = [sys.executable, "-c", "from realhf.apps.main import console; console()"]
GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 560_000_000


@dataclass(frozen=True)
class Case:
    size: str
    workers: int
    allocation: str
    prompts: int
    new_tokens: int
    tokens_per_mb: int

    def __str__(self) -> str:
        return (f"{self.size:<7} {self.workers} {self.allocation:<22} {self.prompts:>4} prompts, {self.new_tokens:>3} "
                f"new tokens, {self.tokens_per_mb:>5} per micro-batch")  # fmt: skip


CASES = [
    *(Case("middle", 1, "d1", 64, 64, cap) for cap in (512, 1024, 2048, 3072, 4096)),
    *(Case("large", 1, "d1", 64, 48, cap) for cap in (256, 512, 1024, 1536, 2048)),
    *(Case("large", 2, "d2", 96, 48, cap) for cap in (512, 1024, 2048)),
    *(Case("large", 2, "t2", 64, 64, cap) for cap in (1024, 2048, 4096)),
    *(Case("large", 2, "p2", 96, 64, cap) for cap in (512, 1024, 2048)),
    Case("large", 2, "actor_gen:d2,*:d1t2p1", 64, 64, 2048),
]


def options_of(case: Case, folder: Path, root: Path) -> list[str]:
    task = folder / case.size
    caps = [f"{call}.mb_spec.max_tokens_per_mb={case.tokens_per_mb}" for call in
            ("actor_gen", "ref_inf", "critic_inf", "actor_train", "critic_train")]  # fmt: skip
    return ["ppo-math", f"fileroot={root}", "experiment_name=e", "trial_name=t", "device=cpu", "overwrite=True",
            f"actor.config={task / 'model'}", "actor.init_from_scratch=True", f"actor.tokenizer={task / 'tokenizer'}",
            f"dataset.path={task / 'train.jsonl'}", f"dataset.train_bs_n_seqs={case.prompts}",
            f"ppo.gen.max_new_tokens={case.new_tokens}", f"ppo.gen.min_new_tokens={case.new_tokens}",
            "ppo.ppo_n_minibatches=1", f"n_gpus_per_node={case.workers}", "threads_per_worker=1",
            f"allocation_mode={case.allocation}", f"planner.profile={folder / 'profile.json'}",
            "exp_ctrl.total_train_steps=2", "save_roles=[]", "n_logged_generations=0", "tensorboard.enabled=False",
            *caps]  # fmt: skip


def children_of(parents: Collection[int]) -> dict[int, str]:
    """Return the child processes of ``parents``, with their commands."""
    children = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) in parents:
                children[int(entry.name)] = (entry / "cmdline").read_text()
    return children


def confine(process: subprocess.Popen, groups: list[Path]) -> list[int]:
    """Move every new worker into its control group; return the bytes of each that are charged to other groups.

    A page of a library is charged to the group that reads it first. Bytes that a worker maps but that are charged to
    other groups are subtracted from its limit. Judge processes are not part of predictions and run in the root group.
    """
    members: dict[int, Path] = {}
    beyond = dict.fromkeys(groups, 0)
    while process.poll() is None:
        for pid, command in children_of((process.pid,)).items():
            if pid not in members and "realhf.apps.worker" in command:
                members[pid] = groups[len(members)]
                members[pid].joinpath("tasks").write_text(str(pid))
        for pid in children_of(members):
            with contextlib.suppress(OSError):
                (GROUPS / "tasks").write_text(str(pid))
        for pid, group in members.items():
            with contextlib.suppress(OSError):  # the worker has ended, or exceeds the new limit
                others = field(Path(f"/proc/{pid}/status"), "RssFile:") * 1024 - field(
                    group / "memory.stat", "mapped_file"
                )
                if others > beyond[group]:
                    beyond[group] = others
                    (group / "memory.limit_in_bytes").write_text(str(LIMIT - others))
        time.sleep(0.02)
    return list(beyond.values())


def field(path: Path, name: str) -> int:
    """Return a number from a file with lines of ``name number``; 0 if the name is missing (ended processes)."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(line[1]) for line in lines if line[0] == name), 0)


def run(case: Case, folder: Path) -> tuple[float, float, bool]:
    """Return predicted and measured peak in bytes, and True if the run succeeded."""
    root = folder / "fit"
    groups = [GROUPS / f"realhf-fit-{i}" for i in range(case.workers)]
    for group in groups:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
        (group / "memory.max_usage_in_bytes").write_text("0")
    try:
        process = subprocess.Popen([*REALHF, "quickstart", *options_of(case, folder, root), "planner.memory_gb=100"],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        beyond = confine(process, groups)
        output = process.communicate()[0]
        if process.returncode and "SIGKILL" not in output:
            raise SystemExit(output[-3000:])
        usages = [float((group / "memory.max_usage_in_bytes").read_text()) for group in groups]
        peak = max(own + others for own, others in zip(usages, beyond, strict=True))
        expected = json.loads((root / "e" / "t" / "plan.json").read_text())["expected"]
        return expected["peak_bytes"], peak, process.returncode == 0
    finally:
        for group in groups:
            group.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True)
    folder = parser.parse_args().keep
    killed = rejected = 0
    for case in CASES:
        predicted, measured, survived = run(case, folder)
        fits = predicted <= (1.0 - read_hardware("cpu").reserve_fraction) * LIMIT
        killed += fits and not survived
        rejected += survived and not fits
        print(f"{case}: predicted {predicted / 1e6:.0f} MB, used {measured / 1e6:.0f} of {LIMIT / 1e6:.0f} MB: "
              f"{'fits' if fits else 'rejected'}, {'succeeded' if survived else 'killed'}", flush=True)  # fmt: skip
    print(f"{len(CASES)} plans: {killed} predicted to fit were killed, {rejected} that fit would have been rejected")


if __name__ == "__main__":
    main()
