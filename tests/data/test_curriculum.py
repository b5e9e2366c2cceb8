"""The choice of rows: epochs, bands, the permanent filter, sources, and a state that continues exactly."""

import json
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.curriculum import CurriculumRules, PromptResult, normalised_weights, source_names
from realhf.data.curriculum import (
    Curriculum,
    CurriculumState,
    draw_sources,
    filtered_rows,
    next_source,
    rows_outside,
)
from realhf.data.order import rows_at
from realhf.plan.train_schedule import TrainSchedule, make_train_schedule
from tests.scaling import examples

LAG = 2
RATES = st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=1, max_size=30)


def result(prompt: int, row: int, step: int = 0) -> PromptResult:
    """Four responses, of which ``row + step`` modulo five pass."""
    n_passed = (row + step) % 5
    return PromptResult(prompt, (1.0,) * n_passed + (-1.0,) * (4 - n_passed))


def build(rules: CurriculumRules, sizes: tuple[int, ...], schedule: TrainSchedule, **options: object) -> Curriculum:
    given_options = {"seed": 3, "shuffle": True, "lag": LAG} | options
    return Curriculum(rules, sizes, schedule, **given_options)  # type: ignore[arg-type]


def run_steps(curriculum: Curriculum, start: int, stop: int) -> list[tuple[tuple[int, ...], dict[str, float]]]:
    """Run steps as a master does that fetches each step's rows ``LAG - 1`` steps ahead."""
    done = []
    for step in range(start, stop):
        for ahead in range(step, min(step + LAG, curriculum.schedule.n_steps)):
            curriculum.rows(curriculum.schedule.span(ahead))
        span = curriculum.schedule.span(step)
        rows = curriculum.rows(span)
        curriculum.record(step, [result(span.start + i, row, step) for i, row in enumerate(rows)])
        done.append((rows, curriculum.finish(step)))
    return done


def rows_of_steps(curriculum: Curriculum, n_steps: int) -> list[int]:
    return [row for rows, _ in run_steps(curriculum, 0, n_steps) for row in rows]


@settings(max_examples=examples(50))
@given(st.integers(0, 2**40), st.integers(1, 30), st.data(), st.booleans())
def test_the_first_rows_are_those_of_the_plain_order(seed: int, n: int, data: st.DataObject, shuffle: bool) -> None:
    batch = data.draw(st.integers(1, n))
    schedule = make_train_schedule(batch, n, epochs=3, max_steps=None)
    rules = CurriculumRules(band=(0.1, 0.9))
    chosen = build(rules, (n,), schedule, seed=seed, shuffle=shuffle)
    rows = [row for step in range(schedule.n_steps) for row in chosen.rows(schedule.span(step))]
    assert rows == rows_at(seed, n, 0, schedule.n_prompts, shuffle)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(1, 300))
def test_sources_have_their_exact_share_at_every_prompt(weights: list[int], n: int) -> None:
    """No number of prompts deviates from its share by more than Tijdeman's bound, which is less than 1."""
    total, counts = sum(weights), Counter[int]()
    shares, debts = [weight / total for weight in weights], [0.0] * len(weights)
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else 0
    for i, source in enumerate(draw_sources(shares, debts, n), 1):
        counts[source] += 1
        for k, weight in enumerate(weights):
            assert abs(counts[k] - Fraction(weight * i, total)) <= bound + Fraction(1, 10**6)
    assert all(debts[k] == 0 or weights[k] for k in range(len(weights)))


def test_proportions_over_windows_are_exact() -> None:
    drawn = draw_sources([0.5, 0.3, 0.2], [0.0] * 3, 100)
    assert all(Counter(drawn[i : i + 10]) == {0: 5, 1: 3, 2: 2} for i in range(0, 100, 10))
    assert next_source([0.0, 1.0], [5.0, 1.0]) == 1, "a weight of 0 takes no prompts, even after another weight"


@settings(max_examples=examples(100))
@given(RATES, st.floats(0, 1), st.floats(0, 1), st.integers(0, 30))
def test_prompts_outside_the_band_are_left_out_nearest_last(rates: list[float], a: float, b: float, least: int) -> None:
    band, order = (min(a, b), max(a, b)), range(len(rates))
    known = dict(enumerate(rates))
    outside = {row for row, rate in known.items() if not band[0] <= rate <= band[1]}
    left_out = rows_outside(order, known, band, least)
    n_left = min(len(outside), max(0, len(rates) - least))
    assert left_out <= outside and len(left_out) == n_left

    def distance(row: int) -> float:
        return max(band[0] - known[row], known[row] - band[1])

    assert all(distance(out) >= distance(kept) for out in left_out for kept in outside - left_out)
    assert rows_outside(order, {}, band, least) == set(), "unseen prompts stay"


