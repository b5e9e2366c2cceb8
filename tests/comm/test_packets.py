"""Packets contain every element once, in order and within bounds; corruption is detected."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from realhf.comm.packets import ALIGN, ExchangeBuffers, P2PCopy, TensorSlice, checksum, packets_of, strided_views
from tests.scaling import examples

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@st.composite
def copies_of_rank_0(draw: st.DrawFn) -> list[P2PCopy]:
    copies = []
    for number in range(draw(st.integers(0, 12))):
        tensor_slice = TensorSlice(draw(st.sampled_from(DTYPES)), draw(st.integers(1, 300)))
        receivers = draw(st.sets(st.integers(1, 3), min_size=1))
        content = number if draw(st.booleans()) else None
        copies += [P2PCopy((number, dst), 0, dst, tensor_slice, content) for dst in sorted(receivers)]
    return draw(st.permutations(copies))


@settings(max_examples=examples(50))
@given(copies_of_rank_0(), st.integers(2, 40), st.sampled_from((0, ALIGN)), st.sampled_from((1, 500, 1 << 40)))
def test_every_element_is_sent_once(copies: list[P2PCopy], limit: int, trailer: int, alone: int) -> None:
    limit = limit * ALIGN
    seen = {copy.what: 0 for copy in copies}
    written = set()
    for packet in packets_of(copies, limit, trailer, alone):
        assert 0 < packet.nbytes <= limit
        end = 0
        for chunk in packet.chunks:
            assert chunk.offset == end and chunk.offset % ALIGN == 0 and chunk.start < chunk.stop
            assert chunk.nbytes == (chunk.stop - chunk.start) * chunk.dtype.itemsize
            end += -(-chunk.nbytes // ALIGN) * ALIGN + trailer
            assert packet.dsts == tuple(sorted(copy.dst for copy in chunk.copies))
            for copy in chunk.copies:
                assert seen[copy.what] == chunk.start
                seen[copy.what] = chunk.stop
            key = (chunk.copies[0].dedup_key, chunk.start)
            assert key[0] is None or key not in written  # equal content is sent once
            written.add(key)
            assert len(packet.chunks) == 1 or chunk.copies[0].tensor_slice.nbytes < alone
        assert end == packet.nbytes
    assert seen == {copy.what: copy.tensor_slice.numel for copy in copies}


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_strided_views_are_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    wide = torch.arange(torch.Size(shape).numel() * 2 ** len(shape)).view([2 * n for n in shape])
    cuts = [data.draw(st.integers(0, n)) for n in shape]
    box = wide[tuple(slice(cut, cut + n) for cut, n in zip(cuts, shape, strict=True))]
    start = data.draw(st.integers(0, box.numel() - 1))
    stop = data.draw(st.integers(start + 1, box.numel()))
    views = strided_views(box, start, stop)
    assert torch.equal(torch.cat([view.reshape(-1) for view in views]), box.reshape(-1)[start:stop])
    storage = wide.untyped_storage().data_ptr()
    assert all(view.untyped_storage().data_ptr() == storage for view in views)


@settings(max_examples=examples(50))
@given(st.sampled_from(DTYPES), st.integers(1, 100), st.integers(0, 7), st.data())
def test_checksum_detects_any_changed_element(dtype: torch.dtype, numel: int, offset: int, data: st.DataObject) -> None:
    weights = buffers(torch.zeros(1)).weights[:16]
    values = torch.arange(numel + offset).to(dtype)[offset:]
    before = checksum([values], dtype, weights)
    cut = data.draw(st.integers(0, numel))
    assert torch.equal(checksum([values[:cut], values[cut:]], dtype, weights), before)
    values[data.draw(st.integers(0, numel - 1))] += 1 if dtype != torch.bfloat16 else 64
    assert not torch.equal(checksum([values], dtype, weights), before)


def buffers(target: Tensor, rank: int = 1) -> ExchangeBuffers:
    return ExchangeBuffers(
        rank, lambda what: torch.arange(8.0), lambda what, flat: None, lambda what: target, CPU, verify=True
    )


@pytest.mark.parametrize("at", (0, 17, 31, 32))  # in the elements and in the checksum
def test_a_corrupted_packet_is_an_error_that_names_it(at: int) -> None:
    copies = [P2PCopy("layers.3.wq", 0, 1, TensorSlice(torch.float32, 8))]
    (packet,) = packets_of(copies, 1024, ALIGN)
    buffer, target = torch.zeros(packet.nbytes, dtype=torch.uint8), torch.zeros(8)
    buffers(target, 0).pack(packet, buffer)
    buffers(target).unpack(packet, buffer)
    assert torch.equal(target, torch.arange(8.0))
    buffer[at] ^= 4
    with pytest.raises(RuntimeError, match="layers.3.wq was corrupted between rank 0 and rank 1"):
        buffers(target).unpack(packet, buffer)


def test_a_target_of_lower_precision_is_detected() -> None:
    copies = [P2PCopy("norm", 0, 1, TensorSlice(torch.float32, 8))]
    (packet,) = packets_of(copies, 1024, ALIGN)
    buffer = torch.zeros(packet.nbytes, dtype=torch.uint8)
    ExchangeBuffers(0, lambda what: torch.rand(8), lambda what, flat: None, None, CPU, verify=True).pack(packet, buffer)
    with pytest.raises(RuntimeError, match="norm was corrupted"):
        buffers(torch.zeros(8, dtype=torch.bfloat16)).unpack(packet, buffer)
