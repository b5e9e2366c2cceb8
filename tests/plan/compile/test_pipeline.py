"""Pipeline schedules, executed by simulated stages."""

from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.compile.pipeline import (
    Advance,
    Backward,
    ExpectTokens,
    Forward,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    SendTokens,
    StageStep,
    generation_schedule,
    inference_schedule,
    max_in_flight,
    train_schedule,
)
from tests.scaling import examples

N_STEPS = 4
Message = tuple[str, int, int]  # content, micro-batch, destination: a chunk of layers of the model; of tokens a stage


def awaited(step: StageStep, stage: int, n_stages: int) -> Message | None:
    match step:
        case RecvActivation(i, chunk):
            return "activation", i, chunk * n_stages + stage
        case RecvGradient(i, chunk):
            return "gradient", i, chunk * n_stages + stage
        case Advance(i):
            return "tokens", i, stage
    return None


def sent(step: StageStep, stage: int, n_stages: int) -> list[Message]:
    match step:
        case SendActivation(i, chunk):
            return [("activation", i, chunk * n_stages + stage + 1)]
        case SendGradient(i, chunk):
            return [("gradient", i, chunk * n_stages + stage - 1)]
        case SendTokens(i):
            return [("tokens", i, other) for other in range(n_stages - 1)]
        case Forward(i) if stage == n_stages - 1:
            return [("tokens", i, stage)]
    return []


def play(schedules: Sequence[Sequence[StageStep]]) -> list[list[int]]:
    """Execute schedules until all stages are done or deadlocked; return the start times of forward passes by stage.

    A forward or backward pass takes one unit of time, a message none.
    """
    todo, now = [deque(steps) for steps in schedules], [0] * len(schedules)
    messages: dict[Message | None, deque[int]] = defaultdict(deque, {None: deque()})
    starts: list[list[int]] = [[] for _ in schedules]
    while any(todo):
        waiting_for = {stage: awaited(steps[0], stage, len(todo)) for stage, steps in enumerate(todo) if steps}
        ready = {stage: message for stage, message in waiting_for.items() if message is None or messages[message]}
        assert ready, f"deadlock: {waiting_for}"
        for stage, message in ready.items():
            step = todo[stage].popleft()
            if message is not None:
                now[stage] = max(now[stage], messages[message].popleft())
            if isinstance(step, Forward):
                starts[stage].append(now[stage])
            now[stage] += isinstance(step, Forward | Backward)
            for message_out in sent(step, stage, len(schedules)):
                messages[message_out].append(now[stage])
    return starts


Pipelines = st.tuples(st.integers(2, 8), st.integers(1, 4), st.integers(0, 40))  # stages, chunks, micro-batches


def interleaved(train: bool, n_stages: int, n_chunks: int, n: int) -> list[tuple[StageStep, ...]]:
    schedule = train_schedule if train else inference_schedule
    return [schedule(stage, n_stages, n, n_chunks) for stage in range(n_stages)]


@settings(max_examples=examples(60))
@given(Pipelines, st.booleans())
def test_messages_of_a_pair_have_the_same_order_at_both_ends(pipeline: tuple[int, int, int], train: bool) -> None:
    schedules = interleaved(train, *pipeline)
    n_stages = len(schedules)
    posted: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for stage, steps in enumerate(schedules):
        for step in steps:
            for message in sent(step, stage, n_stages):
                if message[0] != "tokens":
                    posted[stage, message[2] % n_stages].append(message)
            if message := awaited(step, stage, n_stages):
                source = (stage + (1 if message[0] == "gradient" else -1)) % n_stages
                received[source, stage].append(message)
    assert posted == received
    assert sum(map(len, posted.values())) == (1 + train) * pipeline[2] * (n_stages * pipeline[1] - 1)


