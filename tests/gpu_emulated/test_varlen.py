"""When torch's variable-length attention is used on a device, and when not."""

import pytest
import torch

from realhf.ops import varlen
from realhf.ops.attention import rotary_attention, rotary_attention_reference
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.fake_runtime import fake_cuda


def n_kernels(cuda: FakeCuda) -> int:
    return sum(n for event, n in cuda.events.items() if "_varlen_attn" in event.what)


@pytest.mark.parametrize(
    "dtype, head_dim, capability, expected",
    [
        (torch.bfloat16, 16, (8, 0), 1),
        (torch.float16, 16, (9, 0), 1),
        (torch.bfloat16, 12, (9, 0), 0),
        (torch.float32, 16, (9, 0), 0),
        (torch.bfloat16, 16, (7, 5), 0),
    ],
)
def test_the_kernel_is_used_where_it_runs(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], expected: int
) -> None:
    torch.manual_seed(0)
    lengths, prefixes = (5, 3, 4), (-1, 0, 0)
    qkv = torch.randn(sum(lengths), 8, head_dim).to(dtype)
    reference = rotary_attention_reference(qkv.float(), 4, 2, lengths, prefixes=prefixes)
    with fake_cuda(capability=capability) as cuda:
        out = rotary_attention(qkv.to("cuda:0"), 4, 2, lengths, prefixes=prefixes)
        assert n_kernels(cuda) == expected
        torch.testing.assert_close(out.cpu().float(), reference, atol=0.03, rtol=0.02)


def test_the_host_has_no_kernel() -> None:
    assert varlen.kernel_for(torch.device("cpu"), torch.bfloat16, 64, [(0.0, 0)]) is None
