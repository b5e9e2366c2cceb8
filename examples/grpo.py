"""GRPO with a reward function, from Python: ``python examples/arithmetic.py TASK``, then ``examples/grpo.py TASK``."""

import sys

from realhf import run

task = sys.argv[1]


def reward(prompt: str, answer: str, row: dict) -> float:
    """Return how many digits of the sum, such as 07 for "3+4=", are right."""
    return sum(map(str.__eq__, answer, f"{sum(map(int, prompt.rstrip('=').split('+'))):02}")) / 2


training = run(
    "grpo",
    actor={"init_from_scratch": True, "config": f"{task}/model", "tokenizer": f"{task}/tokenizer"},
    dataset={"path": [{"prompt": f"{a}+{b}="} for a in range(8) for b in range(8)], "train_bs_n_seqs": 16},
    ppo={"group_size": 4, "gen": {"max_new_tokens": 8}},
    reward=reward,
    wait=False,
)
for metrics in training:
    print(f"step {metrics['step']}: reward {metrics['reward/mean']:.3f}")
print(training.model_path, training.report())
