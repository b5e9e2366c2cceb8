"""Probes of model computation: passes of micro-batches, decoding, optimizer updates, and their memory.

They run the engine on models of two small depths, which separates the cost of blocks from that of embedding and head.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.comm.process_groups import Group, ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Outputs
from realhf.models.engine.decode.group import DecodeGroup
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.packing import ForwardOutputs, pack
from realhf.models.engine.pipeline_runner import with_gradient
from realhf.models.token_head import FinalStates
from realhf.plan.cost.speed import StageShard, Work
from realhf.plan.machines.profile import Point, decode_counts, pass_counts
from realhf.system.profiler.probes import Clock, Probe, peak_bytes

BLOCKS, DEEP_BLOCKS = (1, 3), (2, 6)
"""Depths of the measured models. Decoding needs deeper ones because a single block's weights would stay in the cache;
memory does because fragmentation makes it grow slightly faster than the number of blocks."""
PASSES = ((2, 64, 64), (24, 64, 64), (8, 64, 64), (6, 256, 256), (24, 40, 109), (2, 640, 640), (8, 24, 384),
          (64, 64, 64))  # fmt: skip
"""Micro-batches: rows, shortest and longest length; lengths are evenly spaced."""
DECODING = ((1, 16), (8, 16), (8, 256), (32, 64), (64, 256), (128, 32), (16, 700))
"""Rows and context length."""
DECODE_STEPS = 12
STEPS_AT_ONCE = 4  # of a kernel that makes several decoding steps
GROUP_SIZE = 8
TINY_MODEL = ModelConfig("llama", 1, 256, 4, 4, 64, 512, 32, 256)
"""Negligible weights, but matrices large enough for libraries to allocate their workspace."""
CLOCK_SPEED = "clock_speed"
MEMORY = ((8, 64, 64), (48, 16, 48), (6, 200, 200))
N_MICRO_BATCHES, N_IN_FLIGHT = 6, 3
"""Memory probes: consecutive micro-batches, and how many of them wait for their backward passes."""


@dataclass(frozen=True)
class ProbeContext:
    """Tensor-parallel rank and clock of model probes."""

    parallel: ParallelContext
    clock: Clock
    bf16: bool

    @staticmethod
    def of(group: Group, clock: Clock, bf16: bool) -> "ProbeContext":
        layout = Layout(DeviceMesh(group.ranks), ParallelStrategy(tp=group.size))
        parallel = ParallelContext(layout, group.ranks[group.index], clock.device, {group.ranks: group})
        return ProbeContext(parallel, clock, bf16)

    @property
    def tp(self) -> int:
        return self.parallel.layout.strategy.tp

    def engine(self, config: ModelConfig, trained: bool = True) -> NativeEngine:
        role = RoleSpec(ModelSpec(init_from_scratch=True, bf16=self.bf16), scalar_head=config.head == "scalar")
        return build_engine(config, role, self.parallel, trained, holds_weights=True, seed=1, total_steps=1000,
                            stop_ids=(), tokenizer_folder=None)  # fmt: skip

    def shard(self, config: ModelConfig, first: bool = True, last: bool = True) -> StageShard:
        return StageShard(config, self.tp, config.n_layers, first, last, self.bf16)


class BlockKind(NamedTuple):
    """What differs between the blocks of a model."""

    window: int
    is_dense: bool
    is_unrotated: bool
    is_linear: bool


def reduced_depths(config: ModelConfig, few: int, many: int) -> tuple[ModelConfig, ModelConfig]:
    """Return language models of about ``few`` and ``many`` blocks: whole periods of the kinds of blocks.

    Without a periodic pattern, all blocks are of the most frequent kind.
    """
    kinds = [
        BlockKind(
            config.sliding_window(i), i in config.dense_layers, i in config.unrotated_layers, i in config.delta_layers
        )
        for i in range(config.n_layers)
    ]
    patterns = (kinds[:n] for n in range(1, len(kinds) // 2 + 1))
    most_frequent = [max(set(kinds), key=kinds.count)]
    pattern = next((p for p in patterns if all(kind == p[i % len(p)] for i, kind in enumerate(kinds))), most_frequent)
    small = -(-few // len(pattern))
    large = max(small + 1, -(-many // len(pattern)))
    return _of_blocks(config, pattern * small), _of_blocks(config, pattern * large)


def _of_blocks(config: ModelConfig, kinds: Sequence[BlockKind]) -> ModelConfig:
    return replace(
        config,
        head="lm",
        n_layers=len(kinds),
        sliding_windows=tuple(kind.window for kind in kinds) if config.sliding_windows else (),
        dense_layers=tuple(i for i, kind in enumerate(kinds) if kind.is_dense),
        delta_layers=tuple(i for i, kind in enumerate(kinds) if kind.is_linear),
        unrotated_layers=tuple(i for i, kind in enumerate(kinds) if kind.is_unrotated),
    )


def with_scalar_head(config: ModelConfig) -> ModelConfig:
    return replace(config, head="scalar", tied_embedding=False)


def spread_lengths(rows: int, shortest: int, longest: int) -> list[int]:
    return [shortest + (longest - shortest) * i // max(1, rows - 1) for i in range(rows)]


def batch_of(lengths: Sequence[int], vocab: int, device: torch.device) -> SequenceBatch:
    """Return rows of random tokens, equal on all workers."""
    tokens = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(device)
    ids = tuple(RowId(i, 0) for i in range(len(lengths)))
    return SequenceBatch(ids, {"tokens": Column(tokens, tuple(lengths))})


def model_probes(context: ProbeContext, config: ModelConfig) -> Iterator[Probe]:
    small, large = reduced_depths(config, *BLOCKS)
    grid = [spread_lengths(*sizes) for sizes in PASSES if sizes[2] <= config.max_positions]
    for model, batches in ((small, grid), (large, grid[::2]), (with_scalar_head(small), grid[::3])):
        engine = context.engine(model)
        for number, lengths in enumerate(batches):
            yield from pass_probes(context, engine, lengths, half=number % 2 == 1)
        if model is small:
            for lengths in grid[::3]:
                yield from _inner_stage_probes(context, engine, lengths)
        if context.tp == 1:
            yield _optimizer_probe(context, engine)
    for model in reduced_depths(config, *DEEP_BLOCKS):
        engine = context.engine(model, trained=False)
        for rows, cached in DECODING:
            if cached + DECODE_STEPS + 3 <= config.max_positions:
                yield decoding_probe(context, engine, rows, cached)


def pass_probes(context: ProbeContext, engine: NativeEngine, lengths: Sequence[int], half: bool) -> Iterator[Probe]:
    """Yield inference and training of a micro-batch; ``half``: the first half of every row is not predicted."""
    config, shard = engine.config, context.shard(engine.config)
    batch = batch_of(lengths, config.vocab, engine.context.device)
    packing = pack(batch)
    is_predicted = torch.cat([torch.arange(n) >= n // 2 * half for n in lengths])
    weights = is_predicted.float().to(engine.context.device)
    masked = batch.with_tokenwise("mask", weights)
    work, clock = Work.of(lengths, int(weights.sum())), context.clock

    def infer() -> list[float]:
        return [clock.time(lambda: engine.forward(masked, lambda outputs, part: _head(config, outputs, part["mask"])))]

    def train() -> list[float]:
        marks: list[float] = []

        def loss(number: int, states: FinalStates) -> Tensor:
            outputs = ForwardOutputs(engine.model, states, batch, packing)
            total = (_head(config, outputs, weights) * weights).sum()
            marks.append(clock())
            return total

        start = clock()
        engine.pipeline.train([packing], loss)
        return [marks[0] - start, clock() - marks[0]]

    size = work.tokens * (config.n_layers + 1.0)
    counts = pass_counts(shard, work)
    yield Probe((("forward", counts),), infer, size)
    yield Probe((("train_forward", counts), ("train_backward", counts)), train, 3 * size)


def _head(config: ModelConfig, outputs: Outputs, mask: Tensor | None = None) -> Tensor:
    return outputs.logprobs(mask=mask) if config.head == "lm" else outputs.values(mask)


def _inner_stage_probes(context: ProbeContext, engine: NativeEngine, lengths: Sequence[int]) -> Iterator[Probe]:
    """Yield passes of pipeline stages without head, with and without embedding."""
    model, config, clock = engine.model, engine.config, context.clock
    batch, work = batch_of(lengths, config.vocab, engine.context.device), Work.of(lengths)
    dtype, device = model.dtype, engine.context.device
    slope = torch.ones(model.tp_region(work.tokens).n_local_tokens, config.hidden, dtype=dtype, device=device)
    for first in (True, False):

        def infer(first: bool = first) -> list[float]:
            x = None if first else torch.zeros(work.tokens, config.hidden, dtype=dtype, device=device)
            with torch.no_grad():
                return [clock.time(lambda: model.hidden(batch["tokens"], batch.lengths("tokens"), x=x))]

        def train(first: bool = first) -> list[float]:
            x = None if first else torch.zeros_like(slope).requires_grad_()
            start = clock()
            hidden = model.hidden(batch["tokens"], batch.lengths("tokens"), x=x)
            middle = clock()
            with_gradient(hidden, slope).backward()
            return [middle - start, clock() - middle]

        counts, size = pass_counts(context.shard(config, first, False), work), 2.0 * work.tokens
        yield Probe((("forward", counts),), infer, size)
        yield Probe((("train_forward", counts), ("train_backward", counts)), train, 3 * size)


def decoding_probe(context: ProbeContext, engine: NativeEngine, rows: int, cached: int) -> Probe:
    """Return the probe of a few decoding steps of a group of rows, with and without embedding and head."""
    model, config, clock, device = engine.model, engine.config, context.clock, engine.context.device
    n_prompts, samples = -(-rows // GROUP_SIZE), min(rows, GROUP_SIZE)
    ids = tuple(RowId(i, PROMPT) for i in range(n_prompts))
    tokens = batch_of([cached] * n_prompts, config.vocab, device).columns["tokens"]
    prompts = SequenceBatch(ids, {"prompts": tokens})
    sampling = GenerationConfig(max_new_tokens=DECODE_STEPS + 3)
    # a stop token that is never sampled; no sharing of prompts, so that each row reads ``cached`` cached tokens
    request = Request(prompts, sampling, samples, 1, (config.vocab,), 1 << 30, share_prefixes=False)
    x = torch.zeros(request.n_rows, config.hidden, dtype=model.dtype, device=device)

    @torch.no_grad()
    def run() -> list[float]:
        group = DecodeGroup(model, request, deque(range(request.n_rows)), request.n_rows, steps_per_wait=1)
        group.advance(group.forward(None))
        whole, inner = [], []
        with model.decoding():
            if model.fused_steps is not None:
                group.steps_per_wait = STEPS_AT_ONCE
            for _ in range(DECODE_STEPS // group.steps_per_wait):
                start = clock()
                sampled = group.forward(None)
                middle = clock()
                group.advance(sampled)
                end = clock()
                last, positions, *_ = group.slots.inputs
                model.decode(last, positions, group.cache, x)
                whole.append((end - start) / group.steps_per_wait)
                inner.append((end - middle) / group.steps_per_wait + clock() - end)
        return [median(whole), median(inner)]

    mean_context = cached + 1 + DECODE_STEPS / 2
    works = tuple(
        ("decode", decode_counts(context.shard(config, first=last, last=last), request.n_rows, mean_context))
        for last in (True, False)
    )
    size = float(n_prompts * cached + 8 * DECODE_STEPS * (rows + 20)) * config.n_layers
    return Probe(works, run, size)


def _optimizer_probe(context: ProbeContext, engine: NativeEngine) -> Probe:
    clock, params, optimizer = context.clock, engine.params, engine.optimizer
    assert optimizer is not None and params.grad is not None
    grad = params.grad

    def run() -> list[float]:
        zero_s = clock.time(params.zero_grad)
        grad.fill_(1e-4)
        return [zero_s + clock.time(lambda: optimizer.step(1e-6))]

    numel = params.data.numel()
    return Probe((("optimizer", {"update": 1, "parameter": numel}),), run, numel / 1000)


def warm_up(context: ProbeContext) -> None:
    """Run all kinds of probes once on a tiny model, which allocates the workspaces of libraries."""
    engine = context.engine(TINY_MODEL)
    for probe in (*pass_probes(context, engine, [64, 64], half=False), decoding_probe(context, engine, 2, 4)):
        probe.run()
    _optimizer_probe(context, engine).run()


def clock_speed_probe(context: ProbeContext) -> Probe:
    """Return a probe of fixed work, in kernels and in the interpreter, that measures the machine's current speed."""
    *_, train = pass_probes(context, context.engine(TINY_MODEL), [64, 64], half=False)
    return Probe(((CLOCK_SPEED, {"pass": 1}),), lambda: [sum(train.run())], train.size)


