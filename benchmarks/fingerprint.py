"""Fingerprint five runs: SHA-256 of their final weights and of their metrics without timings.

    python benchmarks/fingerprint.py [--checkout DIR] [--rename OLD=NEW ...] [--only NAME,...]

A change that keeps the numerics keeps every fingerprint. Run the script once with ``--checkout`` pointing at a worktree
of the commit before the change and once without, on the same machine. ``--rename`` gives the metrics of the checkout
their new names, with or without the call in front (``mismatch=logprob_diff``).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMINGS = ("time/", "memory/", "tokens/per_s", "flops/model_per_s", "predicted/", "limit/", "mfu/", "mbu/")
LEARN = ("actor.optimizer.lr=5e-4", "actor.optimizer.lr_scheduler_type=constant", "critic.optimizer.lr=1e-3",
         "ppo.gen.max_new_tokens=32", "dataset.train_bs_n_seqs=32", "exp_ctrl.total_train_epochs=9",
         "ppo.ppo_n_minibatches=2")  # fmt: skip


def call(checkout: Path, *words: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "realhf", *words], env=env, cwd=checkout, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"realhf {' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def start_models(checkout: Path, out: Path) -> None:
    """Run the demo, then train three reward models for the ensemble."""
    call(checkout, "demo", "--dir", str(out))
    task = out / "task"
    for member in range(3):
        call(checkout, "quickstart", "rw", *directory(out, f"rw{member}"), f"seed={member + 1}",
             f"dataset.path={task}/preferences.jsonl", f"model.path={sft_model(out)}",
             "model.init_critic_from_actor=True", "dataset.train_bs_n_seqs=32",
             "exp_ctrl.total_train_steps=6", "model.optimizer.lr=1e-3")  # fmt: skip


def sft_model(out: Path) -> Path:
    return out / "demo" / "sft" / "models" / "model" / "step_90"


def directory(out: Path, name: str) -> tuple[str, ...]:
    return (f"fileroot={out}", "experiment_name=demo", f"trial_name={name}", "device=cpu", "threads_per_worker=1",
            "tensorboard.enabled=False")  # fmt: skip


def experiments(out: Path) -> dict[str, tuple[str, ...]]:
    """Return the options of every run but the demo's, with the experiment in front."""
    actor, data = f"actor.path={sft_model(out)}", f"dataset.path={out}/task/train.jsonl"
    members = ",".join(str(out / "demo" / f"rw{i}" / "models" / "model" / "step_6") for i in range(3))
    return {
        "grpo-resamples-d2": ("grpo", actor, data, *LEARN, "n_gpus_per_node=2", "ppo.group_size=4",
                            "ppo.dynamic_sampling=True", "exp_ctrl.total_train_steps=8"),
        "ppo-ensemble-d1t2": ("ppo", actor, data, *LEARN, "n_gpus_per_node=2", "allocation_mode=d1t2",
                              "ppo.group_size=2", f"ensemble.members=[{members}]", "ensemble.objective=UWO",
                              "exp_ctrl.total_train_steps=6"),
        "dpo": ("dpo", f"actor.path={sft_model(out)}", f"dataset.path={out}/task/preferences.jsonl",
                "dataset.train_bs_n_seqs=32", "actor.optimizer.lr=1e-4", "exp_ctrl.total_train_steps=10"),
        "vineppo": ("vineppo", actor, data, *LEARN, "vine.n_rollouts=3", "vine.max_states=4",
                    "exp_ctrl.total_train_steps=5"),
    }  # fmt: skip


def fingerprint(run: Path, renamed: dict[str, str]) -> dict[str, str]:
    """Return the hashes of one run's last models and of its metrics."""
    last = max((int(p.name.removeprefix("step_")) for p in run.glob("models/*/step_*")), default=0)
    found = {}
    for file in sorted(run.glob(f"models/*/step_{last}/*.safetensors")):
        found[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {new_name(key, renamed): value for key, value in line.items() if not key.startswith(TIMINGS)} for line in lines
    ]
    found["metrics.jsonl"] = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    return found


def new_name(key: str, renamed: dict[str, str]) -> str:
    call, _, metric = key.rpartition("/")
    return renamed.get(key) or (f"{call}/{renamed[metric]}" if metric in renamed else key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--only", default="", help="names of runs, separated by commas")
    parser.add_argument("--out", type=Path, help="keep the runs in this directory")
    args = parser.parse_args()
    renamed = dict(word.split("=") for word in args.rename)
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).resolve()
        if not (out / "demo" / "rw2" / "models").exists():
            start_models(args.checkout.resolve(), out)
        runs = {"demo": ()} | experiments(out)
        for name, words in runs.items():
            if args.only and name not in args.only.split(","):
                continue
            run = out / "demo" / (name if words else "ppo-math")
            if words and not run.exists():
                call(args.checkout.resolve(), "quickstart", words[0], *directory(out, name), *words[1:])
            print(json.dumps({name: fingerprint(run, renamed)}, indent=2), flush=True)


if __name__ == "__main__":
    main()
