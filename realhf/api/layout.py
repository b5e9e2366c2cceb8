"""Layouts of one model: device mesh + parallel strategy."""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from realhf.api.param_box import Cuts

SPAN = r"\d+(?:-\d+)?"
SPANS = rf"{SPAN}(?:,{SPAN})*"
MESH_PART = re.compile(rf"(?:[A-Za-z]+(?:(\d+)|\[({SPANS})\])(?::({SPANS}))?|({SPAN}))(?:,(?=.)|\Z)")
"""One node, several nodes, or plain ranks, and the comma before the next part."""


MOST_RANKS = 1 << 16
"""More than a stage has: searches end here if options give a larger size."""
AXES = ("dp", "tp", "pp", "ep", "edp", "replicas")


def is_expert_degree(ep: int, dp: int, tp: int) -> bool:
    """Return True if experts can be divided over so many ranks: of tensor parallelism first, then of replicas."""
    return tp % ep == 0 or (ep % tp == 0 and dp % (ep // tp) == 0)


def expert_degrees(dp: int, tp: int) -> list[int]:
    """Return the possible degrees of expert parallelism; of sizes that no cluster has, small ones only."""
    within, beyond = (range(1, min(size, MOST_RANKS) + 1) for size in (tp, dp))
    return [*(n for n in within if tp % n == 0), *(tp * n for n in beyond[1:] if dp % n == 0)]


class Coord(NamedTuple):
    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, order=True)
class ParallelStrategy:
    """Degrees of data, tensor and pipeline parallelism, written ``d4t2p1`` (``m`` is an alias of ``t``).

    With ``zero3``, written ``d4t2p1z3``, data-parallel ranks have shares of the weights instead of copies (ZeRO-3).
    ``ep``, written ``d4t2p1e4``, divides the routed experts of a layer over so many ranks of a stage: over
    tensor-parallel ranks first, then over adjacent data-parallel ranks, which exchange tokens. With fewer than ``tp``
    each expert is sharded over the other tensor-parallel ranks. ``vpp``, written ``d4t2p2v2``, is the number of chunks
    of layers per pipeline stage: stage s has the chunks s, s + pp and so on (interleaved stages, Narayanan et al. 2021,
    section 2.2). With ``context``, written ``d4c2p1``, the ``tp`` ranks of a stage have shares of the tokens and whole
    weights (context parallelism) instead of shares of the weights.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero3: bool = False
    ep: int = 1
    vpp: int = 1
    context: bool = False

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp, self.ep, self.vpp) < 1:
            raise ValueError(f"parallel degrees must be positive, got {self}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"{self}: chunks of layers need at least two pipeline stages; leave out v{self.vpp}")
        if self.zero3 and self.dp == 1:
            raise ValueError(f"z3 shards weights over data-parallel ranks, and {self} has one: leave out z3")
        if self.zero3 and self.ep > 1:
            raise ValueError(f"{self}: z3 already shards experts over data-parallel ranks; leave out z3 or e{self.ep}")
        if self.context and (self.zero3 or self.ep > 1 or self.tp == 1):
            raise ValueError(f"{self}: c divides the tokens of rows over at least two ranks, without e and z3")
        if not is_expert_degree(self.ep, self.dp, self.tp):
            legal = ", ".join(map(str, expert_degrees(self.dp, self.tp)))
            raise ValueError(
                f"{self}: the degree of expert parallelism divides t, or is t times a divisor of d: {legal}"
            )

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def n_replicas(self) -> int:
        """Number of copies of all weights; with expert parallelism there may be more of those that are no experts'."""
        return 1 if self.zero3 else self.dp * self.tp if self.context else self.dp // self.expert_dp

    @property
    def weight_tp(self) -> int:
        """Number of tensor-parallel ranks, which have shares of the weights."""
        return 1 if self.context else self.tp

    @property
    def weight_dp(self) -> int:
        """Number of ranks of a stage that train the same weights, if these are no experts."""
        return self.dp * self.tp // self.weight_tp

    @property
    def expert_dp(self) -> int:
        """Number of data-parallel ranks that divide the experts, and exchange tokens."""
        return max(1, self.ep // self.tp)

    @property
    def n_shards(self) -> int:
        """Number of different shards of a stage's weights; ranks of a replica are ordered stage by stage."""
        return self.tp * self.dp // self.n_replicas

    def shard_number(self, dp: int, tp: int) -> int:
        """Return the number of the shard of a rank among those of its stage."""
        return 0 if self.context else dp % (self.n_shards // self.tp) * self.tp + tp

    @property
    def cuts(self) -> Cuts:
        """What determines the boxes of the shards of a stage."""
        return Cuts(self.weight_tp, self.n_shards, self.ep)

    def with_zero3(self, wanted: bool) -> "ParallelStrategy":
        """Return this strategy with or without ZeRO-3; on one data-parallel rank both are the same."""
        return replace(self, zero3=wanted and self.dp > 1)

    def for_generation(self) -> "ParallelStrategy":
        """Return the nearest strategy of a model that generates: whole layers and rows, one chunk of layers per stage.

        Experts are not divided over data-parallel ranks, which make different numbers of steps.
        """
        return replace(self, zero3=False, ep=min(self.ep, self.tp), vpp=1, context=False)

    def __str__(self) -> str:
        chunks, experts = f"v{self.vpp}" if self.vpp != 1 else "", f"e{self.ep}" if self.ep > 1 else ""
        shares = f"{'c' if self.context else 't'}{self.tp}"
        return f"d{self.dp}{shares}p{self.pp}{chunks}{experts}{'z3' if self.zero3 else ''}"

    @staticmethod
    def parse(text: str) -> "ParallelStrategy":
        """Parse ``d4t2p1``, ``d4p2v2``, ``d4e2``, ``d4z3``, degrees in any order and case; ValueError for others."""
        lower = text.strip().lower()
        if not re.fullmatch(r"(?:[dtmpevc][1-9][0-9]*){1,5}(?:z3)?", lower):
            raise ValueError(f"'{text}' is not a parallel strategy; write it like d4t2p1 (or d4t2e8, p2v2, d4c2, d4z3)")
        zero3, degrees = lower.endswith("z3"), dict[str, int]()
        for letter, number in re.findall(r"([dtmpevc])(\d+)", lower):
            axis = {"d": "dp", "t": "tp", "m": "tp", "c": "tp", "p": "pp", "e": "ep", "v": "vpp"}[letter]
            if axis in degrees:
                raise ValueError(f"'{text}' gives the {axis} degree twice" + " (c replaces t)" * ("c" in lower))
            degrees[axis] = int(number)
        return ParallelStrategy(**degrees, zero3=zero3, context="c" in lower and degrees["tp"] > 1)


@dataclass(frozen=True)
class DeviceMesh:
    """An ordered group of model workers, by global rank."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ValueError(f"a device mesh needs distinct ranks >= 0, got {self.ranks}")

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if self.ranks == tuple(range(first, last + 1)):
            return f"{first}" if first == last else f"{first}-{last}"
        return ",".join(map(str, self.ranks))

    @staticmethod
    def parse(text: str, n_nodes: int, n_per_node: int) -> "DeviceMesh":
        """Parse ``node01:0-3``, ``node[01-02]``, ``node01,node02`` (nodes count from 1), or plain ranks ``0-2,5``.

        Parts may be mixed, ``NODE[01-02,05],NODE07:0,1``; numbers after a colon are slots of the node.
        """
        compact, start = re.sub(r"\s*,\s*", ",", text.strip()), 0
        ranks: list[int] = []
        while start < len(compact):
            if not (part := MESH_PART.match(compact, start)):
                every = DeviceMesh(tuple(range(n_nodes * n_per_node)))
                raise ValueError(f"'{compact[start:]}' in device mesh '{text}' is not like node01, node01:0-3, "
                                 f"node[01-02] or 0-3; nearest legal: {every}")  # fmt: skip
            ranks += _ranks_of(part, text, n_nodes, n_per_node)
            start = part.end()
        if not ranks:
            raise ValueError("the device mesh is empty")
        if len(set(ranks)) != len(ranks):
            once = DeviceMesh(tuple(dict.fromkeys(ranks)))
            raise ValueError(f"device mesh '{text}' names a worker twice; nearest legal: {once}")
        return DeviceMesh(tuple(ranks))


def _ranks_of(part: re.Match[str], text: str, n_nodes: int, n_per_node: int) -> list[int]:
    node, nodes, slots, plain = part.groups()
    if plain:
        return _numbers(plain, text, "worker", 0, n_nodes * n_per_node - 1)
    selected = _numbers(slots, text, "slot", 0, n_per_node - 1) if slots else range(n_per_node)
    return [(n - 1) * n_per_node + s for n in _numbers(node or nodes, text, "node", 1, n_nodes) for s in selected]


def _numbers(spans: str, text: str, what: str, low: int, high: int) -> list[int]:
    """Parse ``01-02,05``; ValueError for numbers outside ``low`` to ``high``."""
    numbers: list[int] = []
    for span in spans.split(","):
        first, _, last = span.partition("-")
        start, stop = int(first), int(last or first)
        for bound in (start, stop):
            if not low <= bound <= high:
                raise ValueError(f"device mesh '{text}' names {what} {bound}, but there are {what}s {low} to {high}; "
                                 f"nearest legal: {what} {min(max(bound, low), high)}")  # fmt: skip
        if start > stop:
            raise ValueError(f"device mesh '{text}': the range {span} is descending; nearest legal: {last}-{first}")
        numbers += range(start, stop + 1)
    return numbers


@dataclass(frozen=True)
class Layout:
    """Mesh + strategy. Ranks are ordered pp-major, then dp, then tp: tensor-parallel groups are contiguous."""

    mesh: DeviceMesh
    strategy: ParallelStrategy

    def __post_init__(self) -> None:
        if len(self.mesh.ranks) != self.strategy.world:
            raise ValueError(f"strategy {self.strategy} needs {self.strategy.world} workers, mesh {self.mesh} has "
                             f"{len(self.mesh.ranks)}")  # fmt: skip

    def __str__(self) -> str:
        return f"{self.strategy}@{self.mesh}"

    def starting_at(self, rank: int) -> "Layout":
        """Return the same strategy on contiguous workers, starting with ``rank``."""
        return Layout(DeviceMesh(tuple(range(rank, rank + self.strategy.world))), self.strategy)

    def rank(self, coord: Coord) -> int:
        s = self.strategy
        return self.mesh.ranks[(coord.pp * s.dp + coord.dp) * s.tp + coord.tp]

    def with_zero3(self, wanted: bool) -> "Layout":
        """Return this layout with or without ZeRO-3."""
        return Layout(self.mesh, self.strategy.with_zero3(wanted))

    def for_generation(self) -> "Layout":
        """Return the nearest layout in which a model generates."""
        return Layout(self.mesh, self.strategy.for_generation())

    def coord(self, rank: int) -> Coord:
        """Return the coordinates of a global rank; ValueError for a rank outside the mesh."""
        index, s = self.mesh.ranks.index(rank), self.strategy
        return Coord(index // (s.dp * s.tp), index // s.tp % s.dp, index % s.tp)

    def axis(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the group of ``rank`` along an axis: ``dp``, ``tp``, ``pp``, ``ep``, ``edp`` or ``replicas``.

        ``ep`` are the data-parallel ranks that exchange tokens of experts, ``edp`` those with the same experts.
        ``replicas`` have the same weights that are not experts: data-parallel ranks and, with ``context``, all of the
        stage.
        """
        if name == "replicas":
            size, first = self.strategy.dp * self.strategy.tp, self.mesh.ranks.index(rank)
            stage = self.mesh.ranks[first // size * size : first // size * size + size]
            return stage if self.strategy.context else self.axis("dp", rank)
        coord, n = self.coord(rank), self.strategy.expert_dp
        if name in ("ep", "edp"):
            group, at = self.axis("dp", rank), coord.dp
            return group[at // n * n : at // n * n + n] if name == "ep" else group[at % n :: n]
        return tuple(self.rank(coord._replace(**{name: i})) for i in range(getattr(self.strategy, name)))

    def replica(self, dp: int) -> tuple[int, ...]:
        """Return the workers of one data-parallel replica, stage by stage."""
        s, ranks = self.strategy, self.mesh.ranks
        starts = [(p * s.dp + dp) * s.tp for p in range(s.pp)]
        return tuple([rank for start in starts for rank in ranks[start : start + s.tp]])

    def has_first_copy(self, rank: int) -> bool:
        """Return True for the workers that have, together, one copy of all weights."""
        at, strategy = self.coord(rank), self.strategy
        return strategy.zero3 or (at.dp < strategy.expert_dp and not (strategy.context and at.tp))

    def dp_heads(self) -> tuple[int, ...]:
        """Return the worker that holds the rows of each data-parallel rank: the first of its last stage."""
        return tuple(self.rank(Coord(self.strategy.pp - 1, d, 0)) for d in range(self.strategy.dp))
