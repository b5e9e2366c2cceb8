"""The row of ``pad_token_id`` in the embedding gets no gradient from inputs, as in transformers."""

import random
from pathlib import Path

import pytest
import torch

from tests.models.config_edits import OWN
from tests.models.test_config_oracle import saved_model
from tests.models.tiny_models import load_model

TOKENS = torch.tensor([5, 3, 0, 66, 3, 9, 3, 0, 66, 4])


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("pad", [3, -1, None])
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_embedding_equals_transformers(
    family: str, pad: int | None, tied: bool, tmp_path: Path
) -> None:
    theirs = saved_model(family, {"pad_token_id": pad, "tie_word_embeddings": tied}, tmp_path, random.Random(0))
    ours = load_model(tmp_path)
    ours.params.enable_grad()
    ours.params.zero_grad()
    ours.logprobs(ours.hidden(TOKENS, [len(TOKENS)]), TOKENS, [len(TOKENS)]).sum().backward()
    theirs.double().set_experts_implementation("eager")  # in float32 its gradients of delta rules have errors of 1e-3
    logits = theirs(TOKENS[None]).logits[0, :-1]
    torch.log_softmax(logits, -1).gather(1, TOKENS[1:, None]).sum().backward()
    expected = theirs.get_input_embeddings().weight.grad.float()
    assert torch.allclose(ours.params.grad_view("embed.weight"), expected, atol=1e-4)
