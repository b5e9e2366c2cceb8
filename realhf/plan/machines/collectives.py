"""Time of a collective by its algorithm: ring, tree across nodes, and reduction in the switches of a node.

NCCL chooses the fastest algorithm by message size and topology; the time here is that of the fastest.
"""

from collections.abc import Sequence

from realhf.api.machine import Hardware, Link
from realhf.plan.cost.speed import CollectiveKind

NVLS_HOPS = 4  # of the latency of a link: to the switch and back, before and after the reduction
NVLS_MIN_RANKS = 5  # with fewer it is not faster than a ring (https://github.com/NVIDIA/nccl/issues/1455)


def collective_seconds(hardware: Hardware, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
    """Return the seconds of a collective over ``ranks`` on a buffer whose full size is ``nbytes``."""
    n = len(ranks)
    if n == 1:
        return 0.0
    if kind is CollectiveKind.ALL_TO_ALL:
        return _all_to_all(hardware, nbytes, ranks)
    link = ring_link(hardware, ranks)
    if kind is CollectiveKind.BROADCAST:
        return link.latency * (n - 1).bit_length() + nbytes / link.bandwidth
    rounds = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    moved = rounds * (n - 1) / n * nbytes
    ring = rounds * (n - 1) * link.latency + moved / link.bandwidth
    if kind is not CollectiveKind.ALL_REDUCE:
        return ring
    n_nodes = len({rank // hardware.node_size for rank in ranks})
    if n_nodes > 1:
        return min(ring, _tree(hardware, nbytes, n, n_nodes, link))
    if n >= NVLS_MIN_RANKS and hardware.nvls_bandwidth:
        return min(ring, NVLS_HOPS * hardware.node.latency + nbytes / hardware.nvls_bandwidth)
    return ring


def _all_to_all(hardware: Hardware, nbytes: float, ranks: Sequence[int]) -> float:
    """Every rank sends an equal part of its ``nbytes`` to each other rank, those on other nodes over its own port."""
    nodes, n = {rank // hardware.node_size for rank in ranks}, len(ranks)
    near = max(sum(rank // hardware.node_size == node for rank in ranks) for node in nodes) - 1
    far, network = n - 1 - near, hardware.network(nodes)
    seconds = near * hardware.node.latency + near / n * nbytes / hardware.node.bandwidth if near else 0.0
    return seconds + (far * network.latency + far / n * nbytes / network.bandwidth if far else 0.0)


def _tree(hardware: Hardware, nbytes: float, n: int, n_nodes: int, link: Link) -> float:
    """Reduce along a chain in each node and a binary tree of the nodes, and broadcast back."""
    chain = max(0, -(-n // n_nodes) - 1) * hardware.node.latency
    hops = (n_nodes - 1).bit_length() * hardware.cluster.latency
    return 2 * (chain + hops) + 2 * nbytes / link.bandwidth


def ring_link(hardware: Hardware, ranks: Sequence[int]) -> Link:
    """Return the slowest link of a ring, with its mean latency.

    Each member of a node adds a port to the node's connection to others.
    """
    nodes = {rank // hardware.node_size for rank in ranks}
    if len(nodes) == 1:
        return hardware.node
    ports = max(1, len(ranks) // len(nodes))
    network = hardware.network(nodes)
    bandwidth = min(network.bandwidth * ports, hardware.node.bandwidth)
    share = len(nodes) / len(ranks)  # of the ring's links that are between nodes
    return Link(bandwidth, share * network.latency + (1 - share) * hardware.node.latency)
