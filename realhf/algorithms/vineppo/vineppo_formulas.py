"""The formulas of VinePPO: advantages of steps from Monte Carlo values of the states between them.

Kazemnejad et al. 2024, arXiv 2410.01679. A response has K steps; state k precedes step k (0-based).
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def step_advantages(values: Sequence[float], reward: float, n_steps: int) -> list[float]:
    """Return ``A_k = r_k + V(s_{k+1}) - V(s_k)`` for ``n_steps`` steps; only the last r is not 0, and V is 0 after it.

    ``values`` belong to the first states. The value of later states is ``reward``, so that steps between them have
    advantage 0. ValueError for a value that is not finite.
    """
    if not all(map(math.isfinite, values)):
        raise ValueError(f"state values must be finite, got {list(values)}")
    known = list(values[:n_steps])
    filled = [*known, *[reward] * (n_steps - len(known))]
    after = [*filled[1:], reward][:n_steps]  # the last step has V = 0 and r = reward
    return [next_value - value for value, next_value in zip(filled, after, strict=True)]


def spread_over_tokens(per_step: Sequence[float], starts: Sequence[int], stop: int, length: int) -> Tensor:
    """Return each step's value at all of its tokens, ``[length]`` float32; 0 outside of ``starts[0]:stop``."""
    spans = zip(starts, [*starts[1:], stop], strict=True)
    sizes = torch.tensor([b - a for a, b in spans], dtype=torch.int64)
    inside = torch.tensor(list(per_step), dtype=torch.float32).repeat_interleave(sizes)
    return torch.cat([torch.zeros(starts[0]), inside, torch.zeros(length - stop)])


def step_starts(tokenizer: Any, ids: Sequence[int], split: Callable[[str], list[int]]) -> list[int]:
    """Return the first tokens of the steps of a response; ``split`` returns the offsets of the steps of a text."""
    texts = tokenizer.batch_decode([[token] for token in ids])
    if "".join(texts) != tokenizer.decode(ids):  # a character can consist of several tokens
        prefixes = [tokenizer.decode(ids[:i]) for i in range(len(ids) + 1)]
        texts = [after[len(before) :] for before, after in zip(prefixes, prefixes[1:], strict=False)]
    return token_starts(texts, split("".join(texts)))


def token_starts(texts: Sequence[str], starts: Sequence[int]) -> list[int]:
    """Return the first token of each step, ascending: the first token whose first character is in the step.

    ``texts`` are the texts of the tokens, ``starts`` the character offsets of steps. Steps in which no token begins are
    dropped.
    """
    offsets = [0, *accumulate(map(len, texts))][:-1]
    tokens: list[int] = []
    for start in starts:
        token = next((i for i, offset in enumerate(offsets) if offset >= start), None)
        if token is not None and (not tokens or token > tokens[-1]):
            tokens.append(token)
    return tokens
