"""Quality of values of intermediate states: the critic and nine rollouts against the means of 256 rollouts."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from experiments.sums import run
from realhf.experiments.restem import read_generations

N_STATES, N_STEPS, N_TRUTH, N_ROLLOUTS, N_DRAWS = 200, 4, 256, 9, 200
SPREAD = 0.1
"""States count whose best and worst next step differ by at least this in the share of right rollouts."""


@dataclass(frozen=True)
class State:
    """A prompt with the steps so far, and the state after each of some next steps."""

    solutions: list[str]
    nexts: list[str]


def sample(folder: Path, name: str, policy: Path, rows: Sequence[dict], n: int, seed: int) -> list[list[dict]]:
    """Return ``n`` sampled responses to every row's prompt, with rewards 0 or 1."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({**row, "query_id": f"q{i}"}) + "\n" for i, row in enumerate(rows)))
    root = run(folder, name, "gen", f"model.path={policy}", f"dataset.path={file}", "dataset.shuffle=False",
               f"dataset.train_bs_n_seqs={min(len(rows), 50)}", "judge=True", f"sampling.n={n}",
               "sampling.max_new_tokens=32", "n_logged_generations=-1", f"seed={seed}")  # fmt: skip
    found: list[list[dict]] = [[] for _ in rows]
    for row in read_generations(root):
        found[int(row["fields"]["query_id"][1:])].append(row)
    return found


def make_states(folder: Path, name: str, policy: Path, problems: Sequence[dict], seed: int) -> list[State]:
    """Return states after a number of sampled lines, each with several distinct sampled next lines."""
    chance, states = random.Random(seed), []
    first = sample(folder, f"{name}-first", policy, problems, 1, seed)
    prefixes = []
    for problem, (response, *_) in zip(problems, first, strict=True):
        lines = response["response"].split("\n")
        kept = chance.randrange(max(1, len(lines) - 1))
        steps = "".join(f"{line}\n" for line in lines[:kept])
        prefixes.append({"prompt": problem["prompt"] + steps, "solutions": problem["solutions"]})
    following = sample(folder, f"{name}-next", policy, prefixes, 16, seed + 1)
    for prefix, responses in zip(prefixes, following, strict=True):
        lines = sorted({line for row in responses if (line := row["response"].split("\n")[0]) and "#" not in line})
        if len(lines) >= 2:
            picked = chance.sample(lines, min(N_STEPS, len(lines)))
            states.append(State(prefix["solutions"], [f"{prefix['prompt']}{line}\n" for line in picked]))
    return states


def rollouts(folder: Path, name: str, policy: Path, states: Sequence[State], seed: int) -> list[list[list[float]]]:
    """Return the rewards of the rollouts of every next step of every state."""
    rows = [{"prompt": text, "solutions": state.solutions} for state in states for text in state.nexts]
    found = iter(sample(folder, name, policy, rows, N_TRUTH, seed))
    return [[[float(row["rewards"]) for row in next(found)] for _ in state.nexts] for state in states]


def critic_values(critic: Path, states: Sequence[State]) -> list[list[float]]:
    """Return the critic's values after every next step, up to its normalisation of values."""
    model = AutoModelForSequenceClassification.from_pretrained(critic, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(critic)
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        return [[float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in state.nexts]
                for state in states]  # fmt: skip


def top1(values: Sequence[Sequence[float]], truth: Sequence[Sequence[float]]) -> float:
    """Return the share of states whose highest value is at a best next step."""
    picked = (max(range(len(own)), key=own.__getitem__) for own in values)
    return fmean(true[i] == max(true) for i, true in zip(picked, truth, strict=True))


@dataclass(frozen=True)
class Quality:
    """Shares of states in which a best next step was picked: of chance, the critic, and nine rollouts."""

    chance: float
    critic: float
    monte_carlo: float
    n_states: int


def quality(
    folder: Path, name: str, policy: Path, critic: Path, problems: Sequence[dict], seed: int
) -> dict[str, float]:
    """Return the fields of ``Quality``; nine rollouts are drawn from others than those of the truth."""
    states = make_states(folder, name, policy, problems, seed)
    rewards = rollouts(folder, f"{name}-rollouts", policy, states, seed + 2)
    values = critic_values(critic, states)
    half = N_TRUTH // 2
    truth = [[fmean(some[half:]) for some in one] for one in rewards]
    kept = [i for i, one in enumerate(truth) if max(one) - min(one) >= SPREAD][:N_STATES]
    truth, values, rewards = [truth[i] for i in kept], [values[i] for i in kept], [rewards[i] for i in kept]
    chance = random.Random(seed)
    drawn = [top1([[fmean(chance.sample(some[:half], N_ROLLOUTS)) + 1e-6 * chance.random() for some in one]
                   for one in rewards], truth) for _ in range(N_DRAWS)]  # fmt: skip
    guess = fmean(sum(value == max(one) for value in one) / len(one) for one in truth)
    return asdict(Quality(guess, top1(values, truth), fmean(drawn), len(kept)))
