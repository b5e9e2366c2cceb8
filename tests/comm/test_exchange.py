"""Pieces of all sizes and types arrive where they should, as they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.comm.exchange import ALIGN, P2PCopy, TensorSlice, exchange

CPU = torch.device("cpu")
DTYPES = (torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16)


def row(number: int, piece: TensorSlice) -> Tensor:
    """What move ``number`` carries."""
    return (torch.arange(piece.numel) * 7 + number).remainder(251).to(piece.dtype)


def random_moves(seed: int, world: int, count: int, longest: int) -> list[P2PCopy]:
    generator = torch.Generator().manual_seed(seed)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    moves = []
    for number in range(count):
        numel = pick(longest + 1) if pick(4) else 0
        moves.append(P2PCopy(number, pick(world), pick(world), TensorSlice(DTYPES[pick(len(DTYPES))], numel)))
    return moves


def exchange_rows(rank: int, moves: list[P2PCopy]) -> tuple[dict[int, Tensor], int]:
    got: dict[int, Tensor] = {}
    pieces = {move.what: move.piece for move in moves}
    received = exchange(
        moves, rank, lambda what: row(what, pieces[what]), lambda what, value: got.update({what: value.clone()}), CPU
    )
    return got, received


def many_exchanges(rank: int, world: int, batches: list[list[P2PCopy]]) -> list[Any]:
    return [exchange_rows(rank, moves) for moves in batches]


def check(moves: list[P2PCopy], rank: int, got: dict[int, Tensor], received: int) -> None:
    mine = [move for move in moves if move.dst == rank]
    assert sorted(got) == [move.what for move in mine]
    for move in mine:
        expected = row(move.what, move.piece)
        assert got[move.what].dtype == expected.dtype and torch.equal(got[move.what], expected)
    assert received == sum(move.piece.nbytes for move in mine if move.src != rank)


@pytest.mark.dist
def test_random_rows_between_three_ranks(on_ranks: Callable[..., list[Any]]) -> None:
    batches = [random_moves(seed, 3, count, longest=300) for seed, count in enumerate((1, 5, 40, 200))]
    batches += [[], random_moves(9, 3, 30, longest=0)]  # nothing at all, and pieces without elements
    results = on_ranks(3, many_exchanges, batches)
    for rank, answers in enumerate(results):
        for moves, (got, received) in zip(batches, answers, strict=True):
            check(moves, rank, got, received)


def swap_boxes(rank: int, world: int) -> Tensor:
    """Every rank sends a box of its matrix, which does not lie in one piece, to the next rank, and one to itself."""
    matrix = torch.arange(30.0).view(5, 6) + 100 * rank
    inside = torch.zeros(5, 6)
    box = (slice(1, 4), slice(2, 5))
    own = (slice(0, 1), slice(0, 6))
    moves = [P2PCopy(box, r, (r + 1) % world, TensorSlice(torch.float32, 9)) for r in range(world)]
    moves += [P2PCopy(own, r, r, TensorSlice(torch.float32, 6)) for r in range(world)]

    def write(what: object, value: Tensor) -> None:
        inside[what].copy_(value.view(inside[what].shape))

    exchange(moves, rank, lambda what: matrix[what], write, CPU)
    return inside


@pytest.mark.dist
def test_boxes_of_a_matrix(on_ranks: Callable[..., list[Any]]) -> None:
    for rank, inside in enumerate(on_ranks(2, swap_boxes)):
        plain = torch.arange(30.0).view(5, 6)
        expected = torch.zeros(5, 6)
        expected[1:4, 2:5] = plain[1:4, 2:5] + 100 * (1 - rank)
        expected[0] = plain[0] + 100 * rank
        assert torch.equal(inside, expected)


def test_what_concerns_nobody_else_needs_no_processes() -> None:
    moves = [
        P2PCopy(0, 1, 1, TensorSlice(torch.int64, 4)),
        P2PCopy(1, 0, 2, TensorSlice(torch.int64, 4)),
        P2PCopy(2, 1, 1, TensorSlice(torch.uint8, 0)),
    ]
    got, received = exchange_rows(1, moves)
    assert received == 0 and sorted(got) == [0, 2]
    assert torch.equal(got[0], row(0, moves[0].piece)) and got[2].numel() == 0


def test_pieces_are_rounded_up_so_that_any_type_can_follow() -> None:
    sizes = [TensorSlice(dtype, numel).nbytes for dtype in DTYPES for numel in range(40)]
    assert all(size % ALIGN == 0 for size in sizes)
    assert all(TensorSlice(d, n).nbytes - n * d.itemsize in range(ALIGN) for d in DTYPES for n in range(40))
