"""Asynchronous GRPO (rollout one step ahead of training) against synchronous GRPO, on two workers.

    python benchmarks/bench_ahead.py [--steps N]

GRPO without a reference model on the arithmetic task, from the initial model of experiments/algorithms: worker 0
generates, worker 1 scores and trains. Prints the median step time of both, their ratio, the accuracy of the first and
last steps, and the overlap of generation with training in the trace.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "algorithms"))
from study import call, directory, initial_model

APART = ("n_gpus_per_node=2", "allocation_mode=manual", "actor_gen.device_mesh=0", "rew_inf.device_mesh=1",
         "actor_train.device_mesh=1", "ppo.kl_in=none", "actor.optimizer.lr=3e-4", "dataset.train_bs_n_seqs=64",
         "actor.optimizer.lr_scheduler_type=constant", "ppo.gen.max_new_tokens=32",
         "exp_ctrl.total_train_epochs=9")  # fmt: skip


def overlap(trace: Path) -> float:
    """Return the fraction of worker 0's generation time during which worker 1 trains."""
    spans = json.loads(trace.read_text().rstrip().rstrip(",").rstrip("]").rstrip().rstrip(",") + "]")
    wanted = {("actor_gen/Compute", 0), ("actor_train/Compute", 1)}
    intervals: dict[str, list[tuple[int, int]]] = {"actor_gen/Compute": [], "actor_train/Compute": []}
    for span in spans:
        if (span["name"], span["pid"]) in wanted:
            intervals[span["name"]].append((span["ts"], span["ts"] + span["dur"]))
    generation, training = intervals["actor_gen/Compute"], intervals["actor_train/Compute"]
    common = sum(max(0, min(b, d) - max(a, c)) for a, b in generation for c, d in training)
    return common / sum(stop - start for start, stop in generation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    seconds = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = initial_model(folder)
        for name, staleness in (("synchronous", 0), ("one_step_ahead", 1)):
            call("quickstart", "grpo", *directory(folder, name), *APART, f"dataset.path={folder}/task/train.jsonl",
                 f"actor.path={start}", f"max_staleness={staleness}",
                 f"exp_ctrl.total_train_steps={steps}")  # fmt: skip
            lines = [json.loads(line) for line in (folder / "study" / name / "metrics.jsonl").read_text().splitlines()]
            seconds[name] = median(line["time/step_s"] for line in lines[2:])
            first, last = (mean(line["rew_inf/accuracy"] for line in some) for some in (lines[:5], lines[-5:]))
            shared = 100 * overlap(folder / "study" / name / "trace.json")
            print(f"{name:<14} {seconds[name]:.3f} s per step, accuracy {first:.3f} -> {last:.3f}, "
                  f"{shared:.0f}% of generation overlaps training")  # fmt: skip
    print(f"speed-up of running ahead: {seconds['synchronous'] / seconds['one_step_ahead']:.2f}")


if __name__ == "__main__":
    main()
