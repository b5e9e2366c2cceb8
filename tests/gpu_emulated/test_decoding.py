"""Decoding on a device: lifetime of cache and graphs, waits per token, results that do not depend on steps per wait."""

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from realhf.api.batch_meta import RowId
from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import Group, ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.decode import cuda_graphs, group
from realhf.models.engine.decode.scheduler import Request
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.kv_cache import KVCache
from realhf.ops.cascade import SharedPrefixes
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import fake_cuda
from tests.gpu_emulated.fake_streams import FakeStream, RaceDetector
from tests.gpu_emulated.test_engine import TOLERANCE, distance, logprobs
from tests.models.engine.scripted_driver import LENGTHS as SCRIPTED_LENGTHS
from tests.models.engine.scripted_driver import play
from tests.models.engine.tiny_engine import STOP, engine_on, prompts_of
from tests.models.tiny_models import MOE, SIZES

LENGTHS, N = (3, 1, 7), 2
CONFIG = GenerationConfig(max_new_tokens=12, max_num_seqs=4)
MAX_WAITS, MAX_LAUNCHES = 2, 3
"""Waits of a call besides one every eighth step: prompts, prefill; launches per step: replay, outputs."""


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tokens_of(engine: NativeEngine, config: GenerationConfig = CONFIG, seed: int = 11) -> Tensor:
    prompts = prompts_of(LENGTHS).to(engine.context.device)
    return engine.generate(prompts, config, N, seed)["tokens"].cpu()


@pytest.fixture
def gpu(folders: dict[str, Path], cuda: FakeCuda) -> NativeEngine:
    return engine_on(folders["llama"], trained=False, device="cuda:0", bf16=True)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Weak references to all caches that are created."""
    found: list[weakref.ref] = []

    class TracedCache(KVCache):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            found.append(weakref.ref(self))

    monkeypatch.setattr("realhf.models.transformer.KVCache", TracedCache)
    return found


def test_a_large_cache_is_released_after_the_call(
    gpu: NativeEngine, caches: list[weakref.ref], no_gc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "KEPT_SHARE", 0.0)
    tokens_of(gpu)
    assert len(caches) == 1 and caches[0]() is None


@pytest.mark.parametrize("release", ["offload", "free"])
def test_a_small_cache_is_kept_until_the_weights_are_released(
    release: str, gpu: NativeEngine, cuda: FakeCuda, caches: list[weakref.ref], no_gc: None
) -> None:
    tokens_of(gpu)
    n_captures = cuda.count("graph capture")
    assert n_captures > 0
    tokens_of(gpu)
    assert len(caches) == 1 and caches[0]() is not None
    assert cuda.count("graph capture") == cuda.count("empty_cache") == n_captures
    getattr(gpu.params, release)()
    assert caches[0]() is None


@pytest.mark.parametrize("change", ["seed", "options", "weights", "moved", "replaced", "longer rows", "more slots"])
def test_kept_graphs_give_the_results_of_new_ones(
    change: str, gpu: NativeEngine, folders: dict[str, Path], cuda: FakeCuda
) -> None:
    tokens_of(gpu)
    other = engine_on(folders["llama"], trained=False, device="cuda:0", bf16=True)
    config, seed = CONFIG, 11
    match change:
        case "seed":
            seed = -(1 << 40) - 5
        case "options":
            config = GenerationConfig(max_new_tokens=12, max_num_seqs=4, temperature=0.5, stop_token_ids=[7, 9])
        case "weights":
            for engine in (gpu, other):
                engine.params.data.mul_(1.5)
        case "moved":
            gpu.params.offload()
            gpu.params.load()
        case "replaced":
            gpu.params.use_buffers(gpu.params.data.clone(), gpu.params.data.float())
        case "longer rows":
            config = GenerationConfig(max_new_tokens=16, max_num_seqs=4)
        case "more slots":
            config = GenerationConfig(max_new_tokens=12, max_num_seqs=6)
    assert torch.equal(tokens_of(gpu, config, seed), tokens_of(other, config, seed))


def test_a_longer_rotary_table_does_not_break_kept_graphs(gpu: NativeEngine, cuda: FakeCuda) -> None:
    expected = tokens_of(gpu)
    gpu.model.rotary.tables(1000)
    n_captures = cuda.count("graph capture")
    assert torch.equal(tokens_of(gpu), expected) and cuda.count("graph capture") == n_captures


@pytest.mark.parametrize("context_step", [4, 8])
def test_contexts_that_grow_between_waits(
    context_step: int, gpu: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows pass a multiple of ``CONTEXT_STEP`` in the steps of one wait; the kernel refuses rows beyond its bound."""
    expected = tokens_of(gpu)
    gpu.pipeline.kept_decoder.drop()
    monkeypatch.setattr(cuda_graphs, "CONTEXT_STEP", context_step)
    assert torch.equal(tokens_of(gpu), expected)


