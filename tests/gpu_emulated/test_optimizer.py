"""Launches of an optimizer step do not grow with the number of parameters; offloaded state gives the same steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from realhf.api.config import OptimizerConfig
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.param_box import ParamSpec, whole
from realhf.comm.process_groups import ParallelContext
from realhf.models.engine import optimizer_offload
from realhf.models.engine.optimizer import CHUNK, ShardedAdamW
from realhf.models.engine.snapshot import snapshot
from realhf.models.flat_params import FlatParams
from realhf.plan.cost.memory import OPTIMIZER_CHUNK_NUMEL
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_streams import FakeStream, RaceDetector
from tests.models.engine.tiny_engine import counted, engine_on, nll, rows_of

MAX_LAUNCHES, MAX_WAITS = 13, 1
"""Of the initialisation and a step; the wait reads the gradient norm."""


def optimizer_of(specs: tuple[ParamSpec, ...], dtype: torch.dtype, device: str, offload: bool = False) -> ShardedAdamW:
    params = FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, dtype, device)
    context = ParallelContext(Layout(DeviceMesh((0,)), ParallelStrategy()), 0, torch.device(device))
    return ShardedAdamW(params, OptimizerConfig(gradient_clipping=1.0, offload=offload), context, False)


def step(numel: int, dtype: torch.dtype, device: str) -> float:
    """Make one step with a random gradient; return its norm."""
    optimizer = optimizer_of((ParamSpec("a", (numel,), 0),), dtype, device)
    optimizer.grad.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    return optimizer.step(1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_do_not_grow(dtype: torch.dtype, cuda: FakeCuda) -> None:
    counts = []
    for numel in (100, 7 * CHUNK + 1):
        expected = step(numel, dtype, "cpu")
        cuda.events.clear()
        assert step(numel, dtype, "cuda:0") == expected
        lines = {event: n for event, n in cuda.events.items() if event.line.startswith(("models/engine", "ops/adamw"))}
        launches, waits = (sum(n for e, n in lines.items() if e.kind == kind) for kind in ("launch", "wait"))
        counts.append(launches)
        assert launches <= MAX_LAUNCHES and waits == MAX_WAITS, lines
        assert not any(event.kind.startswith("copy") for event in lines), lines
    assert counts[0] == counts[1]


@pytest.fixture
def chunk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda numel: monkeypatch.setattr(optimizer_offload, "CHUNK_NUMEL", numel)


def states_after(optimizer: ShardedAdamW, n_steps: int) -> list[Tensor]:
    """Return weights and state on the host after steps with random gradients."""
    for number in range(n_steps):
        grad = torch.randn(optimizer.grad.shape, generator=torch.Generator().manual_seed(number))
        optimizer.grad.copy_(grad)
        optimizer.step(1e-2)
    return [x.cpu().clone() for x in (*optimizer.state.values(), optimizer.params.data)]  # weights last: that waits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 16, 40, 200])
def test_steps_with_offloaded_state_are_the_same(
    numel: int, dtype: torch.dtype, chunk: Callable[[int], None], cuda: FakeCuda
) -> None:
    """Chunks end inside and at the end of matrices, which decay, and vectors, which do not."""
    chunk(8)
    specs = (ParamSpec("vector", (3,), 0), ParamSpec("matrix", (numel, 3), 0))
    expected = states_after(optimizer_of(specs, dtype, "cuda:0"), 3)
    cuda.races = RaceDetector(cuda)
    optimizer = optimizer_of(specs, dtype, "cuda:0", offload=True)
    assert not any(tensor.is_cuda for tensor in optimizer.state.values())
    found = states_after(optimizer, 3)
    assert len(found) == len(expected) == 3 + (dtype == torch.bfloat16)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert not cuda.races.unordered(), "memory of the chunks is released before its last use"


@pytest.mark.parametrize(
    "method, number", [*(("wait_event", n) for n in range(8)), *(("wait_stream", n) for n in range(1, 4))]
)
def test_every_wait_between_streams_is_needed(
    method: str, number: int, chunk: Callable[[int], None], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait of two steps is left out. The first one has nothing to wait for, and the host does not wait."""
    chunk(8)
    cuda.races, n_calls = RaceDetector(cuda), 0
    original = getattr(FakeStream, method)

    def wait(stream: FakeStream, other: object) -> None:
        nonlocal n_calls
        if n_calls != number:
            original(stream, other)
        n_calls += 1

    monkeypatch.setattr(FakeStream, method, wait)
    state = optimizer_offload.ChunkedState([torch.zeros(30, pin_memory=True)], torch.device("cuda:0"))
    with pytest.raises(RuntimeError, match="race"):
        for _ in range(2):
            for _, (part,) in state.chunks():
                part.add_(1)
        if cuda.races.unordered():
            raise RuntimeError("race after the last chunk")
    assert n_calls > number


@pytest.mark.parametrize("bf16", [False, True])
def test_training_with_offloaded_state_waits_for_nothing_more(
    bf16: bool, folders: dict[str, Path], chunk: Callable[[int], None], cuda: FakeCuda
) -> None:
    chunk(4096)
    rows, results, waits = rows_of((5, 9, 2)), [], []
    for offload in (False, True):
        engine = engine_on(folders["llama"], device="cuda:0", bf16=bf16, optimizer={"offload": offload})
        cuda.events.clear()
        engine.train(rows.to("cuda:0"), nll, counted(rows))
        waits.append(cuda.n_waits)
        engine.train(rows.to("cuda:0"), nll, counted(rows))
        results.append(snapshot(engine))
    assert waits[0] == waits[1]
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_the_planner_knows_the_size_of_a_chunk() -> None:
    assert OPTIMIZER_CHUNK_NUMEL == optimizer_offload.CHUNK_NUMEL and optimizer_offload.N_BUFFERS == 2
