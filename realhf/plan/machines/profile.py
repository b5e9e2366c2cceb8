"""Machine profiles: linear models of seconds and bytes, fitted to measurements, and the ``Speed`` based on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import pi, sqrt
from statistics import median

import numpy as np

from realhf.api.config.choices import Recompute
from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work

Counts = dict[str, float]  # amounts of work by name

ROUNDS, PRECISION = 8, 0.02  # rounds of reweighting; relative residuals below the precision have equal weights
EXCESS_QUANTILE = 0.1
CACHED_BYTES = 1 << 20
QUANTIZED_DECODING = 1.6  # of the time of a decoding step without quantization, which profiles measure
FROZEN_BACKWARD = 0.5  # of the time of a backward pass without the gradients of weights, which profiles do not measure
TYPICAL_ROWS = 128  # rows of a call if the number is unknown
IQR_OF_NORMAL = 1.349  # interquartile range of a normal distribution in standard deviations
JITTER_OF = ("forward", "train_forward", "train_backward", "decode")
CLUSTER = "cluster_"  # prefix of measurements between nodes
DIFFERENCES = "tp_collectives/"  # prefix of times beyond those without collectives


@dataclass(frozen=True)
class Point:
    """Measurements of one amount of work: quartiles over ``repeats``, in seconds or bytes."""

    counts: Counts
    low: float
    median: float
    high: float
    repeats: int

    @property
    def median_error(self) -> float:
        """Relative standard error of the median of normally distributed repeats: its variance is pi/2 of the mean's."""
        return sqrt(pi / 2 / self.repeats) * (self.high - self.low) / IQR_OF_NORMAL / self.median

    def scaled(self, factor: float) -> "Point":
        return replace(self, low=self.low * factor, median=self.median * factor, high=self.high * factor)

    def __sub__(self, other: "Point") -> "Point":
        """Return the time of this work beyond that of ``other``; differences of quartiles may cross the median."""
        low, middle, high = self.low - other.low, self.median - other.median, self.high - other.high
        return replace(self, low=min(low, middle), median=middle, high=max(high, middle))


@dataclass(frozen=True)
class Fit:
    """A linear function of named counts (tokens, pairs, bytes), fitted to the medians of the stored ``points``."""

    coefficients: dict[str, float]
    points: tuple[Point, ...]

    def __call__(self, counts: Mapping[str, float]) -> float:
        """Return the value of the function; ValueError if a count was not measured."""
        try:
            return sum(self.coefficients[name] * count for name, count in counts.items())
        except KeyError as error:
            raise ValueError(f"a fit of the profile has no coefficient {error}; run realhf profile again") from error

    def covers(self, counts: Mapping[str, float]) -> bool:
        return set(counts) <= set(self.coefficients)

    @property
    def error(self) -> float:
        return median(abs(self(p.counts) / p.median - 1.0) for p in self.points)

    @property
    def residuals(self) -> tuple[float, ...]:
        """Relative errors of the fit at its points; a positive one exceeds the measurement."""
        return tuple(self(p.counts) / p.median - 1.0 for p in self.points)

    @property
    def degrees_of_freedom(self) -> int:
        """Number of points beyond that of non-zero coefficients."""
        return len(self.points) - sum(value > 0 for value in self.coefficients.values())

    @property
    def spread(self) -> float:
        """Median interquartile range of a point relative to its lower quartile."""
        return median((p.high - p.low) / p.low for p in self.points)


def fitted(points: Sequence[Point]) -> Fit:
    """Fit non-negative coefficients to the medians of the points.

    Minimizes the sum of absolute relative errors by iteratively reweighted least squares, which is robust to outliers.
    Raises ValueError if there are no points or a median is not positive.
    """
    values = [point.median for point in points]
    if not points or min(values) <= 0:
        raise ValueError(f"cannot fit {len(points)} points: there must be at least one, and all medians positive")
    names = list(dict.fromkeys(name for point in points for name in point.counts))
    relative = np.array([[p.counts.get(name, 0.0) / value for name in names]
                         for p, value in zip(points, values, strict=True)])  # fmt: skip
    weights = np.ones(len(points))
    for _ in range(ROUNDS):
        solution = nnls(relative * weights[:, None], weights)
        weights = np.maximum(np.abs(relative @ solution - 1.0), PRECISION) ** -0.5
    return Fit(dict(zip(names, solution.tolist(), strict=True)), tuple(points))


