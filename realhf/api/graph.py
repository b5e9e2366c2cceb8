"""Model function calls (MFCs) and their dataflow graph."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """The name of an interface in ``algorithms.INTERFACES`` (or ``file.py:Class``) and its config as plain data."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MFC:
    """One model function call. ``batch_size`` counts prompts; ``role`` is None for a call without a model.

    ``n_minibatches`` is the number of optimizer steps of a training call. Every mini-batch is balanced over
    data-parallel ranks and contains the same rows under any layout. ``aliases`` are pairs (key of the graph, key of
    the interface). A generating call with ``per_prompt`` makes one row per prompt, shared by all its samples. A call
    with ``resamples`` filters rows; prompts without remaining rows are replaced, up to so many times per step. Keys in
    ``carried`` have one row per prompt, which a generating call passes to its next step's call, for the prompt at the
    same position of the batch.
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
    carried: tuple[str, ...] = ()

    @property
    def is_train(self) -> bool:
        return self.kind is Kind.TRAIN

    def interface_key(self, key: str) -> str:
        return dict(self.aliases).get(key, key)

    def graph_key(self, key: str) -> str:
        """Return the key of the graph for a key of the interface; the inverse of ``interface_key``."""
        return next((ours for ours, theirs in self.aliases if theirs == key), key)

    def allowed_staleness(self, max_staleness: int) -> int:
        """Return the allowed age of the call's weights in steps; only generation may run ahead of training."""
        return max_staleness if self.kind is Kind.GENERATE else 0


@dataclass(frozen=True)
class Sync:
    """After each call of ``after``, ``target`` becomes eta * source + (1 - eta) * target.

    A target without calls is a moving average that is only evaluated and saved.
    """

    after: str
    source: str
    target: str
    eta: float


class GraphError(InfeasibleError):
    """All problems of an invalid graph, with its MFCs for further checks."""

    def __init__(self, problems: Sequence[str], mfcs: tuple[MFC, ...]) -> None:
        super().__init__(problems)
        self.mfcs = mfcs