@settings(max_examples=examples(200))
@given(
    st.dictionaries(st.integers(0, 40), st.floats(-5, 5, allow_nan=False), max_size=30),
    st.floats(-5, 5, allow_nan=False),
    st.integers(-2, 30),
)
def test_the_filter_is_that_of_the_predecessor(means: dict[int, float], threshold: float, limit: int) -> None:
    """Brute force: take the highest mean above the threshold again and again."""
    rest, expected = dict(means), list[int]()
    while len(expected) < limit and (above := {row: mean for row, mean in rest.items() if mean > threshold}):
        highest = min(row for row, mean in above.items() if mean == max(above.values()))
        expected.append(highest)
        del rest[highest]
    assert filtered_rows(means, threshold, limit) == expected


@settings(max_examples=examples(50))
@given(st.integers(2, 30), st.integers(1, 8), st.integers(0, 20), st.sampled_from([-0.5, 0.0, 100.0]))
def test_filtered_prompts_do_not_return(n: int, batch: int, twentieths: int, threshold: float) -> None:
    """At most the share leaves before an epoch, and a batch of prompts always remains."""
    schedule, share = make_train_schedule(min(batch, n), n, epochs=6, max_steps=None), twentieths / 20
    rules = CurriculumRules(band=(0.0, 0.99), filter_threshold=threshold, max_filtered=share, recheck_epochs=1)
    chosen, before = build(rules, (n,), schedule), set[int]()
    for step in range(schedule.n_steps):
        epoch = chosen.state(0).sources[0].epoch
        span = schedule.span(step)
        rows = chosen.rows(span)
        state = chosen.state(0)
        left = set(state.filtered) - before
        n_epochs = state.sources[0].epoch - epoch
        assert before <= set(state.filtered) and len(left) <= n_epochs * (n - len(before)) * Fraction(twentieths, 20)
        assert not set(rows) & before, "a row that has left is not chosen"
        before = set(state.filtered)
        chosen.record(step, [result(span.start + i, row, step) for i, row in enumerate(rows)])
        metrics = chosen.finish(step)
        assert int(metrics["prompts/filtered"]) <= n - schedule.batch_size
    assert not before or (share > 0 and threshold < 1)


@settings(max_examples=examples(50))
@given(st.integers(1, 25), st.data(), st.integers(0, 3), st.tuples(st.integers(0, 4), st.integers(0, 4)))
def test_every_epoch_has_its_active_rows_once(n: int, data: st.DataObject, recheck: int, ends: tuple[int, int]) -> None:
    batch = data.draw(st.integers(1, n))
    schedule = make_train_schedule(batch, n, epochs=5, max_steps=None)
    band = (min(ends) / 4, max(ends) / 4)
    chosen = build(CurriculumRules(band=band, recheck_epochs=recheck), (n,), schedule)
    rest: list[int] = []
    for step, (rows, metrics) in enumerate(run_steps(chosen, 0, schedule.n_steps)):
        assert metrics.get("prompts/active", n) >= batch
        assert len(rows) == schedule.span(step).stop - schedule.span(step).start
        rest += rows
    first, others = rest[:n], rest[n:]
    assert sorted(first) == [*range(n)]
    assert all(len(set(others[i : i + batch])) >= batch / 2 for i in range(0, len(others) - batch, batch))


def epochs_of(recheck: int) -> list[int]:
    """Return the rows of 21 steps with one of five prompts each, of which prompts 0 and 4 pass never and always."""
    schedule = make_train_schedule(1, 5, epochs=5, max_steps=None)
    chosen = build(CurriculumRules(band=(0.25, 0.75), recheck_epochs=recheck), (5,), schedule, shuffle=False, lag=1)
    rows = list[int]()
    for step in range(21):
        rows += chosen.rows(schedule.span(step))
        chosen.record(step, [result(step, rows[-1])])
        chosen.finish(step)
    return rows


def test_a_prompt_outside_the_band_is_tried_again() -> None:
    every, inside = [0, 1, 2, 3, 4], [1, 2, 3]
    assert epochs_of(recheck=1) == [*every, *inside, *every, *inside, *every]
    assert epochs_of(recheck=2) == [*every, *inside, *inside, *every, *inside, 1, 2]
    assert epochs_of(recheck=0) == [*every, *inside, *inside, *inside, *inside, *inside, 1]


