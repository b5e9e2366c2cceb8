"""A user-defined reward function: 1 for a right final number, minus a length penalty.

    realhf quickstart ppo-math reward.fn=examples/custom_reward.py:reward dataset.path=train.jsonl actor.path=my_model

The function runs in a judge process with a timeout (reward.timeout), not in a worker. ``row`` is the row of the dataset
with all its keys. An exception counts as a failed judge.
"""


def reward(prompt: str, answer: str, row: dict) -> float:
    """Return a score in [0.1, 1] for a right number, 0 for a wrong one."""
    wanted = row["solutions"][0].rpartition("####")[2].strip()
    given = answer.rpartition("####")[2].strip()
    return max(0.1, 1.0 - len(answer) / 2000) if given == wanted else 0.0