def memory_points(
    context: ProbeContext, config: ModelConfig, index: int = 0, n_workers: int = 1
) -> dict[str, list[Point]]:
    """Measure the saved activations and peak memory of micro-batches: every ``n_workers``-th one from ``index``."""
    points: dict[str, list[Point]] = {}
    small, large = reduced_depths(config, *DEEP_BLOCKS)
    sizes = [size for size in MEMORY if size[2] <= config.max_positions]
    cases = [(model, size) for model in (small, large, with_scalar_head(small)) for size in sizes][index::n_workers]
    for model, group in groupby(cases, key=lambda case: case[0]):
        engine = context.engine(model)
        for _, (rows, shortest, longest) in group:
            lengths = spread_lengths(rows, shortest, longest)
            counts = pass_counts(context.shard(model), Work.of(lengths))
            for name, value in _memory(engine, batch_of(lengths, model.vocab, engine.context.device)).items():
                points.setdefault(name, []).append(Point(counts, value, value, value, 1))
    return points


def _memory(engine: NativeEngine, batch: SequenceBatch) -> dict[str, float]:
    """Measure the peak of equal micro-batches, and the increment per micro-batch in flight.

    Because of fragmentation, the peak exceeds the sum of live tensors.
    """
    config, device, packing = engine.config, engine.context.device, pack(batch)

    def loss() -> Tensor:
        states = engine.model.states(batch["tokens"], batch.lengths("tokens"))
        return _head(config, ForwardOutputs(engine.model, states, batch, packing)).sum()

    def train(n_in_flight: int) -> None:
        losses: deque[Tensor] = deque()
        for _ in range(N_MICRO_BATCHES):
            losses.append(loss())
            if len(losses) > n_in_flight:
                losses.popleft().backward()
        while losses:
            losses.popleft().backward()

    def infer() -> None:
        for _ in range(N_MICRO_BATCHES):
            engine.forward(batch, lambda outputs, _: _head(config, outputs))

    single, several = (peak_bytes(partial(train, n), device) for n in (0, N_IN_FLIGHT))
    kept = max((several - single) / N_IN_FLIGHT, 1.0)
    return {"kept_bytes": kept, "train_bytes": single, "forward_bytes": peak_bytes(infer, device)}
