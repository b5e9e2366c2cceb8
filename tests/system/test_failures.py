"""A run that is ended at any call resumes from the step from which the simulation of failures resumes."""

from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path

import pytest

from realhf.api.messages import AwaitCheckpoint, Checkpoint, Done, ToMaster, ToWorker
from realhf.base.errors import RunFailed
from realhf.plan.goodput import CheckpointTimes
from realhf.plan.run_spec import RunSpec
from realhf.plan.search.failures import FailureSimulator, NodeFailure, RecoveryRule, SimulatedPlan, StepOps
from realhf.system.checkpoint.manifest import newest
from realhf.system.master import Master
from tests.scaling import subset
from tests.system.test_master import Recorder, Workers, graph

N_STEPS = 6
CALLS = [(mfc, step) for step in range(N_STEPS) for mfc in ("gen", "train")]
OPS = StepOps({"gen": (((0,), 1.0),), "train": (((0,), 1.0),)}, (1,))


class EndingWorkers(Workers):
    """Workers that take part in checkpoints, and are gone before they reply to one call."""

    def __init__(self, run: RunSpec, last: tuple[str, int]) -> None:
        super().__init__(run)
        self.last = last

    def reply(self, rank: int, message: ToWorker) -> ToMaster | None:
        match message:
            case Checkpoint(request):
                return Done(request, rank)
            case AwaitCheckpoint(request):
                return Done(request, rank, values={"files": {}})
        return super().reply(rank, message)

    def receive(self, timeout_s: float) -> ToMaster | None:
        reply = super().receive(timeout_s)
        call = self.calls.get(reply.request) if isinstance(reply, Done) else None
        if call is not None and (call.mfc, call.step) == self.last:
            raise RunFailed("the worker is gone")
        return reply


@pytest.mark.parametrize("number, cadence", subset(product(range(len(CALLS)), [1, 2, 3]), 12))
def test_the_master_and_the_simulation_resume_from_the_same_step(
    number: int, cadence: int, make_run: Callable[..., RunSpec], tmp_path: Path
) -> None:
    run = make_run(graph(1), {"gen": (0,), "train": (0,)}, tmp_path, N_STEPS, 1, ckpt_freq_steps=cadence)
    with pytest.raises(RunFailed, match="the worker is gone"):
        Master(run, EndingWorkers(run, CALLS[number]), dict, Recorder()).train()
    last = newest(run.paths.checkpoints)

    def failures() -> Iterator[NodeFailure]:
        yield NodeFailure(number + 0.5, 0)  # in the middle of the call
        yield from (NodeFailure(1e9 + i, 0) for i in count())

    plan = SimulatedPlan(1, OPS, cadence, CheckpointTimes(0.0, 0.25))
    simulated = FailureSimulator(run.graph, lambda n: plan)
    done = simulated.run(RecoveryRule(1.0, 1.0), failures(), 1, N_STEPS, 1e6)
    assert done.resumed_at == [0, last[1].step if last else 0]
