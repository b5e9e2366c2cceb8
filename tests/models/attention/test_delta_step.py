"""The kernel of a decoding step with the gated delta rule against torch's operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.model_config import GatedDelta, ModelConfig
from realhf.comm.tensor_parallel import TensorParallelRegion
from realhf.models.attention.delta_mixer import DeltaMixer
from realhf.models.transformer import SINGLE_RANK_GROUP
from realhf.ops import extension
from tests.scaling import examples

pytestmark = pytest.mark.skipif(
    extension.kernel("delta_step", "cpu") is None, reason="the compiled kernels are not built"
)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
REGION = TensorParallelRegion(SINGLE_RANK_GROUP, 1, False, False)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3), st.sampled_from((8, 24, 64)),
       st.sampled_from((8, 40, 64)), st.integers(2, 5), st.sampled_from((torch.float32, torch.bfloat16)),
       st.integers(0, 99))  # fmt: skip
def test_steps_equal_those_of_operations(
    rows: int, keys: int, ratio: int, key_dim: int, value_dim: int, kernel: int, dtype: torch.dtype, seed: int
) -> None:
    delta = GatedDelta(keys, keys * ratio, key_dim, value_dim, kernel)
    config = ModelConfig("qwen3_next", 1, 16, 1, 1, 16, 16, 16, 16, delta=delta, delta_layers=(0,))
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    channels, heads = 2 * delta.keys + delta.values, delta.value_heads
    mixer = DeltaMixer(make(1, 1), make(channels, 1, kernel), make(heads), make(heads), make(value_dim))
    precise = DeltaMixer(*(getattr(mixer, field).float() for field in ("w_in", "conv", "a_log", "dt_bias", "norm")))
    tails, states = make(rows, kernel - 1, channels), torch.randn(rows, heads, key_dim, value_dim, generator=generator)
    expected_tails, expected_states = tails.float().clone(), states.clone()
    for _ in range(3):
        projected = make(rows, channels + delta.values + 2 * heads)
        found = mixer.step(projected, config, REGION, tails, states)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeltaMixer, "_step_kernel", lambda *_: None)
            expected = precise.step(projected.float(), config, REGION, expected_tails, expected_states)
        assert found.dtype == dtype and torch.equal(tails.float(), expected_tails)
        torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, expected.to(dtype), **({} if dtype == torch.bfloat16 else TOLERANCE))


def test_the_kernel_passes_opcheck_and_refuses_wrong_sizes() -> None:
    make = torch.randn
    given_ = [make(2, 86), make(56, 1, 4), make(3), make(3), make(8), make(2, 3, 56), make(2, 3, 16, 8)]
    found = torch.library.opcheck(torch.ops.realhf.delta_step.default, (*given_, 1e-6))
    assert set(found.values()) == {"SUCCESS"}, found
    with pytest.raises(RuntimeError, match="dk and dv must be multiples of 8"):
        torch.ops.realhf.delta_step(*given_[:6], make(2, 3, 16, 9), 1e-6)
    with pytest.raises(RuntimeError, match=r"tails must be \[2, 3, 56\]"):
        torch.ops.realhf.delta_step(*given_[:5], make(2, 2, 56), given_[6], 1e-6)
