"""The fake device refuses what a GPU refuses, and counts what a host waits for."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import fake_cuda

DEVICE = torch.device("cuda", 0)


def numbers(device: str = "cuda:0") -> Tensor:
    return torch.arange(4.0).to(device)


def test_tensors_say_where_they_are_and_have_real_values(cuda: FakeCuda) -> None:
    x = torch.ones(3, device="cuda")
    assert x.device == DEVICE and x.is_cuda and (x + 1).sum().item() == 6.0
    assert x.to("cuda:0") is x and x.to("cuda:1").device.index == 1 and not x.cpu().is_cuda
    assert x.data_ptr() != x.inner.data_ptr()  # type: ignore[attr-defined]
    assert torch.tensor([1, 2], device="cuda:1").tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.ones(1, device="cuda:2")


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.ones(4).add_(x),
        lambda x: x + x.to("cuda:1"),
        lambda x: torch.cat((x, torch.ones(4))),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: torch.ones(4)[x.long()],
        lambda x: torch.mm(x.view(2, 2), torch.ones(2, 2, device="cuda"), out=torch.empty(2, 2)),
    ],
)
def test_operations_on_several_devices_raise(mix: Callable[[Tensor], Tensor], cuda: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(numbers())


def test_scalars_of_the_host_are_allowed(cuda: FakeCuda) -> None:
    assert (numbers() * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("read", [lambda x: x.numpy(), np.asarray, np.from_dlpack])
def test_host_code_cannot_read_device_memory(read: Callable[[Tensor], object], cuda: FakeCuda) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        read(numbers())


def test_kernels_of_the_host_do_not_take_device_tensors(cuda: FakeCuda) -> None:
    from realhf.ops import extension

    kernel = extension.kernel("rms_norm", "cpu")
    if kernel is None:
        pytest.skip("the kernels are not compiled")
    with pytest.raises(RuntimeError, match="has no kernel for CUDA"):
        kernel(numbers().view(2, 2), torch.ones(2, device="cuda"), 1e-5)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: torch.empty(4).copy_(x),
        lambda x: x.long().bincount(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.tensor([1.0], device="cuda:0"),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
    ],
)
def test_waits_are_counted_and_refused_in_a_capture(read: Callable[[Tensor], object], cuda: FakeCuda) -> None:
    x = numbers()
    cuda.events.clear()
    read(x)
    assert cuda.n_waits == 1, cuda.report()
    with (
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        read(x)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: (x * 2)[1:].view(3, 1),
        lambda x: x.masked_fill_(x > 1, 0.0),
        lambda x: x.index_select(0, x.long()),
        lambda x: x.repeat_interleave(x.long(), output_size=6),
        lambda x: x.copy_(torch.ones(4).pin_memory(), non_blocking=True),
        lambda x: torch.ones(4, pin_memory=True).to("cuda:0", non_blocking=True),
        lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    ],
)
def test_work_without_waits(work: Callable[[Tensor], object], cuda: FakeCuda) -> None:
    x = numbers()
    cuda.events.clear()
    work(x)
    assert cuda.n_waits == 0, cuda.report()


def test_views_and_allocations_launch_nothing(cuda: FakeCuda) -> None:
    x = numbers()
    cuda.events.clear()
    x[1:].view(3, 1).t().detach().unbind(1)
    torch.empty(3, device="cuda")
    assert cuda.n_launches == 0
    x.add_(1).mul_(2)
    assert cuda.n_launches == 2


def test_a_copy_to_pinned_memory_arrives_at_the_next_wait(cuda: FakeCuda) -> None:
    target = torch.zeros(4, pin_memory=True)
    x = numbers()
    target.copy_(x, non_blocking=True)
    x.zero_()
    assert target.tolist() != [0.0, 1.0, 2.0, 3.0]
    torch.cuda.Event().synchronize()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_new_memory_contains_garbage(cuda: FakeCuda) -> None:
    assert torch.empty(3, device="cuda").isnan().all() and torch.ones(2, device="cuda").new_empty(2).isnan().all()
    assert int(torch.empty(1, dtype=torch.int64, device="cuda")) < 0


def test_released_memory_is_not_read(cuda: FakeCuda) -> None:
    x = numbers()
    address = x.data_ptr()
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="released"):
        x.sum()
    x.untyped_storage().resize_(16)
    assert x.isnan().all() and x.data_ptr() != address


def captured(x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x.add_(1) * 10
    return graph, out


def test_graphs_compute_at_replay_only(cuda: FakeCuda) -> None:
    x = numbers()
    graph, out = captured(x)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0] and out.isnan().all()
    for turn in (1, 2):
        graph.replay()
        assert x.tolist() == [turn, turn + 1, turn + 2, turn + 3] and out.tolist() == [10 * v for v in x.tolist()]


def test_conversions_and_scalars_in_a_graph(cuda: FakeCuda) -> None:
    x, graph = numbers(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.where(x > 1, x.int() + 1, -5)
    for _ in range(2):
        graph.replay()
        assert out.tolist() == [v + 1 if v > 1 else -5 for v in x.tolist()]
        x.add_(1)


def test_graphs_do_not_keep_their_inputs_alive(cuda: FakeCuda) -> None:
    x = numbers()
    graph, _ = captured(x)
    del x
    with pytest.raises(RuntimeError, match="released after its capture"):
        graph.replay()


def test_graphs_do_not_follow_memory_that_moves(cuda: FakeCuda) -> None:
    x = numbers()
    graph, _ = captured(x)
    for size in (0, 16):
        x.untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match="has moved"):
        graph.replay()


def test_autograd_stays_on_the_device(cuda: FakeCuda) -> None:
    x = numbers().requires_grad_()
    (x.bfloat16().float() ** 2).sum().backward()
    assert x.grad is not None and x.grad.device == DEVICE and x.grad.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_the_devices_vanish_afterwards() -> None:
    with fake_cuda():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available() and torch.tensor([1.0]).device.type == "cpu"
