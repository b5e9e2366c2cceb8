"""A machine as it was measured: small linear models of seconds and bytes, and the ``Speed`` that they make.

``system/profiler/profiler.py`` takes the measurements. Each kind of work is a sum over named counts of it (tokens, pairs,
bytes), with coefficients that are not negative; what they were fitted to is kept beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work

Counts = dict[str, float]
"""How often each named thing is done, or how much of it there is."""

ROUNDS, PRECISION = 8, 0.02
"""Of reweighting in ``fitted``; residuals below the precision all count alike."""


FEW = 0.1
CACHED_BYTES = 1 << 20
TYPICAL_ROWS = 128
"""Of a call, where nobody says how many it has."""


@dataclass(frozen=True)
class Point:
    """Measurements of one piece of work: quartiles over ``repeats``, in seconds or bytes."""

    counts: Counts
    low: float
    median: float
    high: float
    repeats: int

    def scaled(self, factor: float) -> "Point":
        return replace(self, low=self.low * factor, median=self.median * factor, high=self.high * factor)


@dataclass(frozen=True)
class Fit:
    """``sum of coefficient * count``, and the points to whose medians it was fitted.

    A run's steps are told by their median, too; the lower quartile is a machine that nothing disturbs.
    """

    coefficients: dict[str, float]
    points: tuple[Point, ...]

    def __call__(self, counts: Mapping[str, float]) -> float:
        return sum(self.coefficients[name] * count for name, count in counts.items())

    def knows(self, counts: Mapping[str, float]) -> bool:
        """Tell whether all that is counted was measured."""
        return set(counts) <= set(self.coefficients)

    @property
    def error(self) -> float:
        """Median relative error at the points."""
        return median(abs(self(p.counts) / p.median - 1.0) for p in self.points)

    @property
    def spread(self) -> float:
        """Median distance between the quartiles of a point, relative to its lower one."""
        return median((p.high - p.low) / p.low for p in self.points)


def fitted(points: Sequence[Point]) -> Fit:
    """Fit non-negative coefficients to the medians of the points.

    What is minimised is the sum of absolute relative errors, by reweighted least squares: a point that was disturbed
    counts little. Raises ValueError without points, and for a point that took no time.
    """
    values = [point.median for point in points]
    if not points or min(values) <= 0:
        raise ValueError(f"nothing to fit in {len(points)} points, of which none may be 0")
    names = list(dict.fromkeys(name for point in points for name in point.counts))
    relative = np.array([[p.counts.get(name, 0.0) / value for name in names]
                         for p, value in zip(points, values, strict=True)])  # fmt: skip
    weights = np.ones(len(points))
    for _ in range(ROUNDS):
        found = non_negative(relative * weights[:, None], weights)
        weights = np.maximum(np.abs(relative @ found - 1.0), PRECISION) ** -0.5
    return Fit(dict(zip(names, found.tolist(), strict=True)), tuple(points))


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimises ``|a x - b|`` (Lawson and Hanson 1974, Solving Least Squares Problems, ch. 23)."""
    sizes = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    a = a / sizes
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):  # more would be rounding errors going round in circles
        slopes = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or slopes.max() <= 1e-10 * np.linalg.norm(b):
            break
        free[slopes.argmax()] = True
        while free.any():
            target = np.zeros_like(x)
            target[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (target <= 0)
            if not below.any():
                x = target
                break
            x = x + (x[below] / (x[below] - target[below])).min() * (target - x)
            free &= x > 1e-15
    return x / sizes


@dataclass(frozen=True)
class ProfiledMachine:
    """What measurements hold for. ``cores`` are shared by the workers of a CPU, ``threads`` is what each may use."""

    device: str
    processor: str
    cores: int
    threads: int

    def __str__(self) -> str:
        return f"{self.processor} ({self.cores} cores, {self.threads} threads per worker, {self.device})"


@dataclass(frozen=True)
class Profile:
    """All that was measured on a machine, by name.

    Passes of a model are ``SHAPE/t2/OP``, what it does elsewhere ``SHAPE/OP``; the rest is ``all_reduce/2`` (of two
    workers), ``send``, ``exchange``, ``host_copy``, ``call`` and ``interface/NAME/METHOD``. ``resident`` is bytes of a
    worker that has done everything once, with next to no model.
    """

    machine: ProfiledMachine
    resident: float
    fits: dict[str, Fit]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor-parallel degrees of the model shapes that were measured."""
        found: dict[str, set[int]] = {}
        for name in self.fits:
            shape, *rest = name.split("/")
            if rest and rest[0][0] == "t" and rest[0][1:].isdigit():
                found.setdefault(shape, set()).add(int(rest[0][1:]))
        return {shape: tuple(sorted(degrees)) for shape, degrees in found.items()}

    def excess(self, op: str) -> float:
        """Return how much more than its counts say a micro-batch takes that is exceeded by few (``FEW``), as a share.

        Freed memory lies in pieces, differently from time to time: bytes have no one value.
        """
        fits = [fit for name, fit in self.fits.items() if name.endswith(f"/{op}")]
        found = sorted(point.median / fit(point.counts) - 1.0 for fit in fits for point in fit.points)
        return max(0.0, found[int((1 - FEW) * len(found))]) if found else 0.0

    def __add__(self, newer: "Profile") -> "Profile":
        """Put a newer profile of the same machine on top; ValueError for that of another one."""
        if newer.machine != self.machine:
            raise ValueError(f"measured on {newer.machine}, not on {self.machine}")
        return Profile(self.machine, newer.resident, {**self.fits, **newer.fits})


def shape_of(config: ModelConfig, bf16: bool) -> str:
    """Return what tells models of different speed per block apart, readable; neither depth nor the kind of head."""
    words = [
        f"h{config.hidden}",
        f"a{config.n_heads}k{config.n_kv_heads}x{config.head_dim}",
        f"m{config.intermediate}",
        f"v{config.vocab}",
        "bf16" if bf16 else "fp32",
    ]
    switches = {
        "layernorm": config.norm == "layer",
        "plain": config.mlp == "ungated",
        config.activation: config.activation != "silu",
        "parallel": config.parallel_residual,
        "postnorm": config.post_norms,
        "noprenorm": not config.pre_norms,
        "qknorm": config.qk_norm == "head",
        "fullqknorm": config.qk_norm == "full",
        "qkvbias": config.qkv_bias,
        "bias": config.proj_bias,
        "learned": config.learned_positions,
        "cap": bool(config.attention_softcap or config.logit_softcap),
        f"w{max(config.sliding_windows, default=0)}": any(config.sliding_windows),
        f"e{config.n_experts}k{config.experts_per_token}x{config.expert_intermediate}": bool(config.n_experts),
    }
    return "-".join(words + [word for word, present in switches.items() if present])


def pass_counts(part: StageShard, work: Work, head_tokens: int) -> Counts:
    """Return what a pass of a micro-batch through a stage consists of; ``head_tokens`` go through its head."""
    counts = _blocks(part.n_blocks, work) | {"stage": 1, "stage row": work.rows, "stage token": work.tokens}
    if part.first:
        counts |= {"first": 1, "first token": work.tokens}
    if part.last:
        counts |= {part.model.head: 1, f"{part.model.head} token": head_tokens}
    return counts


def _blocks(n: int, work: Work) -> Counts:
    return {"block": n, "block token": n * work.tokens, "block pair": n * work.pairs, "block run": n * work.runs}


def decode_counts(part: StageShard, rows: int, context: float) -> Counts:
    """Return what drawing a token for each of some rows consists of."""
    n = part.n_blocks
    counts: Counts = {"block": n, "block row": n * rows, "block place": n * rows * context}
    counts |= {"stage": 1, "stage row": rows}
    return counts | ({"last": 1, "last row": rows} if part.last else {})


def traffic_counts(traffic: Traffic) -> Counts:
    """Return what an exchange inside of one machine consists of."""
    leaving = traffic.node / max(1, traffic.node + traffic.local)
    counts: Counts = {"exchange": 1, "part": traffic.n_parts, "copied byte": traffic.copied}
    if not traffic.node:
        return counts
    return counts | {"meeting": 1, "leaving part": leaving * traffic.n_parts, "leaving byte": traffic.node}


def message_counts(nbytes: float) -> Counts:
    """Return what bringing a tensor to others consists of; large ones no longer stay in caches on their way."""
    return {"message": 1, "byte": nbytes, "far byte": max(0.0, nbytes - CACHED_BYTES)}


@dataclass(frozen=True)
class ProfiledSpeed:
    """The ``Speed`` of a profiled machine. ValueError for what was not measured says what measures it."""

    profile: Profile

    @property
    def call(self) -> float:
        return self._fit("call", "")({"call": 1, "row": TYPICAL_ROWS})

    def knows(self, config: ModelConfig, bf16: bool = False, tp: int = 1) -> bool:
        """Tell whether models of this shape were measured, cut ``tp`` ways."""
        return tp in self.profile.shapes.get(shape_of(config, bf16), ())

    def forward(self, part: StageShard, work: Work, ranks: Sequence[int]) -> float:
        return self._of(part, "forward")(pass_counts(part, work, work.tokens))

    def train(self, part: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        keeping, backward = self._of(part, "train_forward"), self._of(part, "train_backward")
        trained = work.tokens if work.trained is None else work.trained
        forth, back = keeping(pass_counts(part, work, work.tokens)), backward(pass_counts(part, work, trained))
        if part.recompute:  # blocks run without autograd, and once more with it when their turn comes
            again = keeping(_blocks(part.n_blocks, work))
            return forth - again + self._of(part, "forward")(_blocks(part.n_blocks, work)), back + again
        return forth, back

    def decode(self, part: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        return self._of(part, "decode")(decode_counts(part, rows, context))

    def optimizer(self, part: StageShard, numel: int) -> float:
        name = shape_of(part.model, part.bf16)
        return self._fit(f"{name}/optimizer", name)({"update": 1, "parameter": numel})

    def train_bytes(self, part: StageShard, work: Work) -> tuple[float, float]:
        """Return what a micro-batch keeps for its backward pass, and its peak beyond weights and gradients."""
        counts, more = pass_counts(part, work, work.tokens), 1 + self.profile.excess("train_bytes")
        return more * self._of(part, "kept_bytes")(counts), more * self._of(part, "train_bytes")(counts)

    def forward_bytes(self, part: StageShard, work: Work) -> float:
        """Return the peak of a micro-batch without autograd beyond the weights."""
        more = 1 + self.profile.excess("forward_bytes")
        return more * self._of(part, "forward_bytes")(pass_counts(part, work, work.tokens))

    def collective(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        if len(ranks) == 1:
            return 0.0
        sizes = [int(name.split("/")[1]) for name in self.profile.fits if name.startswith(f"{kind.value}/")]
        size = min((size for size in sizes if size >= len(ranks)), default=len(ranks))
        return self._fit(f"{kind.value}/{size}", "", len(ranks))(message_counts(nbytes))

    def send(self, nbytes: float, src: int, dst: int) -> float:
        return self._fit("send", "", 2)(message_counts(nbytes)) if src != dst else 0.0

    def exchange(self, traffic: Traffic) -> float:
        if traffic.cluster:
            raise ValueError("a profile is of one machine: it knows of no links between nodes")
        return self._fit("exchange", "", 2)(traffic_counts(traffic))

    def host_copy(self, nbytes: float) -> float:
        return self._fit("host_copy", "")(message_counts(nbytes))

    def interface(self, name: str, rows: int, tokens: int) -> float:
        """Seconds of ``NAME/METHOD``; those of a user's own are not known and count nothing."""
        fit = self.profile.fits.get(f"interface/{name}")
        return fit({"call": 1, "row": rows, "token": tokens}) if fit and rows else 0.0

    def _of(self, part: StageShard, op: str) -> Fit:
        shape = shape_of(part.model, part.bf16)
        return self._fit(f"{shape}/t{part.tp}/{op}", shape, part.tp, part.bf16)

    def _fit(self, name: str, shape: str, workers: int = 1, bf16: bool = False) -> Fit:
        if name in self.profile.fits:
            return self.profile.fits[name]
        known = ", ".join(f"{s} (t{', t'.join(map(str, degrees))})" for s, degrees in self.profile.shapes.items())
        command = f"realhf profile model={'FOLDER_OR_CONFIG_JSON' if shape else '...'} n_gpus_per_node={workers}"
        raise ValueError(f"the profile knows nothing of {name}, only {known or 'no model'}: measure it with '{command}"
                         f"{' bf16=True' if bf16 else ''}'")  # fmt: skip
