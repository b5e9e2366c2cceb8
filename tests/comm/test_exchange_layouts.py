"""Parameters are reallocated between all pairs of layouts over every transport, and no byte is sent twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_numel, box_shape, intersect, relative, whole
from realhf.arch.param_specs import param_specs, stage_layers
from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.shared_memory import open_shared_memory_peers
from realhf.models.flat_params import FlatParams
from realhf.plan.compile.realloc import BoxCopy, plan_realloc, route_copies, shard_boxes

CONFIG = ModelConfig("llama", 4, 32, 4, 2, 8, 48, 40, 64, tied_embedding=True)
SPECS = param_specs(CONFIG)
WORLD = 4
LAYOUTS = [
    Layout(DeviceMesh(ranks), ParallelStrategy.parse(strategy))
    for strategy, ranks in [
        ("d1", (0,)),
        ("d1", (3,)),
        ("d2", (0, 1)),
        ("d2", (2, 3)),
        ("t2", (0, 1)),
        ("t2", (2, 1)),
        ("p2", (0, 1)),
        ("p2", (1, 3)),
        ("p2v2", (2, 1)),
        ("d4", (0, 1, 2, 3)),
        ("t4", (3, 2, 1, 0)),
        ("d2t2", (0, 1, 2, 3)),
        ("t2p2", (0, 1, 2, 3)),
        ("t2p2v2", (3, 2, 0, 1)),
        ("d3", (3, 0, 2)),
    ]
]
TRANSPORTS = {  # hosts of the ranks, whether ``into`` is given, whether checksums are verified
    "one host": (("a",) * WORLD, True, False),
    "two hosts, verified": (("a", "b", "a", "b"), True, True),
    "four hosts": (("a", "b", "c", "d"), False, False),
}


def stages(pp: int, vpp: int) -> tuple[frozenset[int], ...]:
    return stage_layers(CONFIG, pp, vpp)


def full_params() -> dict[str, Tensor]:
    """Return every parameter; all elements differ."""
    flat, start = torch.arange(float(sum(spec.numel for spec in SPECS))), 0
    values = {}
    for spec in SPECS:
        values[spec.name] = flat[start : start + spec.numel].view(spec.shape)
        start += spec.numel
    return values


def shard(layout: Layout, rank: int, values: dict[str, Tensor] | None) -> FlatParams | None:
    if rank not in layout.mesh.ranks:
        return None
    params = FlatParams(SPECS, shard_boxes(SPECS, stages, layout, rank), torch.float32, "cpu")
    for name in params.names if values else ():
        params.write(name, params.box(name), values[name][relative(params.box(name), whole(values[name].shape))])
    return params


def missing_bytes(src: Layout, dst: Layout, rank: int) -> int:
    """Return the bytes of a worker's ``dst`` shard that are missing from its ``src`` shard."""
    held = shard_boxes(SPECS, stages, src, rank) if rank in src.mesh.ranks else {}
    need = shard_boxes(SPECS, stages, dst, rank) if rank in dst.mesh.ranks else {}
    common = [intersect(box, held[name]) for name, box in need.items() if name in held]
    return 4 * (sum(map(box_numel, need.values())) - sum(box_numel(box) for box in common if box))


def all_pairs(rank: int, world: int, hosts: tuple[str, ...], in_place: bool, verify: bool) -> tuple[list[str], int]:
    """Return the failures, and the number of ranks that share memory with this one."""
    peers = open_shared_memory_peers(rank, world, 60.0, hosts)
    values, failures = full_params(), []
    for src in LAYOUTS:
        source = shard(src, rank, values)
        for dst in LAYOUTS:
            target = shard(dst, rank, None)
            copies = tuple(route_copies(plan_realloc(SPECS, stages, src, dst)))
            p2p_copies = [
                P2PCopy(c, c.src, c.dst, TensorSlice(torch.float32, box_numel(c.box)), (c.name, c.box)) for c in copies
            ]

            def read(copy: BoxCopy, source: FlatParams | None = source) -> Tensor:
                return source.read(copy.name, copy.box)

            def into(copy: BoxCopy, target: FlatParams | None = target) -> Tensor:
                return target.read(copy.name, copy.box)

            def write(copy: BoxCopy, flat: Tensor, target: FlatParams | None = target) -> None:
                target.write(copy.name, copy.box, flat.view(box_shape(copy.box)))

            received = exchange(
                p2p_copies,
                rank,
                read,
                write,
                torch.device("cpu"),
                into=into if in_place else None,
                peers=peers,
                verify=verify,
            )
            if received != missing_bytes(src, dst, rank):
                failures.append(f"{src} -> {dst}: {received} bytes instead of {missing_bytes(src, dst, rank)}")
            if target is not None and not torch.equal(target.data, shard(dst, rank, values).data):
                failures.append(f"{src} -> {dst}: other values")
    shared = len(peers.ranks)
    peers.close()
    return failures, shared


@pytest.mark.dist
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_pairs_of_layouts(on_ranks: Callable[..., list[Any]], transport: str) -> None:
    hosts, in_place, verify = TRANSPORTS[transport]
    for rank, (failures, shared) in enumerate(on_ranks(WORLD, all_pairs, hosts, in_place, verify)):
        assert not failures
        assert shared == hosts.count(hosts[rank]) - 1
