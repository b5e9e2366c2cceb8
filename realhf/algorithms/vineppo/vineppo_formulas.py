"""The formulas of VinePPO: values of the states between an answer's steps, by rollouts; advantages from them.

Kazemnejad et al. 2024, arXiv 2410.01679. An answer has K steps; state k is what stands before step k (0-based).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def step_advantages(values: Sequence[float], reward: float, n_steps: int) -> list[float]:
    """Return ``A_k = r_k + V(s_{k+1}) - V(s_k)`` of ``n_steps`` steps; r is 0 but for the last, V is 0 after it.

    ``values`` are those of the first states. Later ones count as what the answer came to, so that steps beyond them
    have advantage 0. No step has none; ValueError for a value that is not finite.
    """
    if not all(map(math.isfinite, values)):
        raise ValueError(f"state values must be finite, got {list(values)}")
    known = list(values[:n_steps])
    filled = [*known, *[reward] * (n_steps - len(known))]
    after = [*filled[1:], reward][:n_steps]  # V = 0 behind the last step, whose own reward this is
    return [next_value - value for value, next_value in zip(filled, after, strict=True)]


def spread_over_tokens(per_step: Sequence[float], starts: Sequence[int], stop: int, length: int) -> Tensor:
    """Return ``[length]`` float32: every token of a step has its step's number, those outside ``starts[0]:stop`` 0."""
    spans = zip(starts, [*starts[1:], stop], strict=True)
    sizes = torch.tensor([b - a for a, b in spans], dtype=torch.int64)
    inside = torch.tensor(list(per_step), dtype=torch.float32).repeat_interleave(sizes)
    return torch.cat([torch.zeros(starts[0]), inside, torch.zeros(length - stop)])


def step_starts(tokenizer: Any, ids: Sequence[int], split: Callable[[str], list[int]]) -> list[int]:
    """Return the tokens of an answer at which its steps begin; ``split`` finds the steps of its text."""
    pieces = tokenizer.batch_decode([[token] for token in ids])
    if "".join(pieces) != tokenizer.decode(ids):  # characters of several tokens
        texts = [tokenizer.decode(ids[:i]) for i in range(len(ids) + 1)]
        pieces = [after[len(before) :] for before, after in zip(texts, texts[1:], strict=False)]
    return token_starts(pieces, split("".join(pieces)))


def token_starts(pieces: Sequence[str], starts: Sequence[int]) -> list[int]:
    """Return the tokens at which steps begin, ascending: the first whose first character is in the step.

    ``pieces`` are the texts of an answer's tokens, ``starts`` the offsets of its steps. A step without a token of its
    own is none.
    """
    offsets, position = [], 0
    for piece in pieces:
        offsets.append(position)
        position += len(piece)
    found: list[int] = []
    for start in starts:
        token = next((i for i, offset in enumerate(offsets) if offset >= start), None)
        if token is not None and (not found or token > found[-1]):
            found.append(token)
    return found
