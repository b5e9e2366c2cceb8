"""Intervals against slices, kernels against reference implementations, and invalid arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops import extension
from realhf.ops.intervals import (
    set_intervals,
    set_intervals_reference,
    slice_intervals,
    slice_intervals_reference,
)
from tests.scaling import examples

slicing = pytest.mark.parametrize("cut_out", [slice_intervals, slice_intervals_reference])
setting = pytest.mark.parametrize("put_back", [set_intervals, set_intervals_reference])
DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def listed(*bounds):
    return torch.tensor(bounds, dtype=torch.int64).reshape(-1, 2)


def content(count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).to(dtype)


@st.composite
def disjoint(draw):
    """Draw disjoint intervals in any order, some of them empty, and the size of the tensor."""
    bounds = sorted(draw(st.lists(st.integers(0, 400), max_size=12)))
    pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
    return draw(st.permutations(pairs)), max([*bounds, 1]) + draw(st.integers(0, 20))


@slicing
@settings(max_examples=examples(40))
@given(disjoint(), st.sampled_from(DTYPES))
def test_slices_come_one_after_the_other(cut_out, drawn, dtype):
    pairs, size = drawn
    src = content(size, dtype)
    result = cut_out(src, listed(*pairs))
    assert result.dtype == dtype
    assert result.tolist() == [x for begin, end in pairs for x in src.tolist()[begin:end]]


@setting
@settings(max_examples=examples(40))
@given(disjoint(), st.sampled_from(DTYPES))
def test_what_is_put_back_is_there_and_nothing_else_changes(put_back, drawn, dtype):
    pairs, size = drawn
    dst, src = content(size, dtype), content(sum(end - begin for begin, end in pairs), dtype, seed=1)
    expected, at = dst.tolist(), 0
    for begin, end in pairs:
        expected[begin:end] = src.tolist()[at : at + end - begin]
        at += end - begin
    put_back(src, dst, listed(*pairs))
    assert dst.tolist() == expected
    assert torch.equal(slice_intervals(dst, listed(*pairs)), src)


@slicing
def test_slices_may_overlap_and_the_source_may_be_strided(cut_out):
    wide = content(40, torch.int64)
    result = cut_out(wide[::2], listed((3, 9), (0, 5), (4, 4)))
    assert torch.equal(result, torch.cat([wide[6:18:2], wide[0:10:2]]))


@setting
def test_the_destination_may_be_strided(put_back):
    wide = torch.zeros(12)
    put_back(torch.ones(2), wide[::3], listed((1, 3)))
    assert wide.nonzero().flatten().tolist() == [3, 6]


def test_large_copies_take_any_number_of_threads():
    size = 1 << 23  # beyond the size at which caches are passed by, in pieces that start nowhere in particular
    src = torch.arange(1, size + 1, dtype=torch.int32)
    begin = torch.arange(1, size - 2003, 2003)
    large = torch.cat(
        [torch.stack([begin, begin + 1000 + torch.arange(len(begin)) % 1001], 1), listed((size - 3, size))]
    )
    threads, dst = torch.get_num_threads(), torch.zeros_like(src)
    expected = slice_intervals_reference(src, large)
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            assert torch.equal(slice_intervals(src, large), expected)
            set_intervals(expected, dst, large)
            assert torch.equal(slice_intervals_reference(dst, large), expected)
    finally:
        torch.set_num_threads(threads)
    assert int((dst != 0).sum()) == expected.numel()


def test_gradients_flow_through_slices():
    src = torch.arange(6.0, requires_grad=True)
    slice_intervals(src, listed((4, 6), (5, 6))).sum().backward()
    assert src.grad.tolist() == [0, 0, 0, 0, 1, 2]


def test_autograd_knows_that_the_destination_changed():
    weight = torch.ones(4, requires_grad=True)
    kept = weight.clone()
    squared = (kept * kept).sum()
    with torch.no_grad():
        set_intervals(torch.zeros(1), kept, listed((0, 1)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@slicing
@pytest.mark.parametrize(
    ("src", "intervals", "message"),
    [
        (torch.zeros(5), listed((0, 2), (3, 6)), "interval 1 runs from 3 to 6 in a tensor of 5"),
        (torch.zeros(5), listed((-1, 2)), "interval 0 runs from -1 to 2"),
        (torch.zeros(5), listed((3, 2)), "interval 0 runs from 3 to 2"),
        (torch.zeros(5, 1), listed((0, 2)), "intervals need a 1-D tensor"),
        (torch.zeros(5), torch.zeros(2, 2), "int64 on the CPU"),
        (torch.zeros(5), torch.zeros(2, 3, dtype=torch.int64), r"must be \[N, 2\]"),
    ],
)
def test_intervals_that_are_none_are_refused(cut_out, src, intervals, message):
    with pytest.raises(ValueError, match=message):
        cut_out(src, intervals)


@setting
@pytest.mark.parametrize(
    ("src", "intervals", "message"),
    [
        (torch.ones(4), listed((3, 5), (2, 4)), r"overlap: \[2, 4\] and \[3, 5\]"),
        (torch.ones(3), listed((0, 2)), "intervals have 2 elements, src has 3"),
        (torch.ones(2), listed((4, 6)), "interval 0 runs from 4 to 6"),
        (torch.ones(2).double(), listed((0, 2)), "src must be 1-D like dst"),
        (torch.ones(2, 1), listed((0, 2)), "src must be 1-D like dst"),
    ],
)
def test_writes_that_cannot_be_meant_are_refused_and_write_nothing(put_back, src, intervals, message):
    dst = torch.zeros(5)
    with pytest.raises(ValueError, match=message):
        put_back(src, dst, intervals)
    assert not dst.any()


def test_the_schemas_hold():
    write, read = extension.kernel("set_intervals", "cpu"), extension.kernel("slice_intervals", "cpu")
    if write is None or read is None:
        pytest.skip("NATIVE KERNELS NOT BUILT")
    torch.library.opcheck(write, (torch.ones(2), torch.zeros(5), listed((1, 3))))
    torch.library.opcheck(read, (torch.zeros(5), listed((1, 3))))
    compiled = torch.compile(lambda x, i: 2 * read(x, i), backend="aot_eager", fullgraph=True)
    assert compiled(torch.arange(5), listed((1, 3), (0, 1))).tolist() == [2, 4, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_matches_the_cpu_reference(dtype):
    src = content(200_000, dtype)
    intervals = listed((7, 7), (3, 70_000), (100_000, 100_001), (150_001, 199_999), (70_002, 70_019))
    expected = slice_intervals_reference(src, intervals)
    assert torch.equal(slice_intervals(src.cuda(), intervals).cpu(), expected)
    dst, on_device = torch.zeros_like(src), torch.zeros_like(src).cuda()
    set_intervals_reference(expected, dst, intervals)
    set_intervals(expected.cuda(), on_device, intervals)
    assert torch.equal(on_device.cpu(), dst)
