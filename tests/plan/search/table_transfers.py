"""A reference simulation in which transfers of rows have the workers and the costs of a problem's tables."""

from realhf.api.program import Transfer
from realhf.plan.compile.forwarding import choose_courier, couriers, later_readers, uninterrupted_rollouts
from realhf.plan.compile.program import compile_program, instruction_ranks
from realhf.plan.compile.schedule import Dispatch, MasterState
from realhf.plan.search.event_sim import CallOps, Op, WorkerQueues
from realhf.plan.search.planner import Planner, Table
from realhf.plan.search.problem import Choice, Problem
from realhf.plan.search.simulate import make_rows, run_calls
from realhf.plan.train_schedule import TrainSchedule


def seconds_with_table_transfers(planner: Planner, table: Table, problem: Problem, choice: Choice) -> float:
    """Return the seconds per step of the master on a choice; all other costs are those of ``Planner.predict``."""
    graph, plan, cost = planner.graph, planner.plan_of_choice(table, choice), planner.calls.cost
    schedule = TrainSchedule(problem.batch_size, problem.batch_size * problem.n_steps, problem.n_steps)
    state = MasterState(graph, plan, schedule, problem.max_staleness)
    program, price = compile_program(graph, plan), cost.price(plan)
    options = [some[i] for some, i in zip(problem.table, choice, strict=True)]

    def senders(number: int, source: int) -> range:
        ranks = {mfc.name: frozenset(options[problem.number[mfc.name]].ranks) for mfc in graph.mfcs}
        reader, rollout = graph.mfcs[number], graph.mfcs[source]
        rollouts = uninterrupted_rollouts(graph, problem.max_staleness)
        if rollout in rollouts and reader in later_readers(graph, rollout):
            available = [(mfc, ranks[mfc.name]) for mfc in couriers(graph, rollout)]
            if courier := choose_courier(available, ranks[reader.name], ranks[rollout.name]):
                return options[problem.number[courier.name]].ranks
        return options[source].holders

    def call_ops(dispatch: Dispatch) -> CallOps:
        ops, number = [], problem.number[dispatch.call.mfc]
        for instruction in program[dispatch.call.mfc]:
            ranks = instruction_ranks(instruction)
            if isinstance(instruction, Transfer):
                ranks = ranks.union(*(senders(number, source) for source in problem.deps[number].row_sources))
                ops.append(Op(sorted(ranks), options[number].transfer))
            else:
                ops.append(Op(sorted(ranks), price(dispatch.call, instruction)))
        return CallOps(dispatch, ops)

    queues = WorkerQueues(plan.n_workers, problem.cores, problem.call_seconds)
    _, ends = run_calls(
        queues, state.start(), lambda done: state.handle(make_rows(graph, cost.workload, done, plan)), call_ops
    )
    first, last = problem.steady_steps
    return (ends[last] - ends[first]) / (last - first)