def nnls(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimizes ``|a x - b|`` (Lawson and Hanson 1974, Solving Least Squares Problems, ch. 23)."""
    sizes = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    a = a / sizes
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):  # a limit against cycles due to rounding errors
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
    """Where a profile is valid. Workers on a CPU share ``cores``; each uses ``threads``.

    ``torch`` is the version of the library; profiles of earlier versions do not have it.
    """

    device: str
    processor: str
    cores: int
    threads: int
    torch: str = ""

    def __str__(self) -> str:
        torch = f", torch {self.torch}" if self.torch else ""
        return f"{self.processor} ({self.cores} cores, {self.threads} threads per worker, {self.device}{torch})"

    def differs_from(self, other: "ProfiledMachine") -> bool:
        """Return True if times on ``other`` may differ: an empty or zero value is unknown and equals any other."""
        own, others = ((m.device, m.processor, m.cores, m.torch) for m in (self, other))
        return any(a and b and a != b for a, b in zip(own, others, strict=True))


@dataclass(frozen=True)
class Profile:
    """Measurements of a machine.

    Names of ``fits``: ``SHAPE/t2/OP`` (passes of a model shard), ``SHAPE/OP``, ``all_reduce/2`` (two workers),
    ``send``, ``exchange``, ``host_copy``, ``call`` and ``interface/NAME/METHOD``; between nodes
    ``cluster_all_reduce/2x4`` (four workers on each of two nodes), ``cluster_send`` and ``cluster_exchange``.
    ``resident`` is the bytes of a warmed-up worker with a negligible model.
    """

    machine: ProfiledMachine
    resident: float
    fits: dict[str, Fit]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        degrees: dict[str, set[int]] = {}
        for name in self.fits:
            shape, *rest = name.split("/")
            if rest and rest[0][0] == "t" and rest[0][1:].isdigit():
                degrees.setdefault(shape, set()).add(int(rest[0][1:]))
        return {shape: tuple(sorted(values)) for shape, values in degrees.items()}

    @property
    def n_workers(self) -> int:
        """Largest number of workers of a node whose collectives were measured; 1 for none."""
        return max((size for _, size in self._sizes(CollectiveKind.ALL_REDUCE.value)), default=1)

    @property
    def cluster_sizes(self) -> tuple[tuple[int, int], ...]:
        """Groups whose collectives between nodes were measured: numbers of nodes, and of workers on each."""
        return self._sizes(f"{CLUSTER}{CollectiveKind.ALL_REDUCE.value}")

    def _sizes(self, operation: str) -> tuple[tuple[int, int], ...]:
        sizes = [name.removeprefix(f"{operation}/") for name in self.fits if name.startswith(f"{operation}/")]
        pairs = (size.partition("x") for size in sizes)
        return tuple(sorted((int(a), int(b)) if b else (1, int(a)) for a, _, b in pairs))

    @property
    def errors(self) -> dict[str, float]:
        """Expected relative error of every measured operation; see ``error``."""
        operations = dict.fromkeys(operation_of(name) for name, fit in self.fits.items() if fit.points)
        return {operation: self.error(operation) for operation in operations}

    def error(self, operation: str) -> float:
        """Return the expected relative error of an operation (``forward``, ``decode``, ``all_reduce``, ``interface``).

        It is the standard error of the regression: the root of the squared relative residuals of all fits of the
        operation over their degrees of freedom; but not less than the error of the medians, which is all that is known
        of fits with as many coefficients as points. Errors of shapes and sizes that were not measured are not
        included. ValueError if the operation was not measured.
        """
        fits = [fit for name, fit in self.fits.items() if operation_of(name) == operation and fit.points]
        if not fits:
            raise ValueError(f"the profile has no measurements of {operation}")
        freedom = sum(max(0, fit.degrees_of_freedom) for fit in fits)
        squares = sum(residual**2 for fit in fits for residual in fit.residuals)
        noise = [point.median_error**2 for fit in fits for point in fit.points]
        return sqrt(max(squares / max(1, freedom), sum(noise) / len(noise)))

    @cached_property
    def jitter(self) -> float:
        """Median relative standard deviation of repeated passes and decoding steps; 0 if none was measured."""
        fits = [fit for name, fit in self.fits.items() if operation_of(name) in JITTER_OF and fit.points]
        return median(fit.spread for fit in fits) / IQR_OF_NORMAL if fits else 0.0

    def excess(self, op: str) -> float:
        """Return the excess over the fit that ``EXCESS_QUANTILE`` of points exceed: memory varies by fragmentation."""
        fits = [fit for name, fit in self.fits.items() if name.endswith(f"/{op}")]
        errors = sorted(point.median / fit(point.counts) - 1.0 for fit in fits for point in fit.points)
        return max(0.0, errors[int((1 - EXCESS_QUANTILE) * len(errors))]) if errors else 0.0

    def __add__(self, newer: "Profile") -> "Profile":
        """Update with a newer profile; ValueError if it is of another machine."""
        if newer.machine != self.machine:
            raise ValueError(f"measured on {newer.machine}, not on {self.machine}")
        return Profile(self.machine, newer.resident, {**self.fits, **newer.fits})


def numbers_of_workers(maximum: int) -> tuple[int, ...]:
    """Return the measured numbers of workers: powers of two, and the maximum."""
    return tuple(sorted({n for n in (1, 2, 4, 8, 16, 32) if n < maximum} | {maximum}))


def operation_of(name: str) -> str:
    """Return the operation of a fit, such as ``forward`` of ``SHAPE/t2/forward`` and ``send`` of ``send``."""
    first, *rest = name.split("/")
    is_group_size = bool(rest) and rest[-1][:1].isdigit()
    return first if first == "interface" or is_group_size or not rest else rest[-1]


def _linear_shape(config: ModelConfig) -> str:
    """Return the sizes of the gated delta rule, and the percentage of the blocks that have it."""
    if (delta := config.delta) is None:
        return ""
    share = 100 * len(config.delta_layers) // config.n_layers
    return f"d{delta.key_heads}x{delta.key_dim}v{delta.value_heads}x{delta.value_dim}c{delta.kernel}p{share}"


def shape_of(config: ModelConfig, bf16: bool) -> str:
    """Return a readable key of all sizes that determine the speed of a block: not the depth, not the kind of head."""
    sizes = (f"h{config.hidden}-a{config.n_heads}k{config.n_kv_heads}x{config.head_dim}-m{config.intermediate}"
             f"-v{config.vocab}-{'bf16' if bf16 else 'fp32'}")  # fmt: skip
    options = {
        "layernorm": config.norm == "layer",
        "nonormbias": not config.norm_bias,
        "onenorm": config.shared_norm,
        f"latent{config.cache_numel}v{config.value_dim}": bool(config.latent),
        _linear_shape(config): bool(config.delta_layers),
        "gate": config.attention_gate,
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
        "norotary": bool(config.unrotated_layers),
        "residualscale": config.residual_scale != 1,
        "cap": bool(config.attention_softcap or config.logit_softcap),
        f"w{max(config.sliding_windows, default=0)}": any(config.sliding_windows),
        f"e{config.n_experts}k{config.experts_per_token}x{config.expert_intermediate}": bool(config.n_experts),
        f"s{config.shared_intermediate}": bool(config.shared_intermediate),
        config.expert_scores: config.expert_scores != "softmax",
    }
    return "-".join([sizes, *(name for name, is_set in options.items() if is_set)])


def pass_counts(shard: StageShard, work: Work) -> Counts:
    """Return the counts of a pass of a micro-batch through a stage."""
    counts = _blocks(shard.n_blocks, work) | {"stage": 1, "stage row": work.rows, "stage token": work.tokens}
    if shard.first:
        counts |= {"first": 1, "first token": work.tokens}
    if shard.last:
        counts |= {shard.model.head: 1, f"{shard.model.head} token": work.head_tokens}
    return counts


def _blocks(n: int, work: Work) -> Counts:
    return {"block": n, "block token": n * work.tokens, "block pair": n * work.pairs, "block run": n * work.runs}


def decode_counts(shard: StageShard, rows: int, context: float) -> Counts:
    n = shard.n_blocks
    blocks = {"block": n, "block row": n * rows, "block cached token": n * rows * context}
    return blocks | {"stage": 1, "stage row": rows} | ({"last": 1, "last row": rows} if shard.last else {})


def traffic_counts(traffic: Traffic) -> Counts:
    sent_share = traffic.node / max(1, traffic.node + traffic.local)
    counts: Counts = {"exchange": 1, "part": traffic.n_parts, "copied byte": traffic.copied}
    if not traffic.node:
        return counts
    return counts | {"rendezvous": 1, "sent part": sent_share * traffic.n_parts, "sent byte": traffic.node}


def message_counts(nbytes: float) -> Counts:
    """Return the counts of a message or collective; bytes beyond the cache size count twice."""
    return {"message": 1, "byte": nbytes, "uncached byte": max(0.0, nbytes - CACHED_BYTES)}


@dataclass(frozen=True)
class ProfiledSpeed:
    """``Speed`` of a profiled machine. For missing measurements, methods raise ValueError with the command to run."""

    profile: Profile

    @property
    def call(self) -> float:
        return self._fit("call", "")({"call": 1, "row": TYPICAL_ROWS})

    @property
    def jitter(self) -> float:
        return self.profile.jitter

    def covers(self, config: ModelConfig, bf16: bool = False, tp: int = 1) -> bool:
        """Return True if models of this shape were measured with tensor-parallel size ``tp``."""
        return tp in self.profile.shapes.get(shape_of(config, bf16), ())

    def forward(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> float:
        return self._of(shard, "forward")(pass_counts(shard, work))

    def train(self, shard: StageShard, work: Work, ranks: Sequence[int]) -> tuple[float, float]:
        forward, backward = self._of(shard, "train_forward"), self._of(shard, "train_backward")
        forward_s, backward_s = forward(pass_counts(shard, work)), backward(pass_counts(shard, work))
        if shard.model.lora is not None:
            backward_s *= FROZEN_BACKWARD
        # a profile has no measurement of selective recomputation, whose operations it counts as free
        if shard.recompute is Recompute.full:  # blocks run without autograd, and with it before their backward pass
            again = forward(_blocks(shard.n_blocks, work))
            return forward_s - again + self._of(shard, "forward")(_blocks(shard.n_blocks, work)), backward_s + again
        return forward_s, backward_s

    def decode(self, shard: StageShard, rows: int, context: float, ranks: Sequence[int]) -> float:
        seconds = self._of(shard, "decode")(decode_counts(shard, rows, context))
        is_quantized = shard.model.lora is not None and shard.model.lora.bits > 0
        return QUANTIZED_DECODING * seconds if is_quantized else seconds

    def optimizer(self, shard: StageShard, numel: int) -> float:
        name = shape_of(shard.model, shard.bf16)
        return self._fit(f"{name}/optimizer", name)({"update": 1, "parameter": numel})

    def train_bytes(self, shard: StageShard, work: Work) -> tuple[float, float]:
        counts, factor = pass_counts(shard, work._replace(predicted=None)), 1 + self.profile.excess("train_bytes")
        return factor * self._of(shard, "kept_bytes")(counts), factor * self._of(shard, "train_bytes")(counts)

    def forward_bytes(self, shard: StageShard, work: Work) -> float:
        factor = 1 + self.profile.excess("forward_bytes")
        return factor * self._of(shard, "forward_bytes")(pass_counts(shard, work._replace(predicted=None)))

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
            raise ValueError("these measurements are of one node, without links between nodes")
        return self._fit("exchange", "", 2)(traffic_counts(traffic))

    def host_copy(self, nbytes: float) -> float:
        return self._fit("host_copy", "")(message_counts(nbytes))

    def interface(self, name: str, rows: int, tokens: int) -> float:
        """Seconds of ``NAME/METHOD``; user-defined interfaces are not measured and count 0."""
        fit = self.profile.fits.get(f"interface/{name}")
        return fit({"call": 1, "row": rows, "token": tokens}) if fit and rows else 0.0

    def _of(self, shard: StageShard, op: str) -> Fit:
        shape = shape_of(shard.model, shard.bf16)
        return self._fit(f"{shape}/t{shard.tp}/{op}", shape, shard.tp, shard.bf16)

    def _fit(self, name: str, shape: str, workers: int = 1, bf16: bool = False) -> Fit:
        if name in self.profile.fits:
            return self.profile.fits[name]
        known = ", ".join(f"{s} (t{', t'.join(map(str, degrees))})" for s, degrees in self.profile.shapes.items())
        command = f"realhf profile model={'FOLDER_OR_CONFIG_JSON' if shape else '...'} n_gpus_per_node={workers}"
        raise ValueError(f"the profile has no measurements of {name}, only {known or 'no model'}; run '{command}"
                         f"{' bf16=True' if bf16 else ''}'")  # fmt: skip
