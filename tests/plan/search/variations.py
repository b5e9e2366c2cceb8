"""Planners with a change whose effect on the time of a step has a known sign."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from realhf.api.execution_plan import ExecutionPlan
from realhf.api.graph import Graph, Kind
from realhf.api.layout import DeviceMesh, Layout
from realhf.api.machine import Hardware
from realhf.plan.machines.roofline import Roofline
from realhf.plan.search.planner import Planner


def _faster_links(machine: Hardware) -> Hardware:
    node, cluster, host = (replace(link, bandwidth=2 * link.bandwidth)
                           for link in (machine.node, machine.cluster, machine.host))  # fmt: skip
    return replace(machine, node=node, cluster=cluster, host=host)


FASTER: dict[str, Callable[[Hardware], Hardware]] = {
    "flops": lambda machine: replace(machine, flops=2 * machine.flops),
    "memory bandwidth": lambda machine: replace(machine, memory_bandwidth=2 * machine.memory_bandwidth),
    "bandwidth of links": _faster_links,
    "latency of links": lambda machine: replace(
        machine, node=replace(machine.node, latency=0.0), cluster=replace(machine.cluster, latency=0.0)
    ),
    "latency of the master": lambda machine: replace(machine, call=0.0),
    "kernel launches": lambda machine: replace(machine, kernel=0.0, launch=0.0),
    "cores": lambda machine: replace(machine, cores=2 * machine.cores),
    "everything": lambda machine: replace(
        _faster_links(machine), flops=2 * machine.flops, memory_bandwidth=2 * machine.memory_bandwidth
    ),
}
"""Changes of a machine after which no plan is slower."""


def on(planner: Planner, hardware: Hardware) -> Planner:
    cost = replace(planner.calls.cost, speed=Roofline(hardware))
    return replace(planner, calls=replace(planner.calls, hardware=hardware, cost=cost))


def with_longer_rows(planner: Planner, random: Random) -> Planner:
    workload = planner.calls.cost.workload
    longer = replace(
        workload,
        prompts=tuple(tuple(n + random.randint(0, 9) for n in lengths) for lengths in workload.prompts),
        response_lengths=tuple(n + random.randint(0, 9) for n in workload.response_lengths),
    )
    calls = planner.calls
    cost, memory = replace(calls.cost, workload=longer), replace(calls.memory, workload=longer)
    return replace(planner, calls=replace(calls, cost=cost, memory=memory))


def removable(graph: Graph) -> list[str]:
    """Return the inference calls with a model of their own without which every other call still has inputs."""
    roles = [m.role for m in graph.mfcs]
    return [
        m.name
        for m in graph.mfcs
        if m.role is not None and m.kind is Kind.INFERENCE and roles.count(m.role) == 1 and not m.resamples
        and len(graph.mfcs) > 1
        and not any(set(other.inputs) <= set(m.outputs) for other in graph.mfcs if other is not m)
    ]  # fmt: skip


def without(planner: Planner, plan: ExecutionPlan, name: str) -> tuple[Planner, ExecutionPlan]:
    """Return the planner and the plan without a call and its model."""
    graph, gone = planner.graph, planner.graph[name]
    rest = [replace(m, inputs=tuple(key for key in m.inputs if key not in gone.outputs))
            for m in graph.mfcs if m.name != name]  # fmt: skip
    syncs = tuple(sync for sync in graph.syncs if gone.role not in (sync.source, sync.target))
    smaller = Graph(tuple(rest), syncs, tuple(role for role in graph.offloaded if role != gone.role))
    calls = planner.calls
    cost, memory = replace(calls.cost, graph=smaller), replace(calls.memory, graph=smaller)
    placements = {mfc: placement for mfc, placement in plan.placements.items() if mfc != name}
    return (
        replace(planner, graph=smaller, calls=replace(calls, cost=cost, memory=memory)),
        replace(plan, placements=placements),
    )


def renumbered(planner: Planner, plan: ExecutionPlan, random: Random) -> ExecutionPlan:
    """Return the plan with other numbers for whole nodes."""
    size = planner.calls.hardware.node_size
    nodes = list(range(planner.n_workers // size))
    random.shuffle(nodes)

    def moved(layout: Layout) -> Layout:
        ranks = (nodes[rank // size] * size + rank % size for rank in layout.mesh.ranks)
        return Layout(DeviceMesh(tuple(ranks)), layout.strategy)

    places = {name: replace(place, layout=moved(place.layout)) for name, place in plan.placements.items()}
    return replace(plan, placements=places)


def with_another_node(planner: Planner) -> Planner:
    return replace(planner, n_workers=planner.n_workers + planner.calls.hardware.node_size)
