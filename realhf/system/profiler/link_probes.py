"""Probes of communication: collectives, sends, exchanges, copies to host memory, calls from the master."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection

import torch
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
from realhf.plan.cost.speed import CollectiveKind
from realhf.plan.cost.traffic import traffic_of
from realhf.plan.machines.profile import message_counts, traffic_counts
from realhf.system.profiler.probes import Clock, Probe
from realhf.system.transport.channel import MasterEnd, ZmqWorker

MESSAGES = (8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 12 << 20)
"""Bytes of collectives and sends."""
EXCHANGES = ((1, 1 << 10), (100, 1 << 10), (400, 4 << 10), (16, 256 << 10), (4, 4 << 20))
"""Number of slices and their bytes; small ones are like rows, large ones like weights."""
CALLS = (8, 128, 512)
"""Rows of a call."""
TIMEOUT_S = 60.0


def collective_probes(group: Group, clock: Clock, name: str = "") -> Iterator[Probe]:
    """Yield the probes of collectives; ``name`` has ``{}`` in place of the collective (default: with the size)."""
    name = name or f"{{}}/{group.size}"
    for nbytes in MESSAGES:
        buffer = torch.zeros(max(1, nbytes // 4 // group.size) * group.size, device=clock.device)
        part = buffer.chunk(group.size)[group.index]  # in place, as in the optimizer
        rows, counts = [len(part)] * group.size, message_counts(buffer.nbytes)
        collectives: dict[CollectiveKind, Callable[[], object]] = {
            CollectiveKind.ALL_REDUCE: partial(group.all_reduce, buffer),
            CollectiveKind.ALL_GATHER: partial(group.all_gather, buffer, part),
            CollectiveKind.REDUCE_SCATTER: partial(group.reduce_scatter, part, buffer),
            CollectiveKind.BROADCAST: partial(group.broadcast, buffer, 0),
            CollectiveKind.ALL_TO_ALL: partial(group.all_to_all, torch.zeros_like(buffer), buffer, rows, rows),
        }
        for kind, work in collectives.items():
            yield Probe(((name.format(kind.value), counts),), partial(_timed, clock, work), nbytes + 1e5)


def _timed(clock: Clock, work: Callable[[], object], factor: float = 1.0) -> list[float]:
    return [clock.time(work) * factor]


def send_probes(pair: Group, clock: Clock, name: str = "send") -> Iterator[Probe]:
    """Yield the probes of sending a tensor, as half of a round trip between the workers of a pair."""
    channel = P2PChannel(clock.device)
    rank, other = pair.ranks[pair.index], pair.ranks[1 - pair.index]
    for nbytes in MESSAGES:
        tensor = torch.zeros(nbytes // 4, device=clock.device)

        def round_trip(tensor: Tensor = tensor) -> None:
            for sender in pair.ranks:
                if rank == sender:
                    channel.send(tensor, other)
                else:
                    channel.receive(tuple(tensor.shape), tensor.dtype, sender)
            channel.flush()

        yield Probe(((name, message_counts(nbytes)),), partial(_timed, clock, round_trip, 0.5), nbytes + 1e5)


def exchange_probes(
    group: Group, clock: Clock, peers: SharedMemoryPeers | None, name: str = "exchange"
) -> Iterator[Probe]:
    """Yield the probes of exchanges of one or two workers: local copies, one direction, and both directions."""
    first, *others = group.ranks
    patterns: list[tuple[tuple[int, int], ...]] = [((first, first),)]
    for other in others:
        patterns = [((first, first), (other, other)), ((first, other),), ((first, other), (other, first))]
    for n_slices, nbytes in EXCHANGES:
        for pairs in patterns:
            copies = [
                P2PCopy((src, dst, i), src, dst, TensorSlice(torch.float32, nbytes // 4))
                for src, dst in pairs
                for i in range(n_slices)
            ]
            one_node = max(group.ranks) + 1
            counts = traffic_counts(traffic_of(((c.src, (c.dst,), nbytes, 1) for c in copies), one_node))
            run = _exchange(copies, group, clock, peers)
            yield Probe(((name, counts),), run, n_slices * (nbytes + 1e4) * len(pairs))


def _exchange(
    copies: Sequence[P2PCopy], group: Group, clock: Clock, peers: SharedMemoryPeers | None
) -> Callable[[], list[float]]:
    rank, ready = group.ranks[group.index], torch.zeros(1, device=clock.device)
    numel = copies[0].tensor_slice.numel
    source, target = (torch.zeros(len(copies), numel, device=clock.device) for _ in range(2))
    index = {copy.what: i for i, copy in enumerate(copies)}
    received: dict[object, Tensor] = {}
    into = (lambda what: target[index[what]]) if numel > 1 << 12 else None

    def work() -> None:
        exchange(copies, rank, lambda what: source[index[what]], received.__setitem__, clock.device, into=into,
                 peers=peers, copy=copy_box)  # fmt: skip

    def run() -> list[float]:
        group.all_reduce(ready)  # start together
        return [float(group.all_max(torch.tensor(clock.time(work), dtype=torch.float64, device=clock.device)))]

    return run


def host_copy_probes(models: Sequence[ModelConfig], clock: Clock) -> Iterator[Probe]:
    for config in models:
        specs = param_specs(config)
        params = FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, torch.float32, clock.device)

        def run(params: FlatParams = params) -> list[float]:
            return [(clock.time(params.offload) + clock.time(params.load)) / 2]

        nbytes = float(params.data.nbytes)
        yield Probe((("host_copy", message_counts(nbytes)),), run, nbytes)


def call_probes(master: MasterEnd) -> Iterator[Probe]:
    """Yield the probes of a call's round trip from the master to a worker that does no work."""
    for rows in CALLS:
        call = _call(rows)

        def run(call: PrepareCall = call) -> list[float]:
            start = time.perf_counter()
            master.send((0,), call)
            master.send((0,), ExecuteCall(call.request))
            if master.receive(TIMEOUT_S) is None:
                raise RuntimeError(f"no reply to a call within {TIMEOUT_S:g} s")
            return [time.perf_counter() - start]

        yield Probe((("call", {"call": 1.0, "row": float(rows)}),), run, 100.0 + rows)


def answer_calls(_: Connection, address: str, key: bytes) -> None:
    """Run a worker that replies to every call at once, until the master sends ``Shutdown``."""
    with closing(ZmqWorker(address, 0, key)) as channel:
        channel.send(Done(0, 0))
        call = None
        while not isinstance(message := channel.receive(TIMEOUT_S), Shutdown):
            if isinstance(message, PrepareCall):
                call = message
            elif isinstance(message, ExecuteCall) and call is not None:
                stats = {f"statistic_{i}": (1.0, 2.0) for i in range(12)}
                channel.send(Done(call.request, 0, call.inputs, stats, call.state))


def _call(rows: int) -> PrepareCall:
    ids, lengths = tuple(RowId(i // 4, i % 4) for i in range(rows)), tuple(100 + i % 50 for i in range(rows))
    columns = {key: ColumnMeta("float32", lengths) for key in ("tokens", "prompt_mask", "logprobs", "ref_logprobs")}
    columns |= {key: ColumnMeta("float32", (1,) * rows) for key in ("truncated", "rewards")}
    holders = Holders(((0,),), dict.fromkeys(columns, (0,) * rows))
    order = tuple(range(rows))
    return PrepareCall(1, "actor_train", 0, 0, BatchMeta(ids, columns), holders, (), (order,), order, {"kl_coef": 0.1})
