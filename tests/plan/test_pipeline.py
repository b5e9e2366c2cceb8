"""Pipeline schedules, played by stages that wait for one another."""

from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.plan.pipeline import (
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
    SendActivation,
    SendGradient,
    StageStep,
    inference_schedule,
    train_schedule,
)


def play(schedules: list[tuple[StageStep, ...]]) -> list[list[StageStep]]:
    """Let every stage go as far as it can, round by round; a receive waits for its send. Fails when all wait."""
    todo = [list(steps) for steps in schedules]
    done: list[list[StageStep]] = [[] for _ in schedules]
    while any(todo):
        moved = False
        for stage, steps in enumerate(todo):
            while steps:
                match steps[0]:
                    case RecvActivation(i) if SendActivation(i) not in done[stage - 1]:
                        break
                    case RecvGradient(i) if SendGradient(i) not in done[stage + 1]:
                        break
                done[stage].append(steps.pop(0))
                moved = True
        assert moved, f"all stages wait: {[steps[:1] for steps in todo]}"
    return done


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 12))
def test_training_ends_and_holds_few_micro_batches(n_stages: int, n_micro: int) -> None:
    done = play([train_schedule(stage, n_stages, n_micro) for stage in range(n_stages)])
    for stage, steps in enumerate(done):
        assert [s.micro_batch for s in steps if isinstance(s, Forward)] == list(range(n_micro))
        assert [s.micro_batch for s in steps if isinstance(s, Backward)] == list(range(n_micro))
        held = most = 0
        for step in steps:
            held += isinstance(step, Forward) - isinstance(step, Backward)
            most = max(most, held)
        assert most <= min(n_stages - stage, n_micro) and held == 0
        assert not any(isinstance(s, RecvActivation | SendGradient) for s in steps) or stage > 0
        assert not any(isinstance(s, SendActivation | RecvGradient) for s in steps) or stage < n_stages - 1


def test_inference_streams() -> None:
    done = play([inference_schedule(stage, 3, 2) for stage in range(3)])
    assert done[1] == [
        RecvActivation(0), Forward(0), SendActivation(0), RecvActivation(1), Forward(1), SendActivation(1),
    ]  # fmt: skip


def test_one_stage_alternates() -> None:
    assert train_schedule(0, 1, 2) == (Forward(0), Backward(0), Forward(1), Backward(1))
