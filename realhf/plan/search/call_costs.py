"""The calls of a simulated run: the rows of every call, which are the same under all plans, and their exact costs."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, lcm

from realhf.api.execution_plan import ExecutionPlan, Placement
from realhf.api.graph import MFC, Graph
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.machine import Cost, Workload
from realhf.api.messages import PrepareCall
from realhf.api.program import Compute, Instruction
from realhf.plan.compile.micro_batch import partition_rows
from realhf.plan.compile.transfer import row_bytes
from realhf.plan.cost.cost import NO_COST, BatchRows, CostModel, rows_of, split_rows
from realhf.plan.search.simulate import simulate
from realhf.plan.train_schedule import TrainSchedule

Calls = Mapping[str, Sequence[PrepareCall]]
"""The calls of every MFC in order."""


def calls_of_run(graph: Graph, workload: Workload, schedule: TrainSchedule) -> Calls:
    """Return the calls of a simulated run on one worker. Other plans only assign their rows to more ranks."""
    calls: dict[str, list[PrepareCall]] = {m.name: [] for m in graph.mfcs}

    def record(call: PrepareCall, instruction: Instruction) -> Cost:
        if isinstance(instruction, Compute):
            calls[call.mfc].append(call)
        return NO_COST

    alone = Layout(DeviceMesh((0,)), ParallelStrategy())
    simulate(graph, ExecutionPlan(1, {m.name: Placement(alone) for m in graph.mfcs}), record, schedule, workload)
    return calls


def assigned(call: PrepareCall, mfc: MFC, dp: int) -> tuple[BatchRows, ...]:
    """Return the rows of each of ``dp`` ranks in a call, as the master assigns them."""
    (rows,) = rows_of(call)
    weights = row_bytes(call.inputs.columns.values())
    assignment, minibatches = partition_rows(call.inputs.ids, weights, dp, mfc.n_minibatches)
    return split_rows(call.inputs.ids, rows.lengths, minibatches, assignment)


def period(workload: Workload) -> int:
    """Return the number of prompts after which the lengths of a workload repeat."""
    n_responses = len(workload.response_lengths)
    return lcm(len(workload.prompts), n_responses // gcd(n_responses, workload.samples) if n_responses else 1)


@dataclass(frozen=True, eq=False)
class CallCosts:
    """Costs of the calls of a simulated run, which are those that the simulation itself uses."""

    cost: CostModel
    schedule: TrainSchedule
    _rows: dict[tuple[str, int], list[tuple[BatchRows, ...]]] = field(default_factory=dict, init=False, repr=False)
    _costs: dict[Hashable, tuple[Cost, ...]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _calls(self) -> Calls:
        return calls_of_run(self.cost.graph, self.cost.workload, self.schedule)

    def of(self, mfc: MFC, placement: Placement, key: Hashable) -> tuple[Cost, ...]:
        """Return the cost of each call of an MFC in order; after the last one costs repeat.

        Placements with the same ``key``, micro-batching and memory saving have equal costs.
        """
        entry = key, placement.micro_batching, placement.saving
        if entry not in self._costs:
            rows = self._rows_of(mfc, placement.layout.strategy.dp)
            self._costs[entry] = tuple(self.cost.known(mfc, placement, of_call) for of_call in rows)
        return self._costs[entry]

    def _rows_of(self, mfc: MFC, dp: int) -> list[tuple[BatchRows, ...]]:
        if (mfc.name, dp) not in self._rows:
            self._rows[mfc.name, dp] = [assigned(call, mfc, dp) for call in self._distinct_calls(mfc)]
        return self._rows[mfc.name, dp]

    def _distinct_calls(self, mfc: MFC) -> Sequence[PrepareCall]:
        """Return the calls of an MFC up to the number after which their rows repeat, or all."""
        calls = self._calls[mfc.name]
        signatures = [(call.inputs.ids[0].prompt % period(self.cost.workload), len(call.inputs.ids)) for call in calls]
        for n in range(1, len(calls)):
            if all(signature == signatures[i % n] for i, signature in enumerate(signatures)):
                return calls[:n]
        return calls
