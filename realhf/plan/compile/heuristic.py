"""Heuristic plans for any shape of cluster, which assign a layout to every call; a search starts from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.plan.compile.check import contiguous_mesh, strategies

Layouts = dict[str, Layout]


@dataclass(frozen=True)
class Cluster:
    n_workers: int
    node_size: int

    @property
    def whole(self) -> DeviceMesh:
        return contiguous_mesh(self.n_workers)

    def split(self, shares: Mapping[str, float]) -> dict[str, DeviceMesh]:
        """Split the cluster into meshes with sizes near these shares, in whole nodes if there are enough."""
        unit = self.node_size if self.n_workers >= len(shares) * self.node_size else 1
        units, total = self.n_workers // unit, sum(shares.values())
        sizes = {name: max(1, round(units * share / total)) for name, share in shares.items()}
        while sum(sizes.values()) > units:
            sizes[max(sizes, key=lambda n: sizes[n])] -= 1
        sizes[max(shares, key=lambda n: shares[n])] += units - sum(sizes.values())
        stops = accumulate(sizes.values())
        return {
            n: contiguous_mesh(sizes[n] * unit, (stop - sizes[n]) * unit) for n, stop in zip(sizes, stops, strict=True)
        }


Fits = Callable[[Layouts], bool]  # returns True if the given layouts fit in the memory of the workers
Models = Mapping[str, ModelConfig]
Order = Callable[[ParallelStrategy], tuple[int, int]]
_fewest_stages = attrgetter("pp", "tp")


def megatron(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """One strategy for all calls on all devices, as Narayanan et al. 2021 (section 3.6) recommend.

    Tensor parallelism within a node, as few pipeline stages as memory allows, data parallelism with the rest.
    """
    return _same_strategy(graph, models, cluster, fits, lambda s: (-s.tp, s.pp))


def pipe_model(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """ReaL's default mode: tensor parallelism within a node, one pipeline stage per node, as far as valid."""
    return _same_strategy(graph, models, cluster, lambda _: True, lambda s: (-s.tp, -s.pp))


def symmetric(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """One strategy for all calls on all devices, with the lowest pipeline, then tensor parallelism that fits."""
    return _same_strategy(graph, models, cluster, fits, _fewest_stages)


def _same_strategy(graph: Graph, models: Models, cluster: Cluster, fits: Fits, order: Order) -> Layouts:
    options = [set(strategies(cluster.n_workers, cluster.node_size, models.get(role))) for role in graph.roles]
    common = set.intersection(*options) if options else {ParallelStrategy(dp=cluster.n_workers)}
    if not common:
        return {m.name: best_on(cluster.whole, m, models, cluster, fits) for m in graph.mfcs}
    data_parallel = ParallelStrategy(dp=cluster.n_workers)  # of calls without a model
    found = [
        {m.name: Layout(cluster.whole, strategy if m.role else data_parallel) for m in graph.mfcs}
        for strategy in sorted(common, key=order)
    ]
    return next(filter(fits, found), found[-1])


def real(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """ReaL's heuristic (Mei et al. 2024), for any number of devices.

    Generation uses the whole cluster with the lowest model parallelism that fits. The training calls divide the cluster
    by model size, and so do the inference calls, which can run concurrently.
    """
    chosen: Layouts = {}
    training = [m for m in graph.mfcs if m.is_train]
    inference = [m for m in graph.mfcs if m.kind is Kind.INFERENCE and m.role]
    for group in (training, inference):
        if group and cluster.n_workers >= len(group):
            shares = {m.name: float(_size(models[m.role])) for m in group if m.role}
            meshes = cluster.split(shares)
            chosen |= {m.name: best_on(meshes[m.name], m, models, cluster, fits) for m in group}
    rest = [m for m in graph.mfcs if m.name not in chosen]
    return chosen | {m.name: best_on(cluster.whole, m, models, cluster, fits) for m in rest}


def split(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """Generation on one half of the cluster, all other calls on the other half."""
    if cluster.n_workers < 2:
        return symmetric(graph, models, cluster, fits)
    halves = cluster.split({"generation": 0.5, "rest": 0.5})
    return {
        m.name: best_on(halves["generation" if m.kind is Kind.GENERATE else "rest"], m, models, cluster, fits)
        for m in graph.mfcs
    }


def best_on(mesh: DeviceMesh, mfc: MFC, models: Models, cluster: Cluster, fits: Fits) -> Layout:
    """Return the layout with the lowest pipeline (training) or model parallelism (others) that fits a mesh."""
    config = models.get(mfc.role) if mfc.role else None
    order: Order = _fewest_stages if mfc.is_train else lambda s: (s.tp * s.pp, s.tp)
    options = [Layout(mesh, s) for s in sorted(strategies(len(mesh.ranks), cluster.node_size, config), key=order)]
    if not options:  # no strategy is valid for this number of workers: leave one idle
        return best_on(DeviceMesh(mesh.ranks[:-1]), mfc, models, cluster, fits)
    return next((layout for layout in options if fits({mfc.name: layout})), options[-1])


def _size(config: ModelConfig) -> int:
    return config.n_layers * config.hidden * (config.hidden + (config.intermediate or config.expert_intermediate))


HEURISTICS: dict[str, Callable[[Graph, Models, Cluster, Fits], Layouts]] = {
    rule.__name__: rule for rule in (megatron, pipe_model, symmetric, real, split)
}
