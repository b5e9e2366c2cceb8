"""Key/value caches on huge pages."""

import gc
import resource

import pytest
import torch

from realhf.models.kv_cache import HUGE_PAGE, zeros_on_huge_pages


@pytest.mark.parametrize("shape", [(3,), (2, 3, 5), (1, HUGE_PAGE // 4 + 1), (4, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_is_zero_and_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = zeros_on_huge_pages(shape, dtype)
    assert (x.shape, x.dtype) == (shape, dtype) and x.is_contiguous() and not x.any()
    x.fill_(2)
    assert (x == 2).all()


def test_memory_is_freed_with_the_last_view() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        view = zeros_on_huge_pages((4 * HUGE_PAGE,), torch.float32)[1:].fill_(1)
        assert view[-1] == 1
        del view
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB; all together take 6.7 GB
