"""Overlap of calls on two workers: PPO whose rollout is ahead of training, or in parts, against whole steps in order.

    python benchmarks/bench_overlap.py [--steps N] [--rounds N] [--hidden N]

Worker 0 samples and trains the actor; worker 1 has verifier, reference and critic. ``in K parts`` divides the rollout
(``actor_gen.prompts_per_call``); ``one step ahead`` has ``max_staleness=1`` and the actor's training on worker 1.
Prints medians over the steps of all rounds, in which the variants take turns, and the largest difference of a metric of
training between whole steps and parts.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))
from experiments.sums import make_task, metrics, run

PROMPTS = 32
TOGETHER = "allocation_mode='actor_gen:d1@0,actor_train:d1@0,*:d1@1'"
APART = "allocation_mode='actor_gen:d1@0,*:d1@1'"
VARIANTS = {
    "whole": (TOGETHER,),
    "in 2 parts": (TOGETHER, f"actor_gen.prompts_per_call={PROMPTS // 2}"),
    "in 4 parts": (TOGETHER, f"actor_gen.prompts_per_call={PROMPTS // 4}"),
    "one step ahead": (APART, "max_staleness=1"),
}
RESULTS = ("actor_train/grad_norm", "critic_train/grad_norm", "rew_inf/reward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    differences = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = make_task(folder, args.hidden)
        options = [f"dataset.path={task}/train.jsonl", "actor.init_from_scratch=True", f"actor.config={task}/model",
                   f"actor.tokenizer={task}/tokenizer", f"dataset.train_bs_n_seqs={PROMPTS}", "ppo.group_size=4",
                   "ppo.gen.max_new_tokens=64", "exp_ctrl.total_train_epochs=100", "n_gpus_per_node=2",
                   f"exp_ctrl.total_train_steps={args.steps}"]  # fmt: skip
        for number in range(args.rounds):
            lines = {name: metrics(run(folder, f"{name.replace(' ', '_')}-{number}", "ppo-math", *options, *more))
                     for name, more in VARIANTS.items()}  # fmt: skip
            for name, steps in lines.items():
                seconds[name] += [line["time/step_s"] for line in steps[2:]]
            differences += [abs(ours[key] - line[key]) / (1e-6 + abs(line[key])) for key in RESULTS
                            for name in VARIANTS if "parts" in name
                            for ours, line in zip(lines[name], lines["whole"], strict=True)]  # fmt: skip
    whole = median(seconds["whole"])
    for name, some in seconds.items():
        print(f"{name:<16} {median(some):.3f} s per step, {whole / median(some):.2f} times as fast")
    print(f"largest relative difference of {', '.join(RESULTS)} in parts: {max(differences):.1e}")


if __name__ == "__main__":
    main()
