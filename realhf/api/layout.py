"""Where and how one model is cut: device mesh + parallel strategy = layout. What moves between layouts lives in plan/."""

import re
from dataclasses import dataclass
from typing import NamedTuple


class Coord(NamedTuple):
    """A worker's place inside a layout."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, order=True)
class ParallelStrategy:
    """Degrees of data, tensor and pipeline parallelism; written ``d4t2p1`` (``m`` for ``t`` is read too)."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp) < 1:
            raise ValueError(f"parallel degrees must be positive, got {self}")

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"d{self.dp}t{self.tp}p{self.pp}"

    @staticmethod
    def parse(text: str) -> "ParallelStrategy":
        """Read ``d4t2p1``, ``d4p1m2`` or any order of the letters; anything left over is an error."""
        if not re.fullmatch(r"(?:[dtmp][1-9]\d*){1,3}", text):
            raise ValueError(f"'{text}' is not a parallel strategy; write it like d4t2p1 (or d4p1m2)")
        degrees: dict[str, int] = {}
        for letter, number in re.findall(r"([dtmp])(\d+)", text):
            axis = {"d": "dp", "t": "tp", "m": "tp", "p": "pp"}[letter]
            if axis in degrees:
                raise ValueError(f"'{text}' gives the {axis} degree twice")
            degrees[axis] = int(number)
        return ParallelStrategy(**degrees)


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
        """Read ``node01:0-3``, ``node[01-02]``, ``node01,node02`` (nodes count from 1), or plain ranks ``0-2,5``."""
        ranks: list[int] = []
        for part in re.findall(r"[^,\[:]+(?:\[[^\]]*\])?(?::[\d,-]+?(?=,[A-Za-z]|$))?", text):
            ranks += _mesh_part(part, text, n_nodes, n_per_node)
        if not ranks:
            raise ValueError(f"'{text}' names no worker")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"device mesh '{text}' names a worker twice")
        return DeviceMesh(tuple(ranks))


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if not match:
            raise ValueError(f"'{piece}' is not a number or a range")
        first, last = int(match[1]), int(match[2] or match[1])
        numbers += range(first, last + 1)
    return numbers


def _mesh_part(part: str, text: str, n_nodes: int, n_per_node: int) -> list[int]:
    plain = re.fullmatch(r"\s*[\d-]+\s*", part)
    match = re.fullmatch(r"\s*[A-Za-z]+(?:(\d+)|\[([^\]]+)\])(?::([\d,-]+))?\s*", part)
    if plain:
        ranks = _numbers(part)
    elif match:
        nodes = _numbers(match[1] or match[2])
        slots = _numbers(match[3]) if match[3] else list(range(n_per_node))
        if bad := [n for n in nodes if not 1 <= n <= n_nodes]:
            raise ValueError(f"device mesh '{text}' names node {bad[0]}, but there are nodes 1 to {n_nodes}")
        if bad := [s for s in slots if not 0 <= s < n_per_node]:
            raise ValueError(f"device mesh '{text}' names slot {bad[0]}, but a node has slots 0 to {n_per_node - 1}")
        ranks = [(n - 1) * n_per_node + s for n in nodes for s in slots]
    else:
        raise ValueError(f"'{part}' in device mesh '{text}' is not like node01, node01:0-3 or node[01-02]")
    if bad := [r for r in ranks if r >= n_nodes * n_per_node]:
        raise ValueError(f"device mesh '{text}' names worker {bad[0]}, but there are {n_nodes * n_per_node} workers")
    return ranks


@dataclass(frozen=True)
class Layout:
    """Mesh + strategy. Ranks are laid out pp-major, then dp, then tp, so that a tensor group is contiguous."""

    mesh: DeviceMesh
    strategy: ParallelStrategy

    def __post_init__(self) -> None:
        if len(self.mesh.ranks) != self.strategy.world:
            raise ValueError(f"strategy {self.strategy} needs {self.strategy.world} workers, mesh {self.mesh} has "
                             f"{len(self.mesh.ranks)}")  # fmt: skip

    def __str__(self) -> str:
        return f"{self.strategy}@{self.mesh}"

    def rank(self, coord: Coord) -> int:
        s = self.strategy
        return self.mesh.ranks[(coord.pp * s.dp + coord.dp) * s.tp + coord.tp]

    def coord(self, rank: int) -> Coord:
        """Return the coordinate of a global rank; ``ValueError`` when the rank is outside the mesh."""
        index, s = self.mesh.ranks.index(rank), self.strategy
        return Coord(index // (s.dp * s.tp), index // s.tp % s.dp, index % s.tp)

    def axis(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that share all coordinates of ``rank`` but the one named (``dp``, ``tp`` or ``pp``)."""
        at = self.coord(rank)
        return tuple(self.rank(at._replace(**{name: i})) for i in range(getattr(self.strategy, name)))

    def dp_heads(self) -> tuple[int, ...]:
        """Return, per data-parallel rank, the worker that holds its rows: the last stage's first tensor rank."""
        return tuple(self.rank(Coord(self.strategy.pp - 1, d, 0)) for d in range(self.strategy.dp))