def test_results_of_recent_steps_are_not_used_even_if_they_are_known() -> None:
    """With a lag of 2, the last prompt of an epoch is in the next one."""
    schedule = make_train_schedule(1, 3, epochs=4, max_steps=None)
    early = build(CurriculumRules(band=(0.5, 1.0)), (3,), schedule, shuffle=False)
    late = build(CurriculumRules(band=(0.5, 1.0)), (3,), schedule, shuffle=False)
    rows = list[tuple[int, ...]]()
    for step in range(8):
        rows.append(early.rows(schedule.span(step)))
        assert late.rows(schedule.span(step)) == rows[-1]
        early.record(step, [PromptResult(step, (-1.0,))])
        if step:  # the other one learns of each result a step later
            late.record(step - 1, [PromptResult(step - 1, (-1.0,))])
            late.finish(step - 1)
        early.finish(step)


def test_a_pass_is_decided_by_the_verifier_or_by_the_reward() -> None:
    schedule = make_train_schedule(3, 3, epochs=1, max_steps=None)
    chosen = build(CurriculumRules(band=(0.1, 0.9), pass_reward=0.5), (3,), schedule)
    chosen.rows(schedule.span(0))
    chosen.record(0, [PromptResult(0, (0.5, 0.6)), PromptResult(1, (0.1, 0.1), n_right=2), PromptResult(2, (9.0,), 0)])
    metrics = chosen.finish(0)
    assert metrics["prompts/pass_rate"] == 0.5
    assert (metrics["prompts/all_right"], metrics["prompts/all_wrong"]) == (1 / 3, 1 / 3)


def test_a_prompt_that_a_step_samples_twice_has_one_result() -> None:
    schedule = make_train_schedule(1, 1, epochs=2, max_steps=None, resamples=1)
    chosen = build(CurriculumRules(band=(0.1, 0.9)), (1,), schedule, lag=1)
    assert chosen.rows(replace(schedule.span(0), stop=2)) == (0, 0)
    chosen.record(0, [PromptResult(1, (1.0, 4.0, -1.0)), PromptResult(0, (-1.0,))])
    assert chosen.finish(0)["prompts/pass_rate"] == 0.5
    chosen.rows(schedule.span(1))
    ((_, _, n, n_passed, mean),) = chosen.state(1).memory
    assert (n, n_passed, mean) == (4, 2, 0.75)


RICH = CurriculumRules(
    band=(0.0, 1.0), final_band=(0.2, 0.8), recheck_epochs=1, filter_threshold=0.4, max_filtered=0.2,
    names=("easy", "hard"), weights=(3.0, 1.0), final_weights=(0.0, 1.0), ramp_steps=12, is_sorted=True,
)  # fmt: skip


@settings(max_examples=examples(50))
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2), st.integers(2, 4), st.data())
def test_a_state_continues_exactly(a: int, b: int, batch: int, resamples: int, lag: int, data: st.DataObject) -> None:
    """A run that is resumed at any step from JSON has the rows and metrics of the run that goes on."""
    batch = min(batch, a + b)
    schedule = make_train_schedule(batch, a + b, epochs=6, max_steps=None, resamples=resamples)
    straight = build(RICH, (a, b), schedule, lag=lag)
    expected = run_steps(straight, 0, schedule.n_steps)
    cut = data.draw(st.integers(0, schedule.n_steps))
    first = build(RICH, (a, b), schedule, lag=lag)
    run_steps(first, 0, cut)
    stored = json.loads(json.dumps(msgspec.to_builtins(first.state(cut))))
    state = msgspec.convert(stored, CurriculumState)
    resumed = build(RICH, (a, b), replace(schedule, first_step=cut), lag=lag, state=state)
    assert run_steps(resumed, cut, schedule.n_steps) == expected[cut:]
    assert resumed.state(schedule.n_steps) == straight.state(schedule.n_steps)


@given(st.lists(st.floats(0, sys.float_info.max), min_size=1, max_size=5).filter(any))
def test_shares_of_any_weights(weights: list[float]) -> None:
    """Also of weights whose sum is infinite, or that are as small as numbers can be."""
    shares = normalised_weights(weights)
    assert sum(shares) == pytest.approx(1) and max(shares) == shares[weights.index(max(weights))] > 0


