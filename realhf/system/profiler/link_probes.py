"""Probes of what moves bytes: collectives, sends, exchanges, copies to host memory, the master's calls."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.batch_meta import BatchMeta, ColumnMeta, RowId
from realhf.api.messages import Done, ExecuteCall, Holders, PrepareCall, Shutdown
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import whole
from realhf.arch.param_specs import param_specs
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.p2p import P2PChannel
from realhf.comm.process_groups import Group
from realhf.comm.shared_memory import SharedMemoryPeers
from realhf.models.flat_params import FlatParams
from realhf.ops.strided_copy import copy_box
from realhf.plan.cost.profile import message_counts, traffic_counts
from realhf.plan.cost.speed import CollectiveKind
from realhf.plan.cost.traffic import traffic_of
from realhf.system.profiler.probes import Clock, Probe
from realhf.system.transport.channel import MasterEnd, ZmqWorker

MESSAGES = (8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 12 << 20)
"""Bytes of collectives and sends."""
EXCHANGES = ((1, 1 << 10), (100, 1 << 10), (400, 4 << 10), (16, 256 << 10), (4, 4 << 20))
"""Pieces and their bytes; small ones are rows, large ones weights."""
CALLS = (8, 128, 512)
"""Rows of a call, for the time that master and workers take over it."""
DEADLINE_S = 60.0


def collective_probes(group: Group, clock: Clock) -> Iterator[Probe]:
    """Yield the probes of every kind of collective, over all workers."""
    for nbytes in MESSAGES:
        buffer = torch.zeros(max(1, nbytes // 4 // group.size) * group.size, device=clock.device)
        part = buffer.chunk(group.size)[group.index]  # in place, as the optimizer has it
        counts = message_counts(buffer.nbytes)
        for kind, work in _collectives(group, buffer, part).items():
            run = _timed(clock, work)
            yield Probe(((f"{kind.value}/{group.size}", counts),), run, nbytes + 1e5)


def _collectives(group: Group, buffer: Tensor, part: Tensor) -> dict[CollectiveKind, Callable[[], object]]:
    return {
        CollectiveKind.ALL_REDUCE: lambda: group.all_reduce(buffer),
        CollectiveKind.ALL_GATHER: lambda: group.all_gather(buffer, part),
        CollectiveKind.REDUCE_SCATTER: lambda: group.reduce_scatter(part, buffer),
        CollectiveKind.BROADCAST: lambda: group.broadcast(buffer, 0),
    }


def _timed(clock: Clock, work: Callable[[], object]) -> Callable[[], list[float]]:
    return lambda: [clock.of(work)]


def send_probes(rank: int, clock: Clock) -> Iterator[Probe]:
    """Yield the probes of a tensor's way to the next worker: half of the way there and back. For workers 0 and 1."""
    wires = P2PChannel(clock.device)
    for nbytes in MESSAGES:
        tensor = torch.zeros(nbytes // 4, device=clock.device)

        def there_and_back(tensor: Tensor = tensor) -> None:
            for sender in (0, 1):
                if rank == sender:
                    wires.send(tensor, 1 - rank)
                else:
                    wires.receive(tuple(tensor.shape), tensor.dtype, sender)
            wires.flush()

        def run(work: Callable[[], None] = there_and_back) -> list[float]:
            return [clock.of(work) / 2]

        yield Probe((("send", message_counts(nbytes)),), run, nbytes + 1e5)


def exchange_probes(rank: int, world: int, clock: Clock, links: SharedMemoryPeers | None) -> Iterator[Probe]:
    """Yield the probes of moves from a worker to itself, to its neighbour, and of neighbours to each other."""
    ways = [((0, 0),)] if world == 1 else [((0, 0), (1, 1)), ((0, 1),), ((0, 1), (1, 0))]
    for pieces, nbytes in EXCHANGES:
        for pairs in ways:
            moves = [
                P2PCopy((src, dst, i), src, dst, TensorSlice(torch.float32, nbytes // 4))
                for src, dst in pairs
                for i in range(pieces)
            ]
            counts = traffic_counts(traffic_of(((m.src, (m.dst,), nbytes, 1) for m in moves), world))
            run = _exchange(moves, rank, world, clock, links)
            yield Probe((("exchange", counts),), run, pieces * (nbytes + 1e4) * len(pairs))


def _exchange(
    moves: Sequence[P2PCopy], rank: int, world: int, clock: Clock, links: SharedMemoryPeers | None
) -> Callable[[], list[float]]:
    numel = moves[0].tensor_slice.numel
    held, places = (torch.zeros(len(moves), numel, device=clock.device) for _ in range(2))
    number = {move.what: i for i, move in enumerate(moves)}
    store: dict[object, Tensor] = {}

    def read(what: object) -> Tensor:
        return held[number[what]]

    def into(what: object) -> Tensor:
        return places[number[what]]

    def move() -> None:
        exchange(
            moves,
            rank,
            read,
            store.__setitem__,
            clock.device,
            into=into if numel > 1 << 12 else None,
            peers=links,
            copy=copy_box,
        )

    def run() -> list[float]:
        if world > 1:
            dist.barrier()
        last = torch.tensor(clock.of(move), dtype=torch.float64, device=clock.device)
        if world > 1:
            dist.all_reduce(last, dist.ReduceOp.MAX)
        return [float(last)]

    return run


def host_copy_probes(models: Sequence[ModelConfig], clock: Clock) -> Iterator[Probe]:
    """Yield the probes of weights that go to host memory, and of those that come back."""
    for config in models:
        specs = param_specs(config)
        params = FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, torch.float32, clock.device)

        def run(params: FlatParams = params) -> list[float]:
            return [(clock.of(params.offload) + clock.of(params.load)) / 2]

        nbytes = float(params.data.nbytes)
        yield Probe((("host_copy", message_counts(nbytes)),), run, nbytes)


def call_probes(master: MasterEnd) -> Iterator[Probe]:
    """Yield the probes of a call's way from the master to a worker that has nothing to do, and of its answer."""
    for rows in CALLS:
        call = _call(rows)

        def run(call: PrepareCall = call) -> list[float]:
            start = time.perf_counter()
            master.send((0,), call)
            master.send((0,), ExecuteCall(call.request))
            answer = master.receive(DEADLINE_S)
            if answer is None:
                raise RuntimeError(f"a worker did not answer a call for {DEADLINE_S:g} s")
            return [time.perf_counter() - start]

        yield Probe((("call", {"call": 1.0, "row": float(rows)}),), run, 100.0 + rows)


def answer_calls(address: str, key: bytes) -> None:
    """Be a worker that answers every call at once, until it is told to stop."""
    channel = ZmqWorker(address, 0, key)
    try:
        channel.send(Done(0, 0))
        call = None
        while not isinstance(message := channel.receive(DEADLINE_S), Shutdown):
            if isinstance(message, PrepareCall):
                call = message
            elif isinstance(message, ExecuteCall) and call is not None:
                stats = {f"statistic_{i}": (1.0, 2.0) for i in range(12)}
                channel.send(Done(call.request, 0, call.inputs, stats, call.state))
    finally:
        channel.close()


def _call(rows: int) -> PrepareCall:
    """Return a call as PPO's training makes them."""
    ids, lengths = tuple(RowId(i // 4, i % 4) for i in range(rows)), tuple(100 + i % 50 for i in range(rows))
    columns = {key: ColumnMeta("float32", lengths) for key in ("tokens", "prompt_mask", "logprobs", "ref_logprobs")}
    columns |= {key: ColumnMeta("float32", (1,) * rows) for key in ("truncated", "rewards")}
    holders = Holders(((0,),), dict.fromkeys(columns, (0,) * rows))
    order = tuple(range(rows))
    return PrepareCall(1, "actor_train", 0, 0, BatchMeta(ids, columns), holders, (), (order,), order, {"kl_coef": 0.1})
