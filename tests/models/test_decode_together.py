"""Several tokens of a row in one decoding step are the same bits as one token per step."""

import random

import pytest
import torch
from torch import Tensor

from realhf.models.kv_cache import KVCache
from realhf.models.transformer import Transformer
from tests.models.test_fused_decode import CACHED, CONFIGS, N_SLOTS, filled, model_of, pytestmark  # noqa: F401
from tests.scaling import subset


def tokens_of(slot: int, n: int, model: Transformer) -> Tensor:
    return (torch.arange(n) * 7 + slot * 3) % model.config.vocab


def one_by_one(model: Transformer, rows: dict[int, int]) -> tuple[dict[int, Tensor], KVCache]:
    """Return the hidden states of ``rows[slot]`` tokens after those in the cache of each slot."""
    cache, found = filled(model), dict[int, list[Tensor]]()
    slots = range(max(rows) + 1)  # the first slots, without gaps: others repeat their last token
    with torch.no_grad():
        for step in range(max(rows.values())):
            n = [min(step, rows.get(slot, 1) - 1) for slot in slots]
            tokens = torch.stack([tokens_of(slot, n[slot] + 1, model)[n[slot]] for slot in slots])
            hidden = model.decode(tokens, torch.tensor([CACHED[slot] + n[slot] for slot in slots]), cache)
            for slot, count in rows.items():
                if step < count:
                    found.setdefault(slot, []).append(hidden[slot])
    return {slot: torch.stack(some) for slot, some in found.items()}, cache


def together(model: Transformer, rows: dict[int, int]) -> tuple[dict[int, Tensor], KVCache]:
    cache, counts = filled(model), list(rows.values())
    tokens = torch.cat([tokens_of(slot, count, model) for slot, count in rows.items()])
    positions = torch.cat([CACHED[slot] + torch.arange(count) for slot, count in rows.items()])
    slots = torch.tensor(list(rows)).repeat_interleave(torch.tensor(counts))
    with torch.no_grad():
        hidden = model.decode(tokens, positions, cache, slots=slots)
    return dict(zip(rows, hidden.split(counts), strict=True)), cache


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", subset(list(CONFIGS), 6))
def test_tokens_together_are_those_of_single_steps(name: str, threads: int) -> None:
    model, chance = model_of(CONFIGS[name]), random.Random(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for most in (1, 4, 25):
            slots = chance.sample(range(len(CACHED)), chance.randint(1, len(CACHED)))
            rows = {slot: chance.randint(1, most) for slot in slots}
            (found, cache), (expected, other) = together(model, rows), one_by_one(model, rows)
            for slot, count in rows.items():
                stop = CACHED[slot] + count
                assert torch.equal(found[slot], expected[slot]), (slot, rows)
                assert torch.equal(cache.k[:, slot, :, :stop], other.k[:, slot, :, :stop])
                assert torch.equal(cache.v[:, slot, :, :stop], other.v[:, slot, :, :stop])
    finally:
        torch.set_num_threads(before)


def test_more_rows_than_slots_and_than_one_pass_over_the_weights() -> None:
    model = model_of(CONFIGS["llama"])
    rows = {slot: 25 for slot in range(len(CACHED)) if CACHED[slot] + 25 < 96}
    assert sum(rows.values()) > 256 > N_SLOTS
    found, expected = together(model, rows)[0], one_by_one(model, rows)[0]
    assert all(torch.equal(found[slot], expected[slot]) for slot in rows)


@pytest.mark.parametrize(
    "slots, positions",
    [([0, 1, 0], [0, 0, 1]), ([0, 0], [3, 5]), ([0, 0], [3, 3]), ([0, 0], [3, 2]), ([N_SLOTS], [0]), ([-1], [0])],
)
def test_rows_that_do_not_follow_each_other_are_refused(slots: list[int], positions: list[int]) -> None:
    model = model_of(CONFIGS["llama"])
    with pytest.raises(RuntimeError, match="decode_blocks: "), torch.no_grad():
        given = torch.tensor(slots), torch.tensor(positions)
        model.decode(torch.zeros_like(given[0]), given[1], filled(model), slots=given[0], longest=96)
