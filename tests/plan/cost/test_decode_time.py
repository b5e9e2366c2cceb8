"""Which rows decode together and for how long: by hand, and against a simulation step by step."""

from itertools import pairwise
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.cost.decode_time import CacheReads, DecodeSpan, decode_schedule
from realhf.plan.lengths import LogNormalLengths, representative_lengths
from tests.scaling import examples

PADDED, OWN, SHARED = CacheReads


def step_by_step(
    prompts: list[int], responses: list[int], n_slots: int, reads: CacheReads
) -> tuple[int, int, float, list[int]]:
    """Return decoding steps, row steps, tokens read, and rows per prefill, by the rules of the engine's scheduler."""
    n, queue, live = len(responses) // len(prompts), list(range(len(responses))), list[list[int]]()  # row, sampled
    steps, row_steps, read, admitted = 0, 0, 0.0, list[int]()
    while queue or live:
        free = n_slots - len(live)
        if queue and (free * 8 >= n_slots or free >= len(queue)):
            new, queue = queue[:free], queue[free:]
            admitted.append(len(new))
            live += [[row, 1] for row in new]
        else:
            steps, row_steps = steps + 1, row_steps + len(live)
            lengths = {row: prompts[row // n] + sampled for row, sampled in live}
            if reads is PADDED:
                read += len(live) * max(lengths.values())
            elif reads is OWN:
                read += sum(lengths.values())
            else:
                read += sum(sampled for _, sampled in live) + sum(prompts[p] for p in {row // n for row, _ in live})
            live = [[row, sampled + 1] for row, sampled in live]
        live = [one for one in live if one[1] < responses[one[0]]]
    return steps, row_steps, read, admitted


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from([*CacheReads]))
def test_spans_sum_up_to_the_steps_of_the_engine(data: st.DataObject, reads: CacheReads) -> None:
    prompts = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    n = data.draw(st.integers(1, 4))
    responses = data.draw(st.lists(st.integers(1, 40), min_size=n * len(prompts), max_size=n * len(prompts)))
    n_slots = data.draw(st.integers(1, len(responses)))
    found = decode_schedule(tuple(prompts), tuple(responses), n_slots, reads)
    steps, row_steps, read, admitted = step_by_step(prompts, responses, n_slots, reads)
    assert found.n_steps == steps and [n_rows for _, n_rows in found.prefills] == admitted
    assert sum(span.steps * span.rows for span in found.spans) == pytest.approx(row_steps)
    # a span reads half a step more per row than its first step, as it is priced at its middle
    middle = sum(span.steps * span.rows * span.context for span in found.spans)
    assert middle == pytest.approx(read + row_steps / 2)


def test_a_schedule_by_hand() -> None:
    """Two slots, prompts of 4 and 6 with responses of 3 and 9 tokens, and of 5 and 5: the third row fills slot one."""
    found = decode_schedule((4, 6), (3, 9, 5, 5), 2, OWN)
    assert found.prefills == (((4,), 2), ((6,), 1), ((6,), 1))
    # rows end at steps 2, 8, 2 + 4, 6 + 4
    assert [(span.steps, span.rows) for span in found.spans] == [(2, 2.0), (4, 2.0), (2, 2.0), (2, 1.0)]
    assert found.spans[0].context == 4 + 1 + 1
    assert found.spans[1].context == ((4 + 3) + (6 + 1)) / 2 + 2
    assert decode_schedule((4, 6), (3, 9, 5, 5), 2, PADDED).spans[2] == DecodeSpan(2, 2.0, 4 + 7 + 1)
    assert decode_schedule((4,), (3, 9), 2, SHARED).spans == (DecodeSpan(2, 2.0, 2 + 1 + 1), DecodeSpan(6, 1.0, 10.0))


def test_a_long_tail_decodes_few_rows_for_many_steps() -> None:
    """Of 64 log-normal lengths of mean 100, the longest takes as many steps as its length less one."""
    lengths = representative_lengths(LogNormalLengths(100, 0.7), 64, 10_000)
    found = decode_schedule((10,) * 64, lengths, 64, OWN)
    normal = NormalDist()
    longest = 64 * 100 * normal.cdf(0.7 - normal.inv_cdf(1 - 1 / 64))  # the mean of the longest 64th
    assert found.n_steps == max(lengths) - 1 == pytest.approx(longest - 1, abs=0.6)
    same = decode_schedule((10,) * 64, (100,) * 64, 64, OWN)
    assert same.n_steps == 99 and found.n_steps > 3.5 * same.n_steps
    few = sum(span.steps for span in found.spans if span.rows <= 8)
    assert few > same.n_steps  # longer than all of the same mean


def test_many_rows_are_priced_in_few_spans() -> None:
    lengths = representative_lengths(LogNormalLengths(900, 0.7), 4096, 8192)
    found = decode_schedule((100,) * 4096, lengths, 256, OWN)
    assert len(found.spans) < 1200
    for now, then in pairwise(found.spans):  # about a 32nd of the rows ends in a span
        assert then.rows >= 0.94 * now.rows or now.rows < 64
    steps, row_steps, read, admitted = step_by_step([100] * 512, list(lengths[:512]), 100, OWN)
    found = decode_schedule((100,) * 512, lengths[:512], 100, OWN)
    assert [n_rows for _, n_rows in found.prefills] == admitted
    assert found.n_steps == steps
    assert sum(span.steps * span.rows for span in found.spans) == pytest.approx(row_steps)
    assert sum(span.steps * span.rows * span.context for span in found.spans) == pytest.approx(read, rel=0.002)