def test_weights_move_to_the_final_ones() -> None:
    schedule = make_train_schedule(4, 40, epochs=4, max_steps=None)
    rules = CurriculumRules(names=("a", "b"), weights=(3, 1), final_weights=(0, 2), ramp_steps=20)
    done = run_steps(build(rules, (20, 20), schedule), 0, schedule.n_steps)
    shares = [metrics["prompts/source_a"] for _, metrics in done]
    assert shares[0] == 0.75 and shares[21:] == [0.0] * 19 and sum(shares[:20]) * 4 == 32
    assert all(metrics["prompts/source_a"] + metrics["prompts/source_b"] == 1 for _, metrics in done)
    assert {key for key in done[0][1] if "source" not in key} == set(), "no rewards are read"


def test_a_source_of_weight_0_is_not_active() -> None:
    schedule = make_train_schedule(2, 9, epochs=2, max_steps=None, resamples=1)
    chosen = build(CurriculumRules(names=("a", "b"), weights=(0, 1), band=(0.0, 0.6)), (5, 4), schedule)
    for rows, metrics in run_steps(chosen, 0, schedule.n_steps):
        assert min(rows) >= 5 and metrics["prompts/source_a"] == 0 and 2 <= metrics["prompts/active"] <= 4
        assert metrics["prompts/active"] + metrics["prompts/left_out"] == 4
    assert metrics["prompts/unseen"] == 5


def test_sources_without_weights_are_mixed_by_size() -> None:
    """All sources end their epochs together."""
    schedule = make_train_schedule(6, 12, epochs=3, max_steps=None)
    rows = rows_of_steps(build(CurriculumRules(names=("a", "b", "c")), (6, 4, 2), schedule), 6)
    assert all(sorted(rows[i : i + 12]) == [*range(12)] for i in range(0, 36, 12))
    assert len({tuple(rows[i : i + 12]) for i in range(0, 36, 12)}) == 3


def test_the_first_epoch_may_be_sorted() -> None:
    schedule = make_train_schedule(4, 12, epochs=2, max_steps=None)
    rows = rows_of_steps(build(CurriculumRules(is_sorted=True), (12,), schedule), 6)
    assert rows[:12] == [*range(12)] and rows[12:] != [*range(12)] and sorted(rows[12:]) == [*range(12)]


def test_resampled_prompts_are_other_active_ones() -> None:
    schedule = make_train_schedule(3, 12, epochs=4, max_steps=None, resamples=2)
    chosen = build(CurriculumRules(band=(0.5, 1.0), recheck_epochs=0), (12,), schedule)
    for step in range(schedule.n_steps):
        span = schedule.span(step)
        own = chosen.rows(span)
        more = chosen.rows(replace(span, start=span.stop, stop=span.stop + 6))
        left_out = {row for source in chosen.state(step).sources for row in source.left_out}
        assert len(more) == 6 and not set(more) & left_out
        assert not set(more) & set(own) or len(left_out) > 9
        chosen.record(step, [result(span.start + i, row) for i, row in enumerate(own + more)])
        metrics = chosen.finish(step)
    assert metrics["prompts/left_out"] > 0


def test_a_longer_schedule_completes_the_last_step() -> None:
    """A checkpoint may have chosen the rows of a last, smaller step that is no longer the last."""
    short = make_train_schedule(3, 7, epochs=1, max_steps=None, resamples=1)
    first = build(CurriculumRules(is_sorted=True), (7,), short)
    (done,) = run_steps(first, 0, 1)
    run_steps(first, 1, 2)
    longer = replace(make_train_schedule(3, 7, epochs=2, max_steps=None, resamples=1), first_step=2)
    resumed = build(CurriculumRules(is_sorted=True), (7,), longer, state=first.state(2))
    rows = [row for rows, _ in run_steps(resumed, 2, longer.n_steps) for row in rows]
    assert done[0] == (0, 1, 2) and rows[0] == 6 and sorted(rows[1:]) == [*range(7)]


def test_a_state_of_other_rows_is_dropped() -> None:
    schedule = make_train_schedule(2, 6, epochs=3, max_steps=None)
    first = build(CurriculumRules(band=(0.5, 1.0)), (6,), schedule)
    run_steps(first, 0, 4)
    later = replace(make_train_schedule(2, 4, epochs=3, max_steps=None), first_step=4)
    resumed = build(CurriculumRules(band=(0.5, 1.0)), (4,), later, state=first.state(4))
    ((rows, metrics),) = run_steps(resumed, 4, 5)
    assert set(rows) <= {*range(4)} and metrics["prompts/unseen"] == 2


def test_names_of_sources() -> None:
    assert source_names(["/data/gsm8k.jsonl", "math.v2.parquet", "ORG/NAME@abc:main:train"]) == (
        "gsm8k",
        "math",
        "NAME",
    )
    assert source_names(["a/train.jsonl", "b/train.jsonl", "c/"]) == ("train_0", "train_1", "c")
