"""Parcels hold every element once, in order and within bounds; what was damaged is noticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.comm.packets import ALIGN, ExchangeBuffers, P2PCopy, TensorSlice, checksum, packets_of, strided_views

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@st.composite
def moves_of_rank_0(draw: st.DrawFn) -> list[P2PCopy]:
    moves = []
    for number in range(draw(st.integers(0, 12))):
        piece = TensorSlice(draw(st.sampled_from(DTYPES)), draw(st.integers(1, 300)))
        receivers = draw(st.sets(st.integers(1, 3), min_size=1))
        content = number if draw(st.booleans()) else None
        moves += [P2PCopy((number, dst), 0, dst, piece, content) for dst in sorted(receivers)]
    return draw(st.permutations(moves))


@settings(max_examples=50, deadline=None)
@given(moves_of_rank_0(), st.integers(2, 40), st.sampled_from((0, ALIGN)), st.sampled_from((1, 500, 1 << 40)))
def test_every_element_travels_once(moves: list[P2PCopy], limit: int, trailer: int, alone: int) -> None:
    limit = limit * ALIGN
    seen = {move.what: 0 for move in moves}
    written = set()
    for parcel in packets_of(moves, limit, trailer, alone):
        assert 0 < parcel.nbytes <= limit
        end = 0
        for part in parcel.parts:
            assert part.at == end and part.at % ALIGN == 0 and part.start < part.stop
            assert part.nbytes == (part.stop - part.start) * part.dtype.itemsize
            end += -(-part.nbytes // ALIGN) * ALIGN + trailer
            assert parcel.to == tuple(sorted(move.dst for move in part.moves))
            for move in part.moves:
                assert seen[move.what] == part.start
                seen[move.what] = part.stop
            key = (part.moves[0].dedup_key, part.start)
            assert key[0] is None or key not in written  # the same content leaves once
            written.add(key)
            assert len(parcel.parts) == 1 or part.moves[0].piece.nbytes < alone
        assert end == parcel.nbytes
    assert seen == {move.what: move.piece.numel for move in moves}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_spans_are_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    wide = torch.arange(torch.Size(shape).numel() * 2 ** len(shape)).view([2 * n for n in shape])
    cuts = [data.draw(st.integers(0, n)) for n in shape]
    box = wide[tuple(slice(cut, cut + n) for cut, n in zip(cuts, shape, strict=True))]
    start = data.draw(st.integers(0, box.numel() - 1))
    stop = data.draw(st.integers(start + 1, box.numel()))
    views = strided_views(box, start, stop)
    assert torch.equal(torch.cat([view.reshape(-1) for view in views]), box.reshape(-1)[start:stop])
    storage = wide.untyped_storage().data_ptr()
    assert all(view.untyped_storage().data_ptr() == storage for view in views)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 100), st.integers(0, 7), st.data())
def test_any_changed_element_is_noticed(dtype: torch.dtype, numel: int, offset: int, data: st.DataObject) -> None:
    weights = ends(torch.zeros(1)).weights[:16]
    values = torch.arange(numel + offset).to(dtype)[offset:]
    before = checksum([values], dtype, weights)
    cut = data.draw(st.integers(0, numel))
    assert torch.equal(checksum([values[:cut], values[cut:]], dtype, weights), before)
    values[data.draw(st.integers(0, numel - 1))] += 1 if dtype != torch.bfloat16 else 64
    assert not torch.equal(checksum([values], dtype, weights), before)


def ends(place: Tensor, rank: int = 1) -> ExchangeBuffers:
    return ExchangeBuffers(
        rank, lambda what: torch.arange(8.0), lambda what, flat: None, lambda what: place, CPU, verify=True
    )


@pytest.mark.parametrize("at", (0, 17, 31, 32))  # in the elements, and in the checksum itself
def test_a_damaged_parcel_is_refused_by_name(at: int) -> None:
    moves = [P2PCopy("layers.3.wq", 0, 1, TensorSlice(torch.float32, 8))]
    (parcel,) = packets_of(moves, 1024, ALIGN)
    buffer, place = torch.zeros(parcel.nbytes, dtype=torch.uint8), torch.zeros(8)
    ends(place, 0).pack(parcel, buffer)
    ends(place).unpack(parcel, buffer)
    assert torch.equal(place, torch.arange(8.0))
    buffer[at] ^= 4
    with pytest.raises(RuntimeError, match="layers.3.wq was damaged on its way from rank 0 to rank 1"):
        ends(place).unpack(parcel, buffer)


def test_a_place_that_cannot_hold_the_values_is_noticed() -> None:
    moves = [P2PCopy("norm", 0, 1, TensorSlice(torch.float32, 8))]
    (parcel,) = packets_of(moves, 1024, ALIGN)
    buffer = torch.zeros(parcel.nbytes, dtype=torch.uint8)
    ExchangeBuffers(0, lambda what: torch.rand(8), lambda what, flat: None, None, CPU, verify=True).pack(parcel, buffer)
    with pytest.raises(RuntimeError, match="norm was damaged"):
        ends(torch.zeros(8, dtype=torch.bfloat16)).unpack(parcel, buffer)
