"""What is computed from what: model function calls and the graph that their keys make."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from realhf.base.errors import InfeasibleError


class Kind(Enum):
    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN = "train"


@dataclass(frozen=True)
class InterfaceSpec:
    """An interface by value: its name in ``algorithms.INTERFACES`` (or ``file.py:Class``) and its plain config."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MFC:
    """One model function call. ``batch_size`` counts prompts; ``role`` is None where no model is needed.

    ``n_minibatches`` is how many optimizer steps a training call makes: rows are dealt to data-parallel ranks so that
    every mini-batch is balanced, and is the same set of rows under any layout. ``aliases`` are pairs (key of the graph,
    what the interface calls it). With ``per_prompt`` a generating call makes one row for every prompt, which all its
    samples share. With ``resamples`` the call drops rows, and for prompts that have none left others are drawn, up to so
    many times a step.
    """

    name: str
    role: str | None
    kind: Kind
    interface: InterfaceSpec
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    batch_size: int = 1
    n_minibatches: int = 1
    aliases: tuple[tuple[str, str], ...] = ()
    per_prompt: bool = False
    resamples: int = 0

    @property
    def is_train(self) -> bool:
        return self.kind is Kind.TRAIN

    def interface_key(self, key: str) -> str:
        """Return what the interface calls a key of the graph."""
        return dict(self.aliases).get(key, key)

    def graph_key(self, key: str) -> str:
        """Return the key of the graph that the interface calls ``key``."""
        return next((ours for ours, theirs in self.aliases if theirs == key), key)

    def allowed_staleness(self, max_staleness: int) -> int:
        """Return how many steps older than its rows the call's weights may be: only rollout may be ahead."""
        return max_staleness if self.kind is Kind.GENERATE else 0


@dataclass(frozen=True)
class Sync:
    """After each call of ``after``, role ``target`` follows role ``source``: eta * source + (1 - eta) * target."""

    after: str
    source: str
    target: str
    eta: float


class GraphError(InfeasibleError):
    """MFCs that make no graph: every reason, and the MFCs themselves for whoever looks on."""

    def __init__(self, problems: Sequence[str], mfcs: tuple[MFC, ...]) -> None:
        super().__init__(problems)
        self.mfcs = mfcs


@dataclass(frozen=True)
class Graph:
    """A directed acyclic graph of MFCs; an edge runs from the producer of a key to each of its consumers.

    ``offloaded`` are the roles whose weights rest in host memory between calls. ``evaluation`` are calls on held-out
    rows, a graph of their own, of roles that take part in the steps; each runs where its role lives. Raises
    ``GraphError``.
    """

    mfcs: tuple[MFC, ...]
    syncs: tuple[Sync, ...] = ()
    offloaded: tuple[str, ...] = ()
    evaluation: tuple[MFC, ...] = ()

    def __post_init__(self) -> None:
        problems = graph_problems(self.mfcs, self.syncs, self.offloaded)
        if self.evaluation:
            problems += _evaluation_problems(self.mfcs, self.evaluation)
        if problems:
            raise GraphError(problems, self.mfcs)

    def __getitem__(self, name: str) -> MFC:
        return next(m for m in (*self.mfcs, *self.evaluation) if m.name == name)

    @cached_property
    def eval_graph(self) -> "Graph":
        """The calls on held-out rows as a graph."""
        return Graph(self.evaluation)

    @cached_property
    def producer(self) -> dict[str, MFC]:
        return {key: m for m in self.mfcs for key in m.outputs}

    def parents(self, mfc: MFC) -> tuple[MFC, ...]:
        made_by = {self.producer[k].name for k in mfc.inputs if k in self.producer}
        return tuple(m for m in self.mfcs if m.name in made_by)

    def children(self, mfc: MFC) -> tuple[MFC, ...]:
        return tuple(m for m in self.mfcs if set(m.inputs) & set(mfc.outputs))

    @cached_property
    def filter_mfc(self) -> MFC | None:
        """The call that decides whether prompts are drawn anew."""
        return next((m for m in self.mfcs if m.resamples), None)

    @cached_property
    def after_filter(self) -> frozenset[str]:
        """Names of the calls that read what the picker keeps, also by way of others."""
        return _descendants(self.mfcs, self.filter_mfc) if self.filter_mfc else frozenset()

    def trainer(self, role: str) -> MFC | None:
        return next((m for m in self.mfcs if m.role == role and m.is_train), None)

    def updater(self, role: str) -> MFC | None:
        """Return the call after which a role has new weights: its trainer, or the one that it follows."""
        followed = next((self[sync.after] for sync in self.syncs if sync.target == role), None)
        return self.trainer(role) or followed

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.role for m in self.mfcs if m.role is not None))

    @property
    def dataset_keys(self) -> tuple[str, ...]:
        """Keys that no MFC makes: the data set must bring them."""
        needed = dict.fromkeys(k for m in self.mfcs for k in m.inputs)
        return tuple(k for k in needed if k not in self.producer)

    @cached_property
    def topological(self) -> tuple[MFC, ...]:
        """MFCs in an order in which every producer precedes its consumers; ties keep the declared order."""
        depth: dict[str, int] = {}
        for name in TopologicalSorter({m.name: [p.name for p in self.parents(m)] for m in self.mfcs}).static_order():
            depth[name] = 1 + max((depth[p.name] for p in self.parents(self[name])), default=-1)
        return tuple(sorted(self.mfcs, key=lambda m: depth[m.name]))