@dataclass(frozen=True)
class Graph:
    """A directed acyclic graph of MFCs; an edge runs from the producer of a key to each of its consumers.

    ``offloaded`` are the roles whose weights are in host memory between calls. ``evaluation`` are calls on held-out
    rows. They form a separate graph; each uses a role of the training graph in its layout. Raises ``GraphError``.
    """

    mfcs: tuple[MFC, ...]
    syncs: tuple[Sync, ...] = ()
    offloaded: tuple[str, ...] = ()
    evaluation: tuple[MFC, ...] = ()

    def __post_init__(self) -> None:
        problems = graph_problems(self.mfcs, self.syncs, self.offloaded)
        if self.evaluation:
            problems += _evaluation_problems(self.mfcs, self.evaluation, self.roles)
        if problems:
            raise GraphError(problems, self.mfcs)

    def __getitem__(self, name: str) -> MFC:
        return next(m for m in (*self.mfcs, *self.evaluation) if m.name == name)

    def with_batch_sizes(self, sizes: Mapping[str, int]) -> "Graph":
        """Return the graph in which some calls, by name, have no more prompts than ``sizes``."""
        mfcs = (replace(m, batch_size=min(m.batch_size, sizes.get(m.name, m.batch_size))) for m in self.mfcs)
        return replace(self, mfcs=tuple(mfcs))

    def is_divided(self, mfc: MFC) -> bool:
        """Return True if a step has several calls of an MFC."""
        return mfc.batch_size < max(m.batch_size for m in self.mfcs)

    @cached_property
    def eval_graph(self) -> "Graph":
        return Graph(self.evaluation)

    @cached_property
    def producer(self) -> dict[str, MFC]:
        return {key: m for m in self.mfcs for key in m.outputs}

    @cached_property
    def fetcher(self) -> MFC:
        """The first call that reads the data set; its workers fetch the rows."""
        return next(m for m in self.topological if set(self.dataset_keys) & set(m.inputs))

    def parents(self, mfc: MFC) -> tuple[MFC, ...]:
        producers = {self.producer[k].name for k in mfc.inputs if k in self.producer}
        return tuple(m for m in self.mfcs if m.name in producers)

    @cached_property
    def filter_mfc(self) -> MFC | None:
        """The call that filters rows and so requests further prompts."""
        return next((m for m in self.mfcs if m.resamples), None)

    @cached_property
    def after_filter(self) -> frozenset[str]:
        """Names of the direct and indirect consumers of ``filter_mfc``."""
        return _descendants(self.mfcs, self.filter_mfc) if self.filter_mfc else frozenset()

    def trainer(self, role: str) -> MFC | None:
        return next((m for m in self.mfcs if m.role == role and m.is_train), None)

    def updater(self, role: str) -> MFC | None:
        """Return the call after which a role has new weights: its trainer, or the call of its sync."""
        return self.trainer(role) or next((self[sync.after] for sync in self.syncs if sync.target == role), None)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of calls, then the moving averages without calls."""
        return tuple(dict.fromkeys([*(m.role for m in self.mfcs if m.role), *(sync.target for sync in self.syncs)]))

    @property
    def results(self) -> list[str]:
        """The roles whose models are results of training: those that are trained, and their moving averages."""
        called = {m.role for m in self.mfcs}
        return [role for role in self.roles if self.trainer(role) or role not in called]

    @property
    def dataset_keys(self) -> tuple[str, ...]:
        """Keys without a producer, which the dataset must contain."""
        needed = dict.fromkeys(k for m in self.mfcs for k in m.inputs)
        return tuple(k for k in needed if k not in self.producer)

    @cached_property
    def topological(self) -> tuple[MFC, ...]:
        """MFCs in topological order; ties keep the declared order."""
        depth: dict[str, int] = {}
        for name in TopologicalSorter({m.name: [p.name for p in self.parents(m)] for m in self.mfcs}).static_order():
            depth[name] = 1 + max((depth[p.name] for p in self.parents(self[name])), default=-1)
        return tuple(sorted(self.mfcs, key=lambda m: depth[m.name]))


def graph_problems(mfcs: tuple[MFC, ...], syncs: Sequence[Sync] = (), offloaded: Sequence[str] = ()) -> list[str]:
    problems = _call_problems(mfcs) + _role_problems(mfcs, syncs, offloaded)
    edges: dict[str, list[str]] = {m.name: [] for m in mfcs}
    for m in mfcs:
        edges[m.name] += [producer.name for producer in mfcs if set(m.inputs) & set(producer.outputs)]
    problems += ["MFCs form a cycle: " + " -> ".join(cycle) for cycle in _cycles(edges)]
    outputs = {key for m in mfcs for key in m.outputs}
    if not problems and all(key in outputs for m in mfcs for key in m.inputs):
        problems.append("no MFC reads a key of the dataset")
    return problems


def _evaluation_problems(mfcs: tuple[MFC, ...], evaluation: tuple[MFC, ...], roles: Sequence[str]) -> list[str]:
    names = {m.name for m in mfcs}
    problems = graph_problems(evaluation)
    for m in evaluation:
        if m.name in names:
            problems.append(f"MFC name '{m.name}' is used in training and in the evaluation")
        if m.is_train:
            problems.append(f"MFC {m.name}: a training call cannot be part of the evaluation")
        if m.role not in (None, *roles):
            problems.append(f"MFC {m.name}: role '{m.role}' is not in the training graph")
    return problems


def _call_problems(mfcs: tuple[MFC, ...]) -> list[str]:
    names = [m.name for m in mfcs]
    problems = [f"MFC name '{n}' is used twice" for n in sorted({n for n in names if names.count(n) > 1})]
    producers: dict[str, list[str]] = {}
    for m in mfcs:
        for key in m.outputs:
            producers.setdefault(key, []).append(m.name)
        if m.batch_size < 1:
            problems.append(f"MFC {m.name}: batch_size must be positive, got {m.batch_size}")
        if m.n_minibatches < 1:
            problems.append(f"MFC {m.name}: n_minibatches must be positive, got {m.n_minibatches}")
        if m.role is None and m.kind is not Kind.INFERENCE:
            problems.append(f"MFC {m.name}: kind {m.kind.value} needs a role")
    if filters := [m for m in mfcs if m.resamples]:
        problems += [f"MFC {m.name}: {filters[0].name} has resamples already" for m in filters[1:]]
        problems += [f"MFC {m.name}: resamples must not be negative" for m in filters if m.resamples < 0]
        after = _descendants(mfcs, filters[0])
        problems += [f"MFC {m.name} trains on rows that are not filtered by {filters[0].name}"
                     for m in mfcs if m.is_train and m.name not in after]  # fmt: skip
    return problems + [f"key '{k}' is produced by {' and '.join(v)}" for k, v in producers.items() if len(v) > 1]


def _descendants(mfcs: tuple[MFC, ...], origin: MFC) -> frozenset[str]:
    """Return the names of the direct and indirect consumers of ``origin``."""
    names: set[str] = set()
    keys = set(origin.outputs)
    while consumers := [m for m in mfcs if m.name not in names and keys & set(m.inputs)]:
        names |= {m.name for m in consumers}
        keys |= {key for m in consumers for key in m.outputs}
    return frozenset(names)


def _role_problems(mfcs: tuple[MFC, ...], syncs: Sequence[Sync], offloaded: Sequence[str]) -> list[str]:
    names, roles = {m.name for m in mfcs}, {m.role for m in mfcs}
    trainers: dict[str, list[str]] = {}
    for m in mfcs:
        if m.is_train and m.role:
            trainers.setdefault(m.role, []).append(m.name)
    problems = [f"role '{r}' is trained by {' and '.join(v)}" for r, v in trainers.items() if len(v) > 1]
    for sync in syncs:
        if sync.after not in names:
            problems.append(f"role '{sync.target}' is synced with '{sync.source}' after unknown MFC '{sync.after}'")
        if sync.source not in roles:
            problems.append(f"sync after {sync.after}: no MFC has role '{sync.source}'")
    return problems + [f"offloaded: no MFC has role '{r}'" for r in offloaded if r not in roles]


def _cycles(edges: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    while True:
        try:
            TopologicalSorter(edges).prepare()
            return
        except CycleError as error:
            yield error.args[1]
            edges = {name: [n for n in needs if n not in error.args[1]]
                     for name, needs in edges.items() if name not in error.args[1]}  # fmt: skip
