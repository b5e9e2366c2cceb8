"""Steps that are rounded up for CUDA graphs draw what other steps draw. Graphs themselves: tests/gpu."""

import pytest
import torch

from realhf.api.config import GenerationConfig
from realhf.models.engine.decode import group
from realhf.models.engine.decode.cuda_graphs import GraphedSteps, bucket, round_context
from realhf.models.transformer import Transformer
from tests.models.engine.tiny_engine import engine_on, prompts_of

LENGTHS = (3, 1, 7, 7, 12, 2, 5)


@pytest.mark.parametrize("most", [1, 5, 64])
def test_few_sizes_hold_every_number(most: int) -> None:
    sizes = [bucket(n, most) for n in range(1, most + 1)]
    assert sizes == sorted(sizes) and all(n <= size <= most for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 2 * most.bit_length()
    if most == 64:
        assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def test_a_reach_is_rounded_up_to_what_there_is() -> None:
    assert [round_context(n, 600) for n in (1, 256, 257, 512, 513, 600)] == [256, 256, 512, 512, 600, 600]


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Send all decoding steps through the places of graphs; sizes of steps and of what was computed."""
    seen = []

    class Seen(GraphedSteps):
        def __call__(self, inputs: torch.Tensor, longest: int) -> torch.Tensor:
            seen.append((inputs.shape[1], bucket(inputs.shape[1], self.n_slots)))
            return super().__call__(inputs, longest)

    monkeypatch.setattr(group, "GraphedSteps", Seen)
    monkeypatch.setattr(group, "has_graphs", lambda model: True)
    return seen


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "top_p": 0.8, "min_new_tokens": 3}, {"greedy": True}])
def test_rounded_steps_draw_the_same(
    family: str, options: dict, twins: dict, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transformer, "reads_prefixes", False)  # as on a GPU, where every slot has its own prompt
    engine = engine_on(twins[family][0], trained=False)
    config = GenerationConfig(max_new_tokens=14, max_num_seqs=19, **options)
    plain = engine.generate(prompts_of(LENGTHS), config, 3, 11)
    seen = request.getfixturevalue("rounded")
    made = engine.generate(prompts_of(LENGTHS), config, 3, 11)
    assert any(size > n for n, size in seen)
    assert torch.equal(made["tokens"], plain["tokens"]) and torch.equal(made["truncated"], plain["truncated"])
    for key in ("logprobs", "sampling_logprobs"):
        assert made.columns[key].data.dtype == torch.float32
        torch.testing.assert_close(made[key], plain[key], atol=1e-5, rtol=0)
