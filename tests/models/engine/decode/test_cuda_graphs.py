"""Padded decoding steps sample the same tokens. CUDA graphs themselves are tested in tests/gpu."""

from typing import Any

import numpy as np
import pytest
import torch

from realhf.api.config import GenerationConfig
from realhf.models.engine.decode import cuda_graphs, group
from realhf.models.engine.decode.cuda_graphs import DeviceDecoder, Step, round_batch, round_context
from realhf.models.transformer import Transformer
from tests.models.engine.tiny_engine import engine_on, prompts_of

LENGTHS = (3, 1, 7, 7, 12, 2, 5)


@pytest.mark.parametrize("limit", [1, 5, 64])
def test_batch_sizes_are_rounded_to_few_values(limit: int) -> None:
    sizes = [round_batch(n, limit) for n in range(1, limit + 1)]
    assert sizes == sorted(sizes) and all(n <= size <= limit for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 2 * limit.bit_length()
    if limit == 64:
        assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def test_context_lengths_are_rounded_up_to_the_limit() -> None:
    assert [round_context(n, 600) for n in (1, 256, 257, 512, 513, 600)] == [256, 256, 512, 512, 600, 600]


@pytest.fixture
def padded_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pad all decoding steps as for CUDA graphs; records the sizes of steps before and after padding."""
    seen = []

    class RecordingDecoder(DeviceDecoder):
        def run(self, step: Step, table: np.ndarray, *arguments: Any) -> torch.Tensor:
            seen.append((table.shape[1], round_batch(table.shape[1], self.cache.n_slots)))
            return super().run(step, table, *arguments)

    monkeypatch.setattr(cuda_graphs, "DeviceDecoder", RecordingDecoder)
    monkeypatch.setattr(group, "decodes_on_device", lambda model: True)
    return seen


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.8, "min_new_tokens": 3}, {"greedy": True}])
def test_padded_steps_sample_the_same_tokens(
    family: str, options: dict, hf_models: dict, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transformer, "supports_shared_prefixes", False)  # as on a GPU
    engine = engine_on(hf_models[family][0], trained=False)
    config = GenerationConfig(max_new_tokens=40, max_num_seqs=19, **options)
    plain = engine.generate(prompts_of(LENGTHS), config, 3, 11)
    seen = request.getfixturevalue("padded_steps")
    made = engine.generate(prompts_of(LENGTHS), config, 3, 11)
    assert any(size > n for n, size in seen)
    assert torch.equal(made["tokens"], plain["tokens"]) and torch.equal(made["truncated"], plain["truncated"])
    for key in ("logprobs", "sampling_logprobs"):
        assert made.columns[key].data.dtype == torch.float32
        torch.testing.assert_close(made[key], plain[key], atol=1e-5, rtol=0)