@settings(max_examples=examples(60))
@given(Pipelines)
def test_every_pass_of_a_chunk_is_made_once_and_activations_are_limited(pipeline: tuple[int, int, int]) -> None:
    n_stages, n_chunks, n_micro = pipeline
    schedules = interleaved(True, *pipeline)
    play(schedules)
    for stage, steps in enumerate(schedules):
        passes = [(i, chunk) for chunk in range(n_chunks) for i in range(n_micro)]
        for kind in (Forward, Backward):
            assert sorted((s.micro_batch, s.chunk) for s in steps if isinstance(s, kind)) == sorted(passes)
        held, most = set[tuple[int, int]](), 0
        for step in steps:
            if isinstance(step, Forward):
                held.add((step.micro_batch, step.chunk))
            elif isinstance(step, Backward):
                held.remove((step.micro_batch, step.chunk))  # its forward pass was before
            most = max(most, len(held))
        # Narayanan et al. 2021: (n_stages - stage - 1) * 2 + (n_chunks - 1) * n_stages ahead, then one in turn
        assert most == min(max_in_flight(stage, n_stages, n_chunks), n_micro * n_chunks) or n_micro % n_stages
        assert most <= min(max_in_flight(stage, n_stages, n_chunks), n_micro * n_chunks)
        if n_chunks > 1:
            assert max_in_flight(stage, n_stages, n_chunks) == (n_stages - stage) * 2 + (n_chunks - 1) * n_stages - 1
        last_passes = [s.chunk for s in steps if isinstance(s, Backward) and s.micro_batch == n_micro - 1]
        assert last_passes == [*reversed(range(n_chunks))] or n_micro == 0


def blocks(schedules: Sequence[Sequence[StageStep]], most_sends: int) -> bool:
    """Return True if stages block one another where each may have ``most_sends`` messages that are not received.

    A stage with more of them makes no step until the oldest has been received.
    """
    n_stages, at = len(schedules), [0] * len(schedules)
    in_flight: list[deque[Message]] = [deque() for _ in schedules]
    received = set[Message]()
    progressed = True
    while progressed:
        progressed = False
        for stage, steps in enumerate(schedules):
            while at[stage] < len(steps):
                while in_flight[stage] and in_flight[stage][0] in received:
                    in_flight[stage].popleft()
                step = steps[at[stage]]
                message, source = awaited(step, stage, n_stages), -1
                if message is not None:
                    source = (stage + (1 if message[0] == "gradient" else -1)) % n_stages
                if len(in_flight[stage]) > most_sends or (message and message not in in_flight[source]):
                    break
                received |= {message} if message else set()
                in_flight[stage] += [message for message in sent(step, stage, n_stages) if message[0] != "tokens"]
                at[stage] += 1
                progressed = True
    return any(position < len(steps) for position, steps in zip(at, schedules, strict=True))


@settings(max_examples=examples(40))
@given(Pipelines)
def test_a_few_sends_that_are_not_received_do_not_block(pipeline: tuple[int, int, int]) -> None:
    """The pipeline waits for all but ``2 * n_stages`` sends in training, and all but 2 in inference."""
    assert not blocks(interleaved(True, *pipeline), 2 * pipeline[0]) and not blocks(interleaved(False, *pipeline), 2)


def test_sends_that_wait_for_their_receives_block() -> None:
    assert blocks(interleaved(True, 4, 2, 8), 0) and blocks(interleaved(False, 4, 2, 8), 0)


def test_interleaved_training_with_two_stages() -> None:
    shown = [(type(step).__name__, step.micro_batch, step.chunk) for step in train_schedule(1, 2, 2, 2)]
    assert shown == [
        ("RecvActivation", 0, 0), ("Forward", 0, 0), ("SendActivation", 0, 0),
        ("RecvActivation", 1, 0), ("Forward", 1, 0), ("SendActivation", 1, 0),
        ("RecvActivation", 0, 1), ("Forward", 0, 1), ("Backward", 0, 1), ("SendGradient", 0, 1),
        ("RecvActivation", 1, 1), ("Forward", 1, 1), ("Backward", 1, 1), ("SendGradient", 1, 1),
        ("RecvGradient", 0, 0), ("Backward", 0, 0), ("SendGradient", 0, 0),
        ("RecvGradient", 1, 0), ("Backward", 1, 0), ("SendGradient", 1, 0),
    ]  # fmt: skip


