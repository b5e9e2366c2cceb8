"""Slices of all sizes and element types arrive unchanged at their targets."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.comm.exchange import P2PCopy, TensorSlice, exchange
from realhf.comm.packets import ALIGN

CPU = torch.device("cpu")
DTYPES = (torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16)


def row(number: int, tensor_slice: TensorSlice) -> Tensor:
    """The elements of copy ``number``."""
    return (torch.arange(tensor_slice.numel) * 7 + number).remainder(251).to(tensor_slice.dtype)


def random_copies(seed: int, world: int, count: int, longest: int) -> list[P2PCopy]:
    generator = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    copies = []
    for number in range(count):
        numel = pick(longest + 1) if pick(4) else 0
        copies.append(P2PCopy(number, pick(world), pick(world), TensorSlice(DTYPES[pick(len(DTYPES))], numel)))
    return copies


def exchange_rows(rank: int, copies: list[P2PCopy]) -> tuple[dict[int, Tensor], int]:
    received_rows: dict[int, Tensor] = {}
    slices = {copy.what: copy.tensor_slice for copy in copies}
    n_bytes = exchange(
        copies,
        rank,
        lambda what: row(what, slices[what]),
        lambda what, value: received_rows.update({what: value.clone()}),
        CPU,
    )
    return received_rows, n_bytes


def many_exchanges(rank: int, world: int, batches: list[list[P2PCopy]]) -> list[Any]:
    return [exchange_rows(rank, copies) for copies in batches]


def check(copies: list[P2PCopy], rank: int, received_rows: dict[int, Tensor], n_bytes: int) -> None:
    own = [copy for copy in copies if copy.dst == rank]
    assert sorted(received_rows) == [copy.what for copy in own]
    for copy in own:
        expected = row(copy.what, copy.tensor_slice)
        assert received_rows[copy.what].dtype == expected.dtype and torch.equal(received_rows[copy.what], expected)
    assert n_bytes == sum(copy.tensor_slice.nbytes for copy in own if copy.src != rank)


@pytest.mark.dist
def test_random_rows_between_three_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    batches = [random_copies(seed, 3, count, longest=300) for seed, count in enumerate((1, 5, 40, 200))]
    batches += [[], random_copies(9, 3, 30, longest=0)]  # no copies, and copies without elements
    results = on_ranks(3, many_exchanges, batches)
    for rank, outputs in enumerate(results):
        for copies, (rows, n_bytes) in zip(batches, outputs, strict=True):
            check(copies, rank, rows, n_bytes)


def swap_boxes(rank: int, world: int) -> Tensor:
    """Every rank sends a non-contiguous box of its matrix to the next rank, and another box to itself."""
    matrix = torch.arange(30.0).view(5, 6) + 100 * rank
    target = torch.zeros(5, 6)
    box = (slice(1, 4), slice(2, 5))
    own = (slice(0, 1), slice(0, 6))
    copies = [P2PCopy(box, r, (r + 1) % world, TensorSlice(torch.float32, 9)) for r in range(world)]
    copies += [P2PCopy(own, r, r, TensorSlice(torch.float32, 6)) for r in range(world)]

    def write(what: object, value: Tensor) -> None:
        target[what].copy_(value.view(target[what].shape))

    exchange(copies, rank, lambda what: matrix[what], write, CPU)
    return target


@pytest.mark.dist
def test_boxes_of_a_matrix(on_ranks: Callable[..., list[Any]]) -> None:
    for rank, target in enumerate(on_ranks(2, swap_boxes)):
        plain = torch.arange(30.0).view(5, 6)
        expected = torch.zeros(5, 6)
        expected[1:4, 2:5] = plain[1:4, 2:5] + 100 * (1 - rank)
        expected[0] = plain[0] + 100 * rank
        assert torch.equal(target, expected)


def test_local_copies_need_no_process_group() -> None:
    copies = [
        P2PCopy(0, 1, 1, TensorSlice(torch.int64, 4)),
        P2PCopy(1, 0, 2, TensorSlice(torch.int64, 4)),
        P2PCopy(2, 1, 1, TensorSlice(torch.uint8, 0)),
    ]
    rows, n_bytes = exchange_rows(1, copies)
    assert n_bytes == 0 and sorted(rows) == [0, 2]
    assert torch.equal(rows[0], row(0, copies[0].tensor_slice)) and rows[2].numel() == 0


def test_slice_sizes_are_aligned_for_every_dtype() -> None:
    sizes = [TensorSlice(dtype, numel).nbytes for dtype in DTYPES for numel in range(40)]
    assert all(size % ALIGN == 0 for size in sizes)
    assert all(TensorSlice(d, n).nbytes - n * d.itemsize in range(ALIGN) for d in DTYPES for n in range(40))
