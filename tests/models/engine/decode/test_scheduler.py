"""The books of generation, kept along a cache that is played by lists; "prompt" entries are tokens."""

from collections import deque
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.config import GenerationConfig
from realhf.models.engine.decode.scheduler import Prefill, Request, SlotMove, SlotTable, leaders_of, plan_prefill
from tests.models.engine.tiny_engine import prompts_of

LONGEST_ANSWER, STOPS = 5, (1, 2)
NOTHING = ("nothing", 0, 0)


def request_of(lengths: Sequence[int], n: int, budget: int) -> Request:
    numbers = [10 * i + 7 for i in range(len(lengths))]
    return Request(prompts_of(lengths, numbers), GenerationConfig(max_new_tokens=LONGEST_ANSWER), n, 0, STOPS, budget)


class Played:
    """A group of slots with a cache of (row or prompt, position) in place of keys and values."""

    def __init__(self, request: Request, queue: deque[int], n_slots: int, lends: bool = False) -> None:
        self.request, self.slots = request, SlotTable(request, queue, n_slots, lends)
        self.cache: list[list[tuple[str, int, int]]] = [[] for _ in range(n_slots)]

    def turn(self, answers: Sequence[Sequence[int]]) -> None:
        """Check a turn's books, and let every row draw what its answer says next."""
        slots, request = self.slots, self.request
        rows = slots.rows.tolist()
        if slots.prefill is None:
            for slot, position in enumerate(slots.positions.tolist()):
                self.cache[slot][position:] = [("answer", rows[slot], position)]
        else:
            costs = [request.lengths[prompt] for prompt in slots.prefill.prompts]
            assert sum(costs) <= request.max_prefill_tokens or len(costs) == 1
            for prompt, slot in zip(slots.prefill.prompts, slots.prefill.slots, strict=True):
                self.cache[slot] = [("prompt", token, place) for place, token in enumerate(request.ids[prompt])]
            for src, others, length in slots.prefill.copies:
                for slot in others:
                    self.cache[slot] = self.cache[src][:length]
            if slots.lends:  # who borrows a prompt leaves room for it
                for slot in range(slots.n_live - slots.n_drawing, slots.n_live):
                    if slots.holders[slot] != slot:
                        self.cache[slot] = [NOTHING] * request.lengths[rows[slot] // request.n]
        prompts, samples, counts = (counter.tolist() for counter in slots.counters)
        drawing = rows[slots.n_live - slots.n_drawing :]
        assert samples == [row % request.n for row in drawing]
        assert prompts == [request.prompts.ids[row // request.n].prompt for row in drawing]
        tokens = [answers[row][count] for row, count in zip(drawing, counts, strict=True)]
        for move in slots.record(torch.tensor(tokens)):
            there = self.cache[move.dst] + [NOTHING] * move.stop
            self.cache[move.dst] = (
                there[: move.start] + self.cache[move.src][move.start : move.stop] + there[move.stop :]
            )
        self.check_live()

    def check_live(self) -> None:
        """Every live row finds its prompt and all it drew but for the last token, unless it is about to enter."""
        new = self.slots.n_drawing if self.slots.prefill else 0
        for slot, row in enumerate(self.slots.rows.tolist()[: self.slots.n_live - new]):
            start = self.request.lengths[row // self.request.n]
            expected = [("prompt", token, place) for place, token in enumerate(self.request.ids[row // self.request.n])]
            expected += [("answer", row, place) for place in range(start, int(self.slots.positions[slot]))]
            holder = int(self.slots.holders[slot])
            assert holder < self.slots.n_live and (self.slots.lends or holder == slot)
            assert (self.cache[holder][:start] + self.cache[slot][start:])[: len(expected)] == expected


ANSWER = st.lists(st.integers(0, 6), min_size=LONGEST_ANSWER, max_size=LONGEST_ANSWER)


@settings(max_examples=150, deadline=None)
@given(
    st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 20), st.booleans()
)
def test_every_row_is_drawn_to_its_end_in_any_slots(
    data: st.DataObject, lengths: list, n: int, budget: int, lends: bool
) -> None:
    request = request_of(lengths, n, budget)
    answers = data.draw(st.lists(ANSWER, min_size=request.n_rows, max_size=request.n_rows))
    queue = deque(range(request.n_rows))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    groups = [Played(request, queue, size, lends) for size in sizes]
    for _ in range(request.n_rows * LONGEST_ANSWER + len(lengths)):  # more turns than any group needs
        for group in groups:
            if group.slots.n_live:
                group.turn(answers)
    assert not queue and not any(group.slots.n_live for group in groups)
    drawn: dict[int, list[int]] = {row: [] for row in range(request.n_rows)}
    for rows, tokens in (draw for group in groups for draw in group.slots.drawn):
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            drawn[row].append(token)
    for row, answer in enumerate(answers):
        end = next((i for i, token in enumerate(answer) if token in STOPS), LONGEST_ANSWER - 1)
        assert drawn[row] == answer[: end + 1]


def test_rows_enter_by_prompts_within_the_budget() -> None:
    request, queue = request_of([4, 2, 3, 9, 1], 2, budget=6), deque(range(10))
    slots = SlotTable(request, queue, 16)
    assert slots.prefill is not None and slots.prefill.prompts == [1, 0]  # two prompts of six tokens, shortest first
    assert slots.prefill.slots == [2, 0] and slots.prefill.ends == [5, 5, 1, 1]
    assert slots.prefill.copies == [(0, [1], 4), (2, [3], 2)]
    slots.record(torch.tensor([5, 5, 5, 5]))
    assert slots.prefill is not None and slots.prefill.prompts == [2] and slots.n_live == 6
    slots.record(torch.tensor([5, 5]))
    assert slots.prefill is not None and slots.prefill.prompts == [3]  # too long for the budget: alone
    slots.record(torch.tensor([5, 1]))  # the second leaves at once
    assert slots.prefill is not None and slots.prefill.slots == [7] and not queue


def test_a_prompt_is_computed_again_only_for_rows_that_enter_later() -> None:
    assert plan_prefill([3, 4, 5, 6], 2, n=3, texts={0: [1], 1: [2] * 5, 2: [3] * 2}) == Prefill(
        prompts=[2, 1], slots=[5, 2], copies=[(2, [3, 4], 5)], ends=[6, 6, 6, 1], holders=[2, 3, 4, 5]
    )


def test_a_prompt_that_is_lent_lies_in_one_slot() -> None:
    texts = {0: [1], 1: [2] * 5, 2: [2] * 2}
    assert plan_prefill([2, 3, 4, 5, 6, 7], 4, n=3, texts=texts, lends=True) == Prefill(
        prompts=[0, 1], slots=[4, 5], copies=[(5, [8], 2)], ends=[0, 5, 5, 5, 2, 2], holders=[4, 5, 5, 5, 8, 8]
    )


def test_a_lent_prompt_is_handed_on_when_its_holder_leaves() -> None:
    slots = SlotTable(request_of([3, 2], 3, budget=100), deque(range(6)), 6, lends=True)
    assert slots.holders.tolist() == [0, 0, 0, 3, 3, 3]
    assert slots.record(torch.tensor([1, 5, 5, 5, 5, 5])) == [SlotMove(0, 1, 0, 3), SlotMove(5, 0, 2, 2)]
    assert slots.holders.tolist() == [3, 1, 1, 3, 3] and slots.rows.tolist() == [5, 1, 2, 3, 4]
    moves = slots.record(torch.tensor([5, 5, 5, 1, 5]))  # the heir lies in a hole, and the last one moves
    assert moves == [SlotMove(3, 0, 0, 2), SlotMove(4, 3, 2, 3)] and slots.holders.tolist() == [0, 1, 1, 0]


def test_what_another_prompt_begins_with_is_not_computed() -> None:
    texts = {0: [5], 1: [5, 6, 7], 2: [5, 6], 3: [5, 6], 4: [4]}
    assert leaders_of(texts) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 4}
    plan = plan_prefill(range(10), 0, n=2, texts=texts)
    assert plan.prompts == [4, 1] and plan.slots == [8, 2] and plan.ends == [1, 1, 3, 3, 2, 2, 2, 2, 0, 0]
    assert plan.copies == [(2, [0, 1], 1), (2, [3], 3), (2, [4, 5], 2), (2, [6, 7], 2), (8, [9], 1)]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=8))
def test_leaders_lead_themselves(found: list[list[int]]) -> None:
    texts = dict(enumerate(found))
    for number, leader in leaders_of(texts).items():
        text = texts[leader]
        assert text[: len(texts[number])] == texts[number] and leaders_of(texts)[leader] == leader
        assert not any(len(other) > len(text) and other[: len(text)] == text for other in texts.values())


def test_few_free_slots_wait_for_more() -> None:
    queue = deque(range(40))
    slots = SlotTable(request_of([2], 40, budget=100), queue, 20)
    slots.record(torch.full((20,), 5))
    assert slots.prefill is None and slots.n_drawing == 20
    slots.record(torch.tensor([1] * 2 + [5] * 18))
    assert slots.prefill is None and slots.n_drawing == slots.n_live == 18  # an eighth of 20 is more than 2
    slots.record(torch.tensor([1] + [5] * 17))
    assert slots.prefill is not None and slots.n_drawing == 3 and len(queue) == 17