@pytest.mark.parametrize("n_waits", range(2))
def test_a_warm_up_run_is_ordered_with_the_steps(
    n_waits: int, folders: dict[str, Path], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of the warm-up waits for the caller's, which waits for it: no race, and one without either wait."""
    engine = engine_on(folders["llama"], trained=False, device="cuda:0", bf16=True)
    cuda.races, n_calls, original = RaceDetector(cuda), 0, FakeStream.wait_stream
    tokens_of(engine)
    gpu_decoder = engine.pipeline.kept_decoder
    gpu_decoder.drop()

    def wait(stream: FakeStream, other: FakeStream) -> None:
        nonlocal n_calls
        if n_calls % 2 != n_waits:
            original(stream, other)
        n_calls += 1

    monkeypatch.setattr(FakeStream, "wait_stream", wait)
    with pytest.raises(RuntimeError, match="race"):
        tokens_of(engine)


def test_the_number_of_graphs_is_bounded(gpu: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(gpu)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    assert torch.equal(tokens_of(gpu), expected)
    decoder = gpu.pipeline.kept_decoder._decoder
    assert decoder is not None and len(decoder._captured) <= 2


@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 6, "top_k": 9}, {"greedy": True}])
def test_results_do_not_depend_on_the_steps_per_wait(
    options: dict, gpu: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GenerationConfig(max_new_tokens=12, max_num_seqs=4, **options)
    expected = tokens_of(gpu, config)
    for steps in (1, 3):
        defaults = group.DecodeGroup.__init__.__defaults__
        monkeypatch.setattr(group.DecodeGroup.__init__, "__defaults__", (*defaults[:-1], steps))
        assert torch.equal(tokens_of(gpu, config), expected)


def test_ceilings_of_a_decoding_step(gpu: NativeEngine, cuda: FakeCuda) -> None:
    config = GenerationConfig(max_new_tokens=17, max_num_seqs=6, min_new_tokens=16)
    tokens_of(gpu, config)  # captures
    prompts = prompts_of(LENGTHS).to("cuda:0")
    cuda.events.clear()
    gpu.generate(prompts, config, N, 11)
    steps = cuda.count("graph replay")
    assert steps == 16 and cuda.count("graph capture") == 0
    assert cuda.n_waits <= steps / 8 + MAX_WAITS, cuda.report()
    in_turns = sum(n for e, n in cuda.events.items() if e.kind == "launch" and "decode/cuda_graphs" in e.line)
    assert in_turns <= MAX_LAUNCHES * steps, cuda.report()


def test_copies_of_prompts_are_one_launch(gpu: NativeEngine, cuda: FakeCuda) -> None:
    cache = gpu.model.new_cache(9, 16)
    cache.both.copy_(torch.randn(cache.both.shape))
    before = cache.both.cpu()
    moves = [(0, 3, 0, 5), (0, 4, 0, 5), (1, 5, 2, 7), (2, 6, 1, 1)]
    cuda.events.clear()
    cache.copy_slots(moves)
    copies = [event for event in cuda.events if "index_copy_" in event.what]
    assert len(copies) == 1 and cuda.events[copies[0]] == 1 and cuda.n_waits == 0
    for src, dst, start, stop in moves:
        before[:, :, dst, start:stop] = before[:, :, src, start:stop]
    assert torch.equal(cache.both.cpu().isnan(), before.isnan()) and torch.equal(cache.both.cpu(), before)


def test_decoding_reads_only_the_used_length(gpu: NativeEngine, cuda: FakeCuda) -> None:
    """Unwritten positions of the cache are NaN."""
    cuda.events.clear()
    made = gpu.generate(prompts_of(LENGTHS).to("cuda:0"), CONFIG, N, 11)
    assert made["logprobs"].cpu().isfinite().all()
    decoder = gpu.pipeline.kept_decoder._decoder
    assert decoder is not None and decoder.cache.by_token and decoder.cache.both.cpu().isnan().any()


class MirrorGroup(Group):
    """A tensor-parallel group whose other member computes the same partial results."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(2)


def test_tensor_parallel_steps_are_captured(
    folders: dict[str, Path], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(DeviceMesh((0, 1)), ParallelStrategy(tp=2))
    context = ParallelContext(layout, 0, torch.device("cuda:0"), {(0, 1): MirrorGroup((0, 1), 0)})
    spec = ModelSpec(str(folders["llama"]), bf16=True)
    config = read_hf_config(folders["llama"], False)
    engine = build_engine(config, RoleSpec(spec), context, False, True, 3, 1, (STOP,), None)
    captured = tokens_of(engine)
    assert cuda.count("graph replay") > 0
    monkeypatch.setattr(group, "decodes_on_device", lambda model: False)
    assert torch.equal(tokens_of(engine), captured)


@pytest.mark.parametrize(
    "bf16, capability, is_captured",
    [
        (True, (9, 0), True),
        (True, (10, 0), True),
        (True, (8, 0), False),
        (True, (12, 0), False),
        (False, (9, 0), False),
    ],
)
def test_routed_experts_are_captured_with_a_grouped_product(
    bf16: bool,
    capability: tuple[int, int],
    is_captured: bool,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it the host reads how many tokens every expert has."""
    config = GenerationConfig(max_new_tokens=6, max_num_seqs=6)
    with fake_cuda(capability=capability) as cuda:
        engine = engine_on(folders["qwen3_moe"], trained=False, device="cuda:0", bf16=bf16)
        found = tokens_of(engine, config)
        assert (cuda.count("graph replay") > 0) == is_captured
        monkeypatch.setattr(group, "decodes_on_device", lambda model: False)
        assert torch.equal(tokens_of(engine, config), found)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_recorded_experts_are_those_of_the_tokens(
    shares: bool, on_device: bool, tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them the model computes the log-probabilities of generation, and with those of other tokens it does not."""
    torch.manual_seed(0)
    sizes = {**SIZES, **MOE, "head_dim": 16}  # the kernels of attention take multiples of 8
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, norm_topk_prob=True)).save_pretrained(tmp_path)
    engine = engine_on(tmp_path, trained=False, device="cuda:0", bf16=True)
    config = GenerationConfig(max_new_tokens=14, max_num_seqs=9, stop_token_ids=list(range(0, 40, 3)))
    monkeypatch.setattr(group, "MIN_SAVED_BYTES", 0 if shares else 1 << 60)
    monkeypatch.setattr(group, "decodes_on_device", lambda model: on_device)
    calls, attend = list[int](), SharedPrefixes.attend
    monkeypatch.setattr(SharedPrefixes, "attend", lambda self, *args: calls.append(1) or attend(self, *args))
    made = engine.generate(prompts_of((3, 1, 7, 5)).to("cuda:0"), config, 5, 11, record_experts=True).to("cpu")
    experts = made["routed_experts"].view(len(made["tokens"]), -1)
    unknown = experts == engine.config.n_experts
    assert bool(calls) == shares and unknown.all(1).sum() == 20 == unknown.any(1).sum()
    cpu, sampled = engine_on(tmp_path, trained=False), made["prompt_mask"] == 0

    def error(experts: Tensor) -> float:
        column = Column(experts.flatten(), made.lengths("routed_experts"))
        batch = made.only(("tokens",)).with_columns(routed_experts=column)
        found = cpu.forward(batch, lambda outputs, _: outputs.logprobs())
        return distance(made["logprobs"][sampled], found[sampled])

    assert error(experts) < TOLERANCE[True] < error(experts.roll(1, 0))


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("in_graphs", [True, False])
def test_rows_of_a_prompt_read_it_in_one_slot(
    steps: int, in_graphs: bool, folders: dict[str, Path], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at different steps, so that prompts pass to other slots. The log-probabilities are the model's."""
    engine = engine_on(folders["llama"], trained=False, device="cuda:0", bf16=True)
    config = GenerationConfig(max_new_tokens=14, max_num_seqs=9, stop_token_ids=list(range(0, 40, 3)))
    monkeypatch.setattr(group, "MIN_SAVED_BYTES", 0)
    calls = list[int]()
    attend = SharedPrefixes.attend
    monkeypatch.setattr(SharedPrefixes, "attend", lambda self, *args: calls.append(1) or attend(self, *args))
    defaults = group.DecodeGroup.__init__.__defaults__
    monkeypatch.setattr(group.DecodeGroup.__init__, "__defaults__", (*defaults[:-1], steps))
    if not in_graphs:
        monkeypatch.setattr(group, "decodes_on_device", lambda model: False)
    made = [engine.generate(prompts_of((3, 1, 7, 5)).to("cuda:0"), config, 5, seed).to("cpu") for seed in (11, 12)]
    assert calls and (cuda.count("graph replay") > 0) == in_graphs
    cpu = engine_on(folders["llama"], trained=False)
    for batch in made:
        sampled = batch["prompt_mask"] == 0
        assert len({*batch.lengths("tokens")}) > 3, "rows end at different steps"
        assert distance(batch["logprobs"][sampled], logprobs(cpu, batch)[sampled]) < TOLERANCE[True]


def test_prefixes_are_shared_where_it_saves_time(gpu: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(prompts_of((3, 1)).to("cuda:0"), CONFIG, 4, 1, (STOP,), 1 << 30)
    read = gpu.model.new_cache(4, 20).bytes_per_token * 2 * 4 * 3 / 4  # four slots, prompts of two tokens
    for limit, shares in ((read, True), (read + 1, False)):
        monkeypatch.setattr(group, "MIN_SAVED_BYTES", limit)
        assert group.DecodeGroup(gpu.model, request, deque(range(8)), 4).slots.shares_prefix == shares


def test_copies_that_depend_on_each_other_are_in_order(gpu: NativeEngine, cuda: FakeCuda) -> None:
    """A prompt passes to a row, which then moves to a free slot."""
    cache = gpu.model.new_cache(9, 16)
    cache.both.copy_(torch.arange(cache.both.numel()).view(cache.both.shape) % 251)
    expected = cache.both.cpu()
    moves = [(1, 6, 0, 5), (6, 1, 0, 9), (7, 2, 3, 4), (1, 2, 0, 3), (3, 2, 0, 1)]
    for src, dst, start, stop in moves:
        expected[:, :, dst, start:stop] = expected[:, :, src, start:stop]
    cache.copy_slots(moves)
    assert torch.equal(cache.both.cpu(), expected)


def test_a_session_releases_its_cache(gpu: NativeEngine, caches: list[weakref.ref], no_gc: None) -> None:
    play(gpu)
    assert len(caches) == 1 and caches[0]() is None


def test_a_smaller_cache_is_released_before_the_larger_one_is_allocated(
    gpu: NativeEngine, caches: list[weakref.ref], no_gc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_of(gpu)
    new, alive = gpu.model.new_cache, list[bool]()
    monkeypatch.setattr(gpu.model, "new_cache", lambda *sizes: alive.append(caches[0]() is not None) or new(*sizes))
    tokens_of(gpu, GenerationConfig(max_new_tokens=12, max_num_seqs=6))
    assert alive == [False]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("bf16", [False, True])
def test_multi_turn_rollouts(family: str, bf16: bool, folders: dict[str, Path], cuda: FakeCuda) -> None:
    engine = engine_on(folders[family], trained=False, device="cuda:0", bf16=bf16)
    rows, turns = play(engine, 1)
    assert play(engine)[0] == rows or bf16
    ids = tuple(RowId(*key) for key, _ in rows)
    batch = SequenceBatch(ids, {"tokens": Column.of([torch.tensor(tokens) for _, tokens in rows])})
    logprobs = engine_on(folders[family], trained=False).forward(batch, lambda outputs, _: outputs.logprobs())
    first = [(torch.tensor(some[0]["logprobs"]), SCRIPTED_LENGTHS[key[0]]) for key, some in turns]
    expected = [
        row[start:][: len(one)]
        for (one, start), row in zip(first, logprobs.split(batch.lengths("tokens")), strict=True)
    ]
    assert distance(torch.cat([one for one, _ in first]), torch.cat(expected)) < TOLERANCE[bf16]
