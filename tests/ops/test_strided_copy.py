"""Boxes of any strides are copied exactly, and memory around them is unchanged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.ops import extension
from realhf.ops.strided_copy import copy_box
from tests.scaling import examples

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from(DTYPES), st.booleans(), st.integers(1, 3), st.data())
def test_kernel_matches_the_reference(
    shape: list[int], dtype: torch.dtype, streaming: bool, wider: int, data: st.DataObject
) -> None:
    def box(fill: int) -> tuple[torch.Tensor, torch.Tensor]:
        around = torch.arange(torch.Size(shape).numel() * wider ** len(shape)).remainder(97).add(fill).to(dtype)
        around = around.view([wider * n for n in shape]).clone()
        order = data.draw(st.permutations(range(len(shape))))
        cuts = [data.draw(st.integers(0, (wider - 1) * n)) for n in shape]
        inside = around.permute(order)[tuple(slice(cuts[d], cuts[d] + shape[d]) for d in order)]
        return around, inside.permute([order.index(d) for d in range(len(shape))])

    around, target = box(1)
    _, source = box(100)
    mark = torch.ones_like(around).as_strided(target.shape, target.stride(), target.storage_offset()).zero_()
    untouched = mark.as_strided(around.shape, around.stride(), 0).bool()
    before = around.clone()
    copy_box(target, source, streaming)
    assert torch.equal(target, source)
    assert torch.equal(around[untouched], before[untouched])


@pytest.mark.parametrize("streaming", [False, True])
def test_large_boxes_are_cut_among_threads(streaming: bool) -> None:
    source, target = torch.arange(3 * 1000 * 2000).view(3, 1000, 2000), torch.zeros(3, 1000, 900, dtype=torch.int64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        copy_box(target, source[:, :, 7:907], streaming)
        whole = torch.empty_like(source)
        copy_box(whole, source, streaming)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(target, source[:, :, 7:907]) and torch.equal(whole, source)


def test_other_types_and_gradients_go_through_torch() -> None:
    target = torch.zeros(2, 3, dtype=torch.bfloat16)
    copy_box(target, torch.full((2, 3), 1.5))
    assert target.eq(1.5).all()
    leaf = torch.ones(3, requires_grad=True)
    into = torch.zeros(3)
    copy_box(into, leaf * 2)
    into.sum().backward()
    assert leaf.grad is not None and leaf.grad.eq(2).all()


def test_autograd_hears_of_a_write() -> None:
    kept = torch.ones(3)
    product = torch.ones(3, requires_grad=True) * kept
    copy_box(kept, torch.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_the_schema_holds_and_refuses_what_does_not_fit() -> None:
    kernel = extension.kernel("copy_box_", "cpu")
    if kernel is None:
        pytest.skip("NATIVE KERNELS NOT BUILT")
    torch.library.opcheck(kernel, (torch.zeros(4, 3), torch.ones(4, 6)[:, ::2], True))
    with pytest.raises(RuntimeError, match="dimension 1 has 3 and 2 elements"):
        kernel(torch.zeros(4, 3), torch.zeros(4, 2), False)
    with pytest.raises(RuntimeError, match="one tensor has 2 dimensions, the other 1"):
        kernel(torch.zeros(4, 3), torch.zeros(12), False)
    with pytest.raises(RuntimeError, match="one dtype"):
        kernel(torch.zeros(3), torch.zeros(3).double(), False)
