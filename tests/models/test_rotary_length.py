"""LongRoPE and dynamic scaling beyond the positions up to which they are constant, against transformers."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from realhf.api.config import ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.models.transformer import Transformer
from realhf.plan.run_spec import model_config
from tests.models.config_edits import base_config
from tests.models.test_config_oracle import saved_model
from tests.models.tiny_models import load_model

ORIGINAL, LENGTH = 16, 40
FACTORS = {"short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 5.0, 8.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **FACTORS}
MODELS: dict[str, dict[str, Any]] = {
    "llama dynamic": {"max_position_embeddings": ORIGINAL, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "glm4 dynamic": {"max_position_embeddings": ORIGINAL, "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
    "llama longrope": {"max_position_embeddings": 64, "head_dim": 8, "rope_scaling": LONGROPE},
    "gemma3_text longrope": {"max_position_embeddings": 64, "head_dim": 8, "rope_parameters": {
        "full_attention": {"rope_theta": 1e4, **LONGROPE}, "sliding_attention": {"rope_theta": 100.0},
    }},
    "phi3 longrope": {"max_position_embeddings": 64, "hidden_size": 64, "original_max_position_embeddings": ORIGINAL,
                      "rope_scaling": {"type": "longrope", **FACTORS}},
}  # fmt: skip


def models_of(name: str, folder: Path, length: int = LENGTH) -> tuple[PreTrainedModel, Transformer]:
    """Return a model of transformers that has seen no row, and ours with this ``rotary_length``."""
    theirs = saved_model(name.split()[0], MODELS[name], folder, random.Random(0))
    ours = load_model(folder)
    return theirs, Transformer(replace(ours.config, rotary_length=length), ours.params)


def tokens_of(length: int) -> torch.Tensor:
    return torch.randint(3, 67, (length,), generator=torch.Generator().manual_seed(length))


def log_probs(model: Transformer, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the log-probabilities of packed rows, ``[length, V]`` of each."""
    lengths = [len(row) for row in rows]
    return list(model.logits(model.hidden(torch.cat(rows), lengths)).log_softmax(-1).split(lengths))


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_rows_equal_those_of_a_batch_with_a_row_of_this_length(name: str, tmp_path: Path) -> None:
    theirs, ours = models_of(name, tmp_path)
    rows = [tokens_of(LENGTH), tokens_of(9), tokens_of(25)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    expected = theirs(padded, attention_mask=mask).logits.log_softmax(-1)
    for row, found, reference in zip(rows, log_probs(ours, rows), expected, strict=True):
        assert equal(found, reference[: len(row)])
    assert equal(log_probs(ours, rows[:1])[0], theirs(rows[0][None]).logits[0].log_softmax(-1))
    _, constant = models_of(name, tmp_path, ORIGINAL)
    assert not equal(log_probs(constant, rows[1:2])[0], expected[1, : len(rows[1])])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_decoding_over_the_original_positions_equals_one_pass(name: str, tmp_path: Path) -> None:
    theirs, ours = models_of(name, tmp_path)
    row, at = tokens_of(LENGTH), ORIGINAL - 3
    cache = ours.new_cache(1, LENGTH)
    logits = [ours.logits(ours.hidden(row[:at], [at], cache, [0]))]
    with ours.decoding():
        for position in range(at, LENGTH):
            logits.append(ours.logits(ours.decode(row[position, None], torch.tensor([position]), cache)))
    found = torch.cat(logits).log_softmax(-1)
    assert equal(found, log_probs(ours, [row])[0])
    assert equal(found, theirs(row[None]).logits[0].log_softmax(-1))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_without_a_length_rows_end_where_embeddings_would_change(name: str, tmp_path: Path) -> None:
    theirs, ours = models_of(name, tmp_path, 0)
    row = tokens_of(ORIGINAL)
    assert ours.config.max_row_len == ORIGINAL
    assert equal(log_probs(ours, [row])[0], theirs(row[None]).logits[0].log_softmax(-1))
    with pytest.raises(ValueError, match="a row has 17 tokens; the rotary scaling of this model has 16 positions"):
        log_probs(ours, [tokens_of(ORIGINAL + 1)])


def configured(folder: Path, length: int, **fields: Any) -> int:
    """Return the longest row of a Llama with these fields and ``rotary_length``."""
    (folder / "config.json").write_text(json.dumps({**base_config("llama", random.Random(0)), **fields}))
    spec = ModelSpec(config=str(folder), init_from_scratch=True, rotary_length=length)
    return model_config(RoleSpec(spec)).max_row_len


def test_lengths_without_effect_are_refused(tmp_path: Path) -> None:
    dynamic, long = (MODELS[f"llama {kind}"] for kind in ("dynamic", "longrope"))
    assert configured(tmp_path, 0, **dynamic) == configured(tmp_path, 0, **long) == ORIGINAL
    assert configured(tmp_path, 500, **dynamic) == 500
    assert configured(tmp_path, 64, **long) == 64
    with pytest.raises(ValueError, match="rotary_length=65 exceeds the 64 positions of the model"):
        configured(tmp_path, 65, **long)
    with pytest.raises(ValueError, match="rotary_length is for LongRoPE and dynamic rotary scaling, which this model"):
        configured(tmp_path, 64)
    with pytest.raises(ValueError, match="field 'rope_type' is 'dynamic', which needs more than 2 rotary dimensions"):
        configured(tmp_path, 64, **dynamic, head_dim=2)
