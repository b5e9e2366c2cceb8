"""Plans by rule, for any shape of cluster: what people write by hand, and where a search starts.

A rule gives every call a layout; whether some of them fit the devices together is asked of ``fits``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from realhf.api.graph import MFC, Graph, Kind
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.plan.compile.strategies import strategies

Layouts = dict[str, Layout]


@dataclass(frozen=True)
class Cluster:
    n_workers: int
    node_size: int

    def mesh(self, start: int, size: int) -> DeviceMesh:
        return DeviceMesh(tuple(range(start, start + size)))

    @property
    def whole(self) -> DeviceMesh:
        return self.mesh(0, self.n_workers)

    def split(self, shares: Mapping[str, float]) -> dict[str, DeviceMesh]:
        """Cut the cluster into meshes of about these shares, whole nodes where there are enough of them."""
        unit = self.node_size if self.n_workers >= len(shares) * self.node_size else 1
        units, total = self.n_workers // unit, sum(shares.values())
        sizes = {name: max(1, round(units * share / total)) for name, share in shares.items()}
        while sum(sizes.values()) > units:
            sizes[max(sizes, key=lambda n: sizes[n])] -= 1
        sizes[max(shares, key=lambda n: shares[n])] += units - sum(sizes.values())
        found, start = {}, 0
        for name, size in sizes.items():
            found[name] = self.mesh(start * unit, size * unit)
            start += size
        return found


Fits = Callable[[Layouts], bool]
Models = Mapping[str, ModelConfig]
Order = Callable[[ParallelStrategy], tuple[int, int]]


def megatron(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """One strategy for all calls on all devices, as Megatron-LM's guide has it (Narayanan et al. 2021, section 3.6).

    Tensor parallelism over a node, pipeline stages across nodes as far as memory asks for them, data parallelism with
    the rest.
    """
    return _alike(graph, models, cluster, fits, lambda s: (-s.tp, s.pp))


def pipe_model(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """ReaL's default mode: tensor parallelism over a node, a pipeline stage for every node; of as many as are legal."""
    return _alike(graph, models, cluster, lambda _: True, lambda s: (-s.tp, -s.pp))


def symmetric(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """One strategy for all calls on all devices: with as few stages, then as few cuts, as fit."""
    return _alike(graph, models, cluster, fits, _fewest_stages)


def _alike(graph: Graph, models: Models, cluster: Cluster, fits: Fits, order: Order) -> Layouts:
    options = [set(strategies(cluster.n_workers, cluster.node_size, models.get(role))) for role in graph.roles]
    common = set.intersection(*options) if options else {ParallelStrategy(dp=cluster.n_workers)}
    if not common:
        return {m.name: best_on(cluster.whole, m, models, cluster, fits) for m in graph.mfcs}
    without_model = Layout(cluster.whole, ParallelStrategy(dp=cluster.n_workers))
    found: Layouts = {}
    for strategy in sorted(common, key=order):
        found = {m.name: Layout(cluster.whole, strategy) if m.role else without_model for m in graph.mfcs}
        if fits(found):
            break
    return found


def real(graph: Graph, models: Models, cluster: Cluster, fits: Fits) -> Layouts:
    """ReaL's rule (Mei et al. 2024), for any number of devices.

    The whole cluster generates, with as few cuts as fit; trained roles share the cluster out by their sizes, and so do
    the inference calls, which may run side by side.
    """
    found: Layouts = {}
    training = [m for m in graph.mfcs if m.is_train]
    beside = [m for m in graph.mfcs if m.kind is Kind.INFERENCE and m.role]
    for group in (training, beside):
        if group and cluster.n_workers >= len(group):
            shares = {m.name: float(_size(models[m.role])) for m in group if m.role}
            meshes = cluster.split(shares)
            found |= {m.name: best_on(meshes[m.name], m, models, cluster, fits) for m in group}
    for m in graph.mfcs:
        if m.name not in found:
            found[m.name] = best_on(cluster.whole, m, models, cluster, fits)
    return found


def split(graph: Graph, models: Models, cluster: Cluster, fits: Fits, share: float = 0.5) -> Layouts:
    """Generation on one part of the cluster, everything else on the other."""
    if cluster.n_workers < 2:
        return symmetric(graph, models, cluster, fits)
    meshes = cluster.split({"generation": share, "rest": 1.0 - share})
    return {
        m.name: best_on(meshes["generation" if m.kind is Kind.GENERATE else "rest"], m, models, cluster, fits)
        for m in graph.mfcs
    }


def best_on(mesh: DeviceMesh, mfc: MFC, models: Models, cluster: Cluster, fits: Fits) -> Layout:
    """Return the first strategy that fits a mesh: fewest stages for training, else fewest cuts of any kind."""
    config = models.get(mfc.role) if mfc.role else None
    order = _fewest_stages if mfc.is_train else _fewest_cuts
    found = [Layout(mesh, s) for s in sorted(strategies(len(mesh.ranks), cluster.node_size, config), key=order)]
    if not found:  # a number of workers that no legal strategy has: leave some idle
        return best_on(DeviceMesh(mesh.ranks[:-1]), mfc, models, cluster, fits)
    return next((layout for layout in found if fits({mfc.name: layout})), found[-1])


def _fewest_stages(s: ParallelStrategy) -> tuple[int, int]:
    return (s.pp, s.tp)


def _fewest_cuts(s: ParallelStrategy) -> tuple[int, int]:
    return (s.tp * s.pp, s.tp)


def _size(config: ModelConfig) -> int:
    return config.n_layers * config.hidden * (config.hidden + (config.intermediate or config.expert_intermediate))


HEURISTICS: dict[str, Callable[[Graph, Models, Cluster, Fits], Layouts]] = {
    "megatron": megatron,
    "pipe_model": pipe_model,
    "symmetric": symmetric,
    "real": real,
    "split": split,
}
