"""The race detector finds missing waits between streams, and none in ordered work."""

import pytest
import torch

from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_streams import RaceDetector


@pytest.fixture
def x(cuda: FakeCuda) -> torch.Tensor:
    cuda.races = RaceDetector(cuda)
    return torch.zeros(8, device="cuda:0")


@pytest.mark.parametrize("wait", ["stream", "event", "host", "nothing"])
def test_writes_of_two_streams_need_an_order(wait: str, x: torch.Tensor) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    match wait:
        case "stream":
            side.wait_stream(main)
        case "event":
            side.wait_event(main.record_event())
        case "host":
            x.sum().item()
    with torch.cuda.stream(side):
        if wait == "nothing":
            with pytest.raises(RuntimeError, match="race: .*add_"):
                x.add_(1)
        else:
            x.add_(1)


def test_an_event_orders_only_what_is_before_it(x: torch.Tensor) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    event = main.record_event()
    x.add_(1)
    side.wait_event(event)
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="race"):
        x.clone()


def test_reads_and_disjoint_writes_need_no_order(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x[:4].add_(1)
    x[6:].clone()
    with torch.cuda.stream(side):
        x[4:6].add_(1)
        x[6:].clone()
        with pytest.raises(RuntimeError, match="race"):
            x[3:5].clone()


def test_copies_to_pinned_memory_are_accesses(x: torch.Tensor, cuda: FakeCuda) -> None:
    host, side = torch.zeros(8, pin_memory=True), torch.cuda.Stream()
    host.copy_(x, non_blocking=True)
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="race"):
        x.copy_(host, non_blocking=True)
    assert cuda.races is not None and len(cuda.races.unordered()) == 0
