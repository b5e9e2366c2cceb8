"""Probes of a model's own work: passes of micro-batches, drawing tokens, updates, and the memory that they take.

They run the engine's own code on models of few blocks, so that what a block takes and what the ends take tell apart.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from statistics import median

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
from realhf.models.engine.outputs import ForwardOutputs
from realhf.models.engine.packing import pack
from realhf.models.engine.pipeline_runner import with_gradient
from realhf.plan.cost.profile import Point, decode_counts, pass_counts
from realhf.plan.cost.speed import StageShard, Work
from realhf.system.profiler.probes import Clock, Probe, peak_bytes

BLOCKS, DEEP_BLOCKS = (1, 3), (2, 6)
"""Depths of the models that are measured. In decoding, the weights of a single block would not leave a core's cache;
bytes grow a little faster than blocks, since more of what is freed lies in pieces."""
PASSES = (
    (2, 64, 64),
    (24, 64, 64),
    (8, 64, 64),
    (6, 256, 256),
    (24, 40, 109),
    (2, 640, 640),
    (8, 24, 384),
    (64, 64, 64),
)
"""Micro-batches: rows, and their lengths, spread evenly from the shortest to the longest."""
DECODING = ((1, 16), (8, 16), (8, 256), (32, 64), (64, 256), (128, 32), (16, 700))
"""Rows that are decoded, and the tokens that they see."""
TURNS = 12
SAMPLES = 8
LITTLE = ModelConfig("llama", 1, 256, 4, 4, 64, 512, 32, 256)
"""A model of next to no weights, in matrices for which libraries take their scratch space."""
PACE = "pace"
MEMORY = ((8, 64, 64), (48, 16, 48), (6, 200, 200))
REPEATS, AHEAD = 6, 3
"""Where memory is measured: micro-batches that follow one another, and how many wait for their backward passes."""


@dataclass(frozen=True)
class Bench:
    """Where models are measured: a place in a tensor-parallel group, and the clock."""

    context: ParallelContext
    clock: Clock
    bf16: bool

    @staticmethod
    def of(group: Group, clock: Clock, bf16: bool) -> "Bench":
        layout = Layout(DeviceMesh(group.ranks), ParallelStrategy(tp=group.size))
        context = ParallelContext(layout, group.ranks[group.index], clock.device, {group.ranks: group})
        return Bench(context, clock, bf16)

    @property
    def tp(self) -> int:
        return self.context.layout.strategy.tp

    def engine(self, config: ModelConfig, trained: bool = True) -> NativeEngine:
        """Return an engine on random weights."""
        role = RoleSpec(ModelSpec(init_from_scratch=True, bf16=self.bf16), scalar_head=config.head == "scalar")
        return build_engine(config, role, self.context, trained, holds_weights=True, seed=1, total_steps=1000,
                            stop_ids=(), tokenizer_folder=None)  # fmt: skip

    def part(self, config: ModelConfig, first: bool = True, last: bool = True) -> StageShard:
        return StageShard(config, self.tp, config.n_layers, first, last, self.bf16)


def cut_down(config: ModelConfig, few: int, many: int) -> tuple[ModelConfig, ModelConfig]:
    """Return language models of about ``few`` and ``many`` blocks: whole patterns of windows and routed experts.

    Where there is no pattern all blocks are like most of them.
    """
    kinds = [(config.sliding_window(i), i in config.dense_layers) for i in range(config.n_layers)]
    patterns = (kinds[:n] for n in range(1, len(kinds) // 2 + 1))
    most = [max(set(kinds), key=kinds.count)]
    pattern = next((p for p in patterns if all(kind == p[i % len(p)] for i, kind in enumerate(kinds))), most)
    small = -(-few // len(pattern))
    large = max(small + 1, -(-many // len(pattern)))
    return _of_blocks(config, pattern * small), _of_blocks(config, pattern * large)


def _of_blocks(config: ModelConfig, kinds: Sequence[tuple[int, bool]]) -> ModelConfig:
    return replace(
        config,
        head="lm",
        n_layers=len(kinds),
        sliding_windows=tuple(window for window, _ in kinds) if config.sliding_windows else (),
        dense_layers=tuple(i for i, (_, dense) in enumerate(kinds) if dense),
    )


def with_scalar_head(config: ModelConfig) -> ModelConfig:
    return replace(config, head="scalar", tied_embedding=False)


def spread_lengths(rows: int, shortest: int, longest: int) -> list[int]:
    return [shortest + (longest - shortest) * i // max(1, rows - 1) for i in range(rows)]


def batch_of(lengths: Sequence[int], vocab: int, device: torch.device) -> SequenceBatch:
    """Return rows of random tokens; every worker draws the same."""
    tokens = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(device)
    ids = tuple(RowId(i, 0) for i in range(len(lengths)))
    return SequenceBatch(ids, {"tokens": Column(tokens, tuple(lengths))})


def model_probes(bench: Bench, config: ModelConfig) -> Iterator[Probe]:
    """Yield the probes of one model shape, with either head."""
    small, large = cut_down(config, *BLOCKS)
    grid = [spread_lengths(*sizes) for sizes in PASSES if sizes[2] <= config.max_positions]
    for model, some in ((small, grid), (large, grid[::2]), (with_scalar_head(small), grid[::3])):
        engine = bench.engine(model)
        for number, lengths in enumerate(some):
            yield from pass_probes(bench, engine, lengths, half=number % 2 == 1)
        if model is small:
            for lengths in grid[::3]:
                yield from _inside(bench, engine, lengths)
        if bench.tp == 1:
            yield _update(bench, engine)
    for model in cut_down(config, *DEEP_BLOCKS):
        engine = bench.engine(model, trained=False)
        for rows, context in DECODING:
            if context + TURNS + 3 <= config.max_positions:
                yield decoding_probe(bench, engine, rows, context)


def pass_probes(bench: Bench, engine: NativeEngine, lengths: Sequence[int], half: bool) -> Iterator[Probe]:
    """Inference and training of a micro-batch; ``half``: the first half of every row has no loss."""
    config, part = engine.config, bench.part(engine.config)
    batch = batch_of(lengths, config.vocab, engine.context.device)
    packing = pack(batch)
    counted = [torch.arange(n) >= n // 2 * half for n in lengths]
    weights = torch.cat(counted).float().to(engine.context.device)
    work, clock = Work.of(lengths, int(weights.sum())), bench.clock

    def infer() -> list[float]:
        return [clock.of(lambda: engine.forward(batch, lambda outputs, _: _head(config, outputs)))]

    def train() -> list[float]:
        marks: list[float] = []

        def loss(number: int, hidden: Tensor) -> Tensor:
            total = (_head(config, ForwardOutputs(engine.model, hidden, batch, packing)) * weights).sum()
            marks.append(clock())
            return total

        start = clock()
        engine.pipeline.train([packing], loss)
        return [marks[0] - start, clock() - marks[0]]

    size = work.tokens * (config.n_layers + 1.0)
    forth = pass_counts(part, work, work.tokens)
    yield Probe((("forward", forth),), infer, size)
    back = pass_counts(part, work, work.trained or 0)
    yield Probe((("train_forward", forth), ("train_backward", back)), train, 3 * size)


def _head(config: ModelConfig, outputs: Outputs) -> Tensor:
    return outputs.logprobs() if config.head == "lm" else outputs.values()


def _inside(bench: Bench, engine: NativeEngine, lengths: Sequence[int]) -> Iterator[Probe]:
    """What stages of a pipeline compute that lack the head, or the embedding too."""
    model, config, clock = engine.model, engine.config, bench.clock
    batch, work = batch_of(lengths, config.vocab, engine.context.device), Work.of(lengths)
    dtype, device = model.params.data.dtype, engine.context.device
    slope = torch.ones(model.tp_region(work.tokens).n_local_tokens, config.hidden, dtype=dtype, device=device)
    for first in (True, False):

        def infer(first: bool = first) -> list[float]:
            x = None if first else torch.zeros(work.tokens, config.hidden, dtype=dtype, device=device)
            with torch.no_grad():
                return [clock.of(lambda: model.hidden(batch["tokens"], batch.lengths("tokens"), x=x))]

        def train(first: bool = first) -> list[float]:
            x = None if first else torch.zeros_like(slope).requires_grad_()
            start = clock()
            hidden = model.hidden(batch["tokens"], batch.lengths("tokens"), x=x)
            middle = clock()
            with_gradient(hidden, slope).backward()
            return [middle - start, clock() - middle]

        counts, size = pass_counts(bench.part(config, first, False), work, 0), 2.0 * work.tokens
        yield Probe((("forward", counts),), infer, size)
        yield Probe((("train_forward", counts), ("train_backward", counts)), train, 3 * size)


def decoding_probe(bench: Bench, engine: NativeEngine, rows: int, context: int) -> Probe:
    """A few turns of a group of rows, and what of them a stage without head has to do."""
    model, config, clock, device = engine.model, engine.config, bench.clock, engine.context.device
    n_prompts, samples = -(-rows // SAMPLES), min(rows, SAMPLES)
    tokens = torch.randint(config.vocab, (n_prompts * context,), generator=torch.Generator().manual_seed(0)).to(device)
    ids = tuple(RowId(i, PROMPT) for i in range(n_prompts))
    prompts = SequenceBatch(ids, {"prompts": Column(tokens, (context,) * n_prompts)})
    sampling = GenerationConfig(max_new_tokens=TURNS + 3)
    # a stop token that is never drawn; rows are priced by the cached tokens that they read, which these share not
    request = Request(prompts, sampling, samples, 1, (config.vocab,), 1 << 30, share_prefixes=False)
    x = torch.zeros(request.n_rows, config.hidden, dtype=model.params.data.dtype, device=device)

    @torch.no_grad()
    def run() -> list[float]:
        group = DecodeGroup(model, request, deque(range(request.n_rows)), request.n_rows)
        group.advance(group.forward(None))
        whole, inner = [], []
        with model.decoding():
            for _ in range(TURNS):
                start = clock()
                drawn = group.forward(None)
                middle = clock()
                group.advance(drawn)
                end = clock()
                last, positions, *_ = group.slots.inputs
                model.decode(last, positions, group.cache, x)
                whole.append(end - start)
                inner.append(clock() - middle)
        return [median(whole), median(inner)]

    seen = context + 1 + TURNS / 2
    works = tuple(
        ("decode", decode_counts(bench.part(config, first=last, last=last), request.n_rows, seen))
        for last in (True, False)
    )
    size = float(n_prompts * context + 8 * TURNS * (rows + 20)) * config.n_layers
    return Probe(works, run, size)


def _update(bench: Bench, engine: NativeEngine) -> Probe:
    """What a training step does beside its passes."""
    clock, params, optimizer = bench.clock, engine.params, engine.optimizer
    assert optimizer is not None and params.grad is not None
    grad = params.grad

    def run() -> list[float]:
        cleared = clock.of(params.zero_grad)
        grad.fill_(1e-4)
        return [cleared + clock.of(lambda: optimizer.step(1e-6))]

    numel = params.data.numel()
    return Probe((("optimizer", {"update": 1, "parameter": numel}),), run, numel / 1000)


def warm_up(bench: Bench) -> None:
    """Do everything once with a little model, so that what a worker needs for it is there."""
    engine = bench.engine(LITTLE)
    for probe in (*pass_probes(bench, engine, [64, 64], half=False), decoding_probe(bench, engine, 2, 4)):
        probe.run()
    _update(bench, engine).run()


def clock_speed_probe(bench: Bench) -> Probe:
    """A piece of work that is always the same, matrices and interpreter, to tell how fast the machine is just now."""
    *_, train = pass_probes(bench, bench.engine(LITTLE), [64, 64], half=False)
    return Probe(((PACE, {"pass": 1}),), lambda: [sum(train.run())], train.size)


def memory_points(bench: Bench, config: ModelConfig, seat: int = 0, n_seats: int = 1) -> dict[str, list[Point]]:
    """Measure the bytes that micro-batches take: what is kept for the backward pass, and peaks.

    Of several seats each measures every so many of them.
    """
    points: dict[str, list[Point]] = {}
    small, large = cut_down(config, *DEEP_BLOCKS)
    sizes = [some for some in MEMORY if some[2] <= config.max_positions]
    cases = [(model, some) for model in (small, large, with_scalar_head(small)) for some in sizes][seat::n_seats]
    for model, some in groupby(cases, key=lambda case: case[0]):
        engine = bench.engine(model)
        for _, (rows, shortest, longest) in some:
            lengths = spread_lengths(rows, shortest, longest)
            counts = pass_counts(bench.part(model), Work.of(lengths), sum(lengths))
            for name, value in _memory(engine, batch_of(lengths, model.vocab, engine.context.device)).items():
                points.setdefault(name, []).append(Point(counts, value, value, value, 1))
    return points


def _memory(engine: NativeEngine, batch: SequenceBatch) -> dict[str, float]:
    """Measure what a micro-batch takes after others like it, and what one more takes that waits for its backward pass.

    Between tensors that live on, freed memory lies in pieces: a peak is more than the sum of what is in use.
    """
    config, device, packing = engine.config, engine.context.device, pack(batch)

    def loss() -> Tensor:
        hidden = engine.model.hidden(batch["tokens"], batch.lengths("tokens"))
        return _head(config, ForwardOutputs(engine.model, hidden, batch, packing)).sum()

    def train(ahead: int) -> None:
        begun: deque[Tensor] = deque()
        for _ in range(REPEATS):
            begun.append(loss())
            if len(begun) > ahead:
                begun.popleft().backward()
        while begun:
            begun.popleft().backward()

    def infer() -> None:
        for _ in range(REPEATS):
            engine.forward(batch, lambda outputs, _: _head(config, outputs))

    alone, deep = (peak_bytes(partial(train, ahead), device) for ahead in (0, AHEAD))
    kept = max((deep - alone) / AHEAD, 1.0)
    return {"kept_bytes": kept, "train_bytes": alone, "forward_bytes": peak_bytes(infer, device)}
