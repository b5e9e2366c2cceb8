"""Generated rows as text, for the generations file and the console."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

from torch import Tensor

Decode = Callable[[list[int]], Any]


def text_fields(tokens: Tensor, prompt_mask: Tensor, turn_rewards: Tensor | None, decode: Decode) -> dict[str, Any]:
    """Return ``prompt``, ``response`` and ``answer_tokens`` of a row, and the ``turns`` of an episode.

    The prompt ends at the first sampled token. ``answer_tokens`` counts sampled tokens. A turn is of the ``model`` or
    of the ``environment``; the reward that followed a turn of the model is in it.
    """
    mask, ids = prompt_mask.tolist(), tokens.tolist()
    n_prompt = mask.index(0) if 0 in mask else len(mask)
    fields: dict[str, Any] = {
        "prompt": decode(ids[:n_prompt]),
        "response": decode(ids[n_prompt:]),
        "answer_tokens": len(mask) - sum(mask),
    }
    if turn_rewards is None:
        return fields
    rewards, turns, start = turn_rewards.tolist(), [], n_prompt
    for is_environment, group in groupby(mask[n_prompt:]):
        stop = start + len(list(group))
        turn: dict[str, Any] = {"role": "environment" if is_environment else "model", "text": decode(ids[start:stop])}
        turns.append(turn if is_environment else {**turn, "reward": sum(rewards[start:stop])})
        start = stop
    return {**fields, "turns": turns}
