"""Group-wise rewards by name: functions of all responses to a prompt, and the checks of ``reward.group_fn``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realhf.rewards.registry import check_file, is_remote

GroupFn = Callable[[str, Sequence[str], dict], Sequence[float]]  # fn(prompt, responses, row)


@dataclass(frozen=True)
class GroupPreset:
    """A group-wise reward with scores in [0, 1].

    ``load`` returns its function, which runs in a judge process; it is None for a preset that asks a language model.
    ``compares`` is True if the score of a response depends on the others.
    """

    load: Callable[[], GroupFn] | None
    compares: bool
    doc: str


def _self_consistency() -> GroupFn:
    from realhf.rewards.group.self_consistency import self_consistency

    return self_consistency


def _diversity() -> GroupFn:
    from realhf.rewards.group.diversity import diversity

    return diversity


GROUP_PRESETS: dict[str, GroupPreset] = {  # by the name in `reward.group_fn`
    "self_consistency": GroupPreset(
        _self_consistency, True,
        "share of the responses with the same final answer (arXiv 2203.11171); 0 without an answer",
    ),
    "diversity": GroupPreset(_diversity, True, "1 - mean similarity to the other responses, by their n-grams"),
    "pairwise": GroupPreset(None, True, "share of comparisons won by a language model's verdict (arXiv 2306.05685)"),
    "rubric": GroupPreset(None, False, "score by a language model, by the criteria of a rubric (arXiv 2507.17746)"),
}  # fmt: skip


def asks_model(group_fn: str) -> bool:
    return group_fn in GROUP_PRESETS and GROUP_PRESETS[group_fn].load is None


def compares(group_fn: str) -> bool:
    """Return True if scores depend on the other responses; a user's function may."""
    return group_fn not in GROUP_PRESETS or GROUP_PRESETS[group_fn].compares


def check_group_fn(group_fn: str) -> list[str]:
    """Return the problems of a ``reward.group_fn``, one line each, without running the file."""
    if group_fn in GROUP_PRESETS:
        return []
    if is_remote(group_fn):
        return [f"reward.group_fn={group_fn!r}: services judge single responses; set reward.fn"]
    return check_file("reward.group_fn", group_fn, list(GROUP_PRESETS), "prompt, responses and row")