@settings(max_examples=examples(50))
@given(st.integers(1, 6), st.integers(0, 12))
def test_training_does_not_deadlock_and_limits_activations(n_stages: int, n_micro: int) -> None:
    schedules = [train_schedule(stage, n_stages, n_micro) for stage in range(n_stages)]
    play(schedules)
    for stage, steps in enumerate(schedules):
        assert [s.micro_batch for s in steps if isinstance(s, Forward)] == list(range(n_micro))
        assert [s.micro_batch for s in steps if isinstance(s, Backward)] == list(range(n_micro))
        held = most = 0
        for step in steps:
            held += isinstance(step, Forward) - isinstance(step, Backward)
            most = max(most, held)
        assert most <= min(n_stages - stage, n_micro) and held == 0
        assert not any(isinstance(s, RecvActivation | SendGradient) for s in steps) or stage > 0
        assert not any(isinstance(s, SendActivation | RecvGradient) for s in steps) or stage < n_stages - 1


def test_inference_is_pipelined() -> None:
    assert inference_schedule(1, 3, 2) == (
        RecvActivation(0), Forward(0), SendActivation(0), RecvActivation(1), Forward(1), SendActivation(1),
    )  # fmt: skip
    assert play([inference_schedule(stage, 3, 4) for stage in range(3)]) == [[s, s + 1, s + 2, s + 3] for s in range(3)]


def test_one_stage_alternates() -> None:
    assert train_schedule(0, 1, 2) == (Forward(0), Backward(0), Forward(1), Backward(1))


def first_steps(stage: int, n_stages: int, n_groups: int) -> list[StageStep]:
    """Return the first decoding steps of all groups, without the final Advance."""
    steps: list[StageStep] = []
    for step in generation_schedule(stage, n_stages, n_groups):
        if isinstance(step, Advance) and sum(isinstance(s, Forward) for s in steps) == N_STEPS * n_groups:
            break
        steps.append(step)
    return steps


def exchanged(steps: Sequence[StageStep], stage: int, other: int, last: int) -> list[tuple[str, int]]:
    """Return the messages that a stage exchanges with another, in order."""
    posted = []
    for step in steps:
        match step:
            case SendActivation(i) if other == stage + 1:
                posted.append(("activation", i))
            case RecvActivation(i) if other == stage - 1:
                posted.append(("activation", i))
            case SendTokens(i) if stage == last:
                posted.append(("tokens", i))
            case ExpectTokens(i) if other == last:
                posted.append(("tokens", i))
    return posted


@pytest.mark.parametrize("n_groups", range(1, 9))
@pytest.mark.parametrize("n_stages", range(1, 9))
def test_generation_is_idle_only_with_fewer_groups_than_stages(n_stages: int, n_groups: int) -> None:
    schedules = [first_steps(stage, n_stages, n_groups) for stage in range(n_stages)]
    every_step = [i for _ in range(N_STEPS) for i in range(n_groups)]
    for steps in schedules:
        assert [step.micro_batch for step in steps if isinstance(step, Forward)] == every_step
        assert [step.micro_batch for step in steps if isinstance(step, Advance)] == every_step[n_groups:]
    period = max(n_stages, n_groups)
    for stage, starts in enumerate(play(schedules)):
        assert starts == [step * period + stage + i for step in range(N_STEPS) for i in range(n_groups)]


@pytest.mark.parametrize("n_groups", [1, 2, 3, 8])
@pytest.mark.parametrize("n_stages", [2, 3, 5, 8])
def test_both_stages_post_messages_in_the_same_order(n_stages: int, n_groups: int) -> None:
    schedules = [first_steps(stage, n_stages, n_groups) for stage in range(n_stages)]
    last = n_stages - 1
    for one in range(n_stages):
        for other in range(one):
            posted = exchanged(schedules[one], one, other, last)
            assert posted == exchanged(schedules[other], other, one, last)
            assert (len(posted) > 0) == (one == last or one == other + 1)


def test_generation_with_two_stages() -> None:
    assert first_steps(0, 2, 2)[:8] == [
        Forward(0), SendActivation(0), ExpectTokens(0), Forward(1), SendActivation(1), ExpectTokens(1),
        Advance(0), Forward(0),
    ]  # fmt: skip
    assert first_steps(1, 2, 1)[:6] == [
        RecvActivation(0), Forward(0), SendTokens(0), Advance(0), RecvActivation(0), Forward(0),
    ]  # fmt: skip


def test_generation_without_a_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 0"):
        next(generation_schedule(0, 1, 0))
