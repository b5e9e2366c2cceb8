"""Pairs of responses: from the rows of a batch, and from sampled responses."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from realhf.api.batch_meta import RowId


@dataclass(frozen=True)
class Pairs:
    """Row indices: ``better[i]`` is preferred to ``worse[i]``. The ``weights`` of a prompt's pairs add up to 1."""

    better: list[int]
    worse: list[int]
    weights: list[float]


def pairs_of(ids: Sequence[RowId]) -> Pairs:
    """Return the chosen (samples 2i of a prompt) and rejected rows (samples 2i+1); ValueError for an unpaired row."""
    row_of = {row: i for i, row in enumerate(ids)}
    per_prompt = Counter(row.prompt for row in ids)
    for row in ids:
        if row._replace(sample=row.sample ^ 1) not in row_of:
            raise ValueError(f"sample {row.sample} of prompt {row.prompt} has no pair: pairs are samples 2i and 2i+1")
    chosen = [row for row in ids if row.sample % 2 == 0]
    rejected = [row_of[row._replace(sample=row.sample + 1)] for row in chosen]
    return Pairs([row_of[row] for row in chosen], rejected, [2.0 / per_prompt[row.prompt] for row in chosen])


def ranked_pairs(ids: Sequence[RowId]) -> Pairs:
    """Return all pairs of responses to a prompt; lower sample numbers are better."""
    prompts: dict[int, list[int]] = {}
    for i in sorted(range(len(ids)), key=lambda i: ids[i].sample):
        prompts.setdefault(ids[i].prompt, []).append(i)
    pairs = [list(combinations(rows, 2)) for rows in prompts.values()]
    better, worse = ([pair[side] for own in pairs for pair in own] for side in (0, 1))
    return Pairs(better, worse, [1.0 / len(own) for own in pairs for _ in own])


def build_pairs(right: Sequence[bool], max_pairs: int, seed: int) -> list[tuple[int, int]]:
    """Return pairs (index of a right response, index of a wrong one) of the responses to a prompt.

    All combinations, or ``max_pairs`` of them, sampled without replacement (Pang et al. 2024, arXiv 2404.19733,
    sec. 2). ValueError unless ``max_pairs`` is positive.
    """
    if max_pairs < 1:
        raise ValueError(f"max_pairs must be positive, got {max_pairs}")
    good, bad = ([i for i, is_right in enumerate(right) if bool(is_right) is side] for side in (True, False))
    n = len(good) * len(bad)
    picks = sorted(random.Random(seed).sample(range(n), max_pairs)) if n > max_pairs else range(n)
    return [(good[k // len(bad)], bad[k % len(bad)]) for k in picks]
