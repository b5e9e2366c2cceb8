"""The slot scheduler, with a cache simulated by lists."""

from collections import deque
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.config import GenerationConfig
from realhf.models.engine.decode.scheduler import Prefill, Request, SlotTable, find_leaders, plan_prefill
from tests.models.engine.tiny_engine import prompts_of
from tests.scaling import examples

MAX_RESPONSE, STOPS = 5, (1, 2)
EMPTY = ("empty", 0, 0)


def request_of(lengths: Sequence[int], n: int, budget: int, keep_first: int | None = None) -> Request:
    numbers = [10 * i + 7 for i in range(len(lengths))]
    config = GenerationConfig(max_new_tokens=MAX_RESPONSE, keep_first=keep_first)
    return Request(prompts_of(lengths, numbers), config, n, 0, STOPS, budget)


class SimulatedGroup:
    """A group of slots whose cache has (kind, token or row, position) entries instead of keys and values."""

    def __init__(self, request: Request, queue: deque[int], n_slots: int, shares_prefix: bool = False) -> None:
        self.request, self.slots = request, SlotTable(request, queue, n_slots, shares_prefix)
        self.cache: list[list[tuple[str, int, int]]] = [[] for _ in range(n_slots)]

    def turn(self, responses: Sequence[Sequence[int]]) -> None:
        """Check a turn's state, and let every row sample the next token of its response."""
        slots, request = self.slots, self.request
        rows = slots.rows.tolist()
        if slots.prefill is None:
            for slot, position in enumerate(slots.positions.tolist()):
                self.cache[slot][position:] = [("response", rows[slot], position)]
        else:
            costs = [request.lengths[prompt] for prompt in slots.prefill.prompts]
            assert sum(costs) <= request.max_prefill_tokens or len(costs) == 1
            for prompt, slot in zip(slots.prefill.prompts, slots.prefill.slots, strict=True):
                self.cache[slot] = [
                    ("prompt", token, place) for place, token in enumerate(request.prompt_tokens[prompt])
                ]
            for src, others, length in slots.prefill.copies:
                for slot in others:
                    self.cache[slot] = self.cache[src][:length]
            if slots.shares_prefix:  # rows that do not own their prompt leave space for it
                for slot in range(slots.n_live - slots.n_sampling, slots.n_live):
                    if slots.owners[slot] != slot:
                        self.cache[slot] = [EMPTY] * request.lengths[rows[slot] // request.n]
        prompts, samples, counts = (counter.tolist() for counter in slots.counters)
        sampling = rows[slots.n_live - slots.n_sampling :]
        assert samples == [row % request.n for row in sampling]
        assert prompts == [request.prompts.ids[row // request.n].prompt for row in sampling]
        tokens = [responses[row][count] for row, count in zip(sampling, counts, strict=True)]
        for src, dst, start, stop in slots.record(torch.tensor(tokens)):
            target = self.cache[dst] + [EMPTY] * stop
            self.cache[dst] = target[:start] + self.cache[src][start:stop] + target[stop:]
        self.check_live()

    def check_live(self) -> None:
        """Check that the cache has every live row's prompt and sampled tokens except the last, unless just admitted."""
        new = self.slots.n_sampling if self.slots.prefill else 0
        for slot, row in enumerate(self.slots.rows.tolist()[: self.slots.n_live - new]):
            start = self.request.lengths[row // self.request.n]
            expected = [
                ("prompt", token, place)
                for place, token in enumerate(self.request.prompt_tokens[row // self.request.n])
            ]
            expected += [("response", row, place) for place in range(start, int(self.slots.positions[slot]))]
            owner = int(self.slots.owners[slot])
            assert owner < self.slots.n_live and (self.slots.shares_prefix or owner == slot)
            assert (self.cache[owner][:start] + self.cache[slot][start:])[: len(expected)] == expected


RESPONSE = st.lists(st.integers(0, 6), min_size=MAX_RESPONSE, max_size=MAX_RESPONSE)


@settings(max_examples=examples(150))
@given(
    st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 20), st.booleans()
)
def test_every_row_is_sampled_to_its_end_in_any_slots(
    data: st.DataObject, lengths: list, n: int, budget: int, shares_prefix: bool
) -> None:
    request = request_of(lengths, n, budget)
    responses = data.draw(st.lists(RESPONSE, min_size=request.n_rows, max_size=request.n_rows))
    queue = deque(range(request.n_rows))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    groups = [SimulatedGroup(request, queue, size, shares_prefix) for size in sizes]
    for _ in range(request.n_rows * MAX_RESPONSE + len(lengths)):  # an upper bound of the number of turns
        for group in groups:
            if group.slots.n_live:
                group.turn(responses)
    assert not queue and not any(group.slots.n_live for group in groups)
    sampled: dict[int, list[int]] = {row: [] for row in range(request.n_rows)}
    for rows, tokens in (turn for group in groups for turn in group.slots.sampled):
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            sampled[row].append(token)
    for row, response in enumerate(responses):
        end = next((i for i, token in enumerate(response) if token in STOPS), MAX_RESPONSE - 1)
        assert sampled[row] == response[: end + 1]


@settings(max_examples=examples(150))
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_rows_are_cancelled_as_soon_as_enough_of_their_prompt_have_ended(
    data: st.DataObject, n_prompts: int, n: int, shares_prefix: bool
) -> None:
    """With a slot for every row they are as long as the last row that is kept; with fewer slots not shorter."""
    kept = data.draw(st.integers(1, n))
    request = request_of([3] * n_prompts, n, 100, kept)
    responses = data.draw(st.lists(RESPONSE, min_size=request.n_rows, max_size=request.n_rows))
    ends = [next((i for i, t in enumerate(row) if t in STOPS), MAX_RESPONSE - 1) + 1 for row in responses]
    n_slots = data.draw(st.integers(1, request.n_rows))
    group = SimulatedGroup(request, deque(range(request.n_rows)), n_slots, shares_prefix)
    while group.slots.n_live:
        group.turn(responses)
    counts = torch.cat([rows for rows, _ in group.slots.sampled]).bincount().tolist()
    cancelled = set(group.slots.cancelled)
    assert len(cancelled) == len(group.slots.cancelled)
    for start in range(0, request.n_rows, n):
        rows = range(start, start + n)
        last = sorted(ends[row] for row in rows)[kept - 1]
        for row in rows:
            assert counts[row] < ends[row] if row in cancelled else counts[row] == ends[row]
            assert row not in cancelled or counts[row] >= last
            assert n_slots < request.n_rows or counts[row] == min(ends[row], last)


def test_rows_are_admitted_within_the_prefill_budget() -> None:
    request, queue = request_of([4, 2, 3, 9, 1], 2, budget=6), deque(range(10))
    slots = SlotTable(request, queue, 16)
    assert slots.prefill is not None and slots.prefill.prompts == [1, 0]  # two prompts of six tokens, shortest first
    assert slots.prefill.slots == [2, 0] and slots.prefill.ends == [5, 5, 1, 1]
    assert slots.prefill.copies == [(0, [1], 4), (2, [3], 2)]
    slots.record(torch.tensor([5, 5, 5, 5]))
    assert slots.prefill is not None and slots.prefill.prompts == [2] and slots.n_live == 6
    slots.record(torch.tensor([5, 5]))
    assert slots.prefill is not None and slots.prefill.prompts == [3]  # longer than the budget: in its own prefill
    slots.record(torch.tensor([5, 1]))  # the second is evicted at once
    assert slots.prefill is not None and slots.prefill.slots == [7] and not queue


def test_a_prompt_is_computed_once_per_prefill() -> None:
    assert plan_prefill([3, 4, 5, 6], 2, n=3, prompts={0: [1], 1: [2] * 5, 2: [3] * 2}) == Prefill(
        prompts=[2, 1], slots=[5, 2], copies=[(2, [3, 4], 5)], ends=[6, 6, 6, 1], owners=[2, 3, 4, 5]
    )


def test_a_shared_prompt_is_stored_in_one_slot() -> None:
    prompts = {0: [1], 1: [2] * 5, 2: [2] * 2}
    assert plan_prefill([2, 3, 4, 5, 6, 7], 4, n=3, prompts=prompts, shares_prefix=True) == Prefill(
        prompts=[0, 1], slots=[4, 5], copies=[(5, [8], 2)], ends=[0, 5, 5, 5, 2, 2], owners=[4, 5, 5, 5, 8, 8]
    )


def test_a_shared_prompt_moves_to_a_new_owner() -> None:
    slots = SlotTable(request_of([3, 2], 3, budget=100), deque(range(6)), 6, shares_prefix=True)
    assert slots.owners.tolist() == [0, 0, 0, 3, 3, 3]
    assert slots.record(torch.tensor([1, 5, 5, 5, 5, 5])) == [(0, 1, 0, 3), (5, 0, 2, 2)]
    assert slots.owners.tolist() == [3, 1, 1, 3, 3] and slots.rows.tolist() == [5, 1, 2, 3, 4]
    moves = slots.record(torch.tensor([5, 5, 5, 1, 5]))  # the new owner is in a freed slot, and the last row moves
    assert moves == [(3, 0, 0, 2), (4, 3, 2, 3)] and slots.owners.tolist() == [0, 1, 1, 0]


def test_a_prefix_of_another_prompt_is_not_computed() -> None:
    prompts = {0: [5], 1: [5, 6, 7], 2: [5, 6], 3: [5, 6], 4: [4]}
    assert find_leaders(prompts) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 4}
    plan = plan_prefill(range(10), 0, n=2, prompts=prompts)
    assert plan.prompts == [4, 1] and plan.slots == [8, 2] and plan.ends == [1, 1, 3, 3, 2, 2, 2, 2, 0, 0]
    assert plan.copies == [(2, [0, 1], 1), (2, [3], 3), (2, [4, 5], 2), (2, [6, 7], 2), (8, [9], 1)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=8))
def test_leaders_are_their_own_leaders(token_lists: list[list[int]]) -> None:
    prompts = dict(enumerate(token_lists))
    for number, leader in find_leaders(prompts).items():
        tokens = prompts[leader]
        assert tokens[: len(prompts[number])] == prompts[number] and find_leaders(prompts)[leader] == leader
        assert not any(len(other) > len(tokens) and other[: len(tokens)] == tokens for other in prompts.values())


def test_admission_waits_for_enough_free_slots() -> None:
    queue = deque(range(40))
    slots = SlotTable(request_of([2], 40, budget=100), queue, 20)
    slots.record(torch.full((20,), 5))
    assert slots.prefill is None and slots.n_sampling == 20
    slots.record(torch.tensor([1] * 2 + [5] * 18))
    assert slots.prefill is None and slots.n_sampling == slots.n_live == 18  # an eighth of 20 is more than 2
    slots.record(torch.tensor([1] + [5] * 17))
    assert slots.prefill is not None and slots.n_sampling == 3 and len(queue) == 17