def graph_problems(mfcs: tuple[MFC, ...], syncs: Sequence[Sync] = (), offloaded: Sequence[str] = ()) -> list[str]:
    """Return every reason why these make no graph; an empty list means that they do."""
    problems = _call_problems(mfcs) + _role_problems(mfcs, syncs, offloaded)
    edges: dict[str, list[str]] = {m.name: [] for m in mfcs}
    for m in mfcs:
        edges[m.name] += [maker.name for maker in mfcs if set(m.inputs) & set(maker.outputs)]
    problems += ["MFCs wait for each other: " + " -> ".join(cycle) for cycle in _cycles(edges)]
    made = {key for m in mfcs for key in m.outputs}
    if not problems and all(key in made for m in mfcs for key in m.inputs):
        problems.append("no MFC reads a key of the data set")
    return problems


def _evaluation_problems(mfcs: tuple[MFC, ...], evaluation: tuple[MFC, ...]) -> list[str]:
    """Return every reason why ``evaluation`` cannot go with the calls of a step."""
    names, roles = {m.name for m in mfcs}, {m.role for m in mfcs}
    problems = graph_problems(evaluation)
    for m in evaluation:
        if m.name in names:
            problems.append(f"MFC name '{m.name}' is used in the steps and in the evaluation")
        if m.is_train:
            problems.append(f"MFC {m.name}: an evaluation does not train")
        if m.role not in (None, *roles):
            problems.append(f"MFC {m.name}: role '{m.role}' takes no part in the steps")
    return problems


def _call_problems(mfcs: tuple[MFC, ...]) -> list[str]:
    """Say what is wrong with single MFCs and with the keys that they make."""
    names = [m.name for m in mfcs]
    problems = [f"MFC name '{n}' is used twice" for n in sorted({n for n in names if names.count(n) > 1})]
    makers: dict[str, list[str]] = {}
    for m in mfcs:
        for key in m.outputs:
            makers.setdefault(key, []).append(m.name)
        if m.batch_size < 1:
            problems.append(f"MFC {m.name}: batch_size must be positive, got {m.batch_size}")
        if m.n_minibatches < 1:
            problems.append(f"MFC {m.name}: n_minibatches must be positive, got {m.n_minibatches}")
        if m.role is None and m.kind is not Kind.INFERENCE:
            problems.append(f"MFC {m.name}: kind {m.kind.value} needs a role, it computes with a model")
    if pickers := [m for m in mfcs if m.resamples]:
        problems += [f"MFC {m.name}: resamples are those of {pickers[0].name} already" for m in pickers[1:]]
        problems += [f"MFC {m.name}: resamples must not be negative" for m in pickers if m.resamples < 0]
        after = _descendants(mfcs, pickers[0])
        problems += [f"MFC {m.name} trains, but reads nothing of {pickers[0].name}, for which prompts are drawn anew"
                     for m in mfcs if m.is_train and m.name not in after]  # fmt: skip
    return problems + [f"key '{k}' is produced by {' and '.join(v)}" for k, v in makers.items() if len(v) > 1]


def _descendants(mfcs: tuple[MFC, ...], origin: MFC) -> frozenset[str]:
    """Return the names of the calls that read an output of ``origin``, or of one of these."""
    found: set[str] = set()
    keys = set(origin.outputs)
    while more := [m for m in mfcs if m.name not in found and keys & set(m.inputs)]:
        found |= {m.name for m in more}
        keys |= {key for m in more for key in m.outputs}
    return frozenset(found)


def _role_problems(mfcs: tuple[MFC, ...], syncs: Sequence[Sync], offloaded: Sequence[str]) -> list[str]:
    """Say what is wrong with who is trained, who follows whom, and who rests."""
    names, roles = {m.name for m in mfcs}, {m.role for m in mfcs}
    trainers: dict[str, list[str]] = {}
    for m in mfcs:
        if m.is_train and m.role:
            trainers.setdefault(m.role, []).append(m.name)
    problems = [f"role '{r}' is trained by {' and '.join(v)}" for r, v in trainers.items() if len(v) > 1]
    for sync in syncs:
        if sync.after not in names:
            problems.append(f"role '{sync.target}' follows '{sync.source}' after '{sync.after}', which is no MFC")
        problems += [f"sync after {sync.after}: no MFC has role '{r}'"
                     for r in (sync.source, sync.target) if r not in roles]  # fmt: skip
    return problems + [f"offloaded: no MFC has role '{r}'" for r in offloaded if r not in roles]


def _cycles(edges: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Yield cycles, each of MFCs that none before it has."""
    while True:
        try:
            TopologicalSorter(edges).prepare()
            return
        except CycleError as error:
            yield error.args[1]
            edges = {name: [n for n in needs if n not in error.args[1]]
                     for name, needs in edges.items() if name not in error.args[1]}  # fmt: skip
