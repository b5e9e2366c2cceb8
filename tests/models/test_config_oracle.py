"""Random configurations and edits: the model equals that of transformers, or is refused in one line."""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from realhf.models.transformer import Transformer
from tests.models.config_edits import OWN, base_config, edited_config
from tests.models.tiny_models import load_model
from tests.scaling import examples

LENGTHS = (3, 12, 20, 30, 41)  # below and above positions, original positions, and windows
N_NEW, VOCAB = 4, 67
TOLERANCE = 1e-4  # of the largest logit


def transformers_model(folder: Path, seed: int) -> PreTrainedModel | None:
    """Return a random model for the folder's configuration, with its weights saved; None if transformers refuses."""
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim == 1:
                    param.add_(0.1 * torch.randn_like(param))
            model(torch.zeros(1, 3, dtype=torch.int64))
        text = (folder / "config.json").read_text()
        model.save_pretrained(folder)
        (folder / "config.json").write_text(text)
    except Exception:
        return None
    return model


def saved_model(family: str, fields: dict[str, Any], folder: Path, rng: random.Random) -> PreTrainedModel:
    """Return a random model of a family with these fields, saved to a folder."""
    (folder / "config.json").write_text(json.dumps({**base_config(family, rng), **fields}))
    model = transformers_model(folder, 0)
    assert model is not None
    return model


def fresh(folder: Path) -> PreTrainedModel:
    """Return the model again: dynamic rotary scaling keeps state between calls."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    finite = theirs[theirs.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if len(finite) else 1.0
    return torch.allclose(ours, theirs, atol=TOLERANCE * scale, rtol=0, equal_nan=True)


def compare(
    folder: Path,
    ours: Transformer,
    theirs: PreTrainedModel,
    row_lengths: Sequence[int] = LENGTHS,
    same: Callable[[torch.Tensor, torch.Tensor], bool] = close,
) -> None:
    """Compare the logits of packed rows of several lengths, and of a continuation with a KV cache."""
    limit = ours.config.max_row_len
    lengths = [n for n in row_lengths if n <= limit or not is_limited(ours)]
    tokens = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in row_lengths]
    rows = [row for row in tokens if len(row) in lengths]
    hidden = ours.hidden(torch.cat(rows), lengths)
    for row, logits in zip(rows, ours.logits(hidden).split(lengths), strict=True):
        expected = fresh(folder)(row[None]).logits[0]
        assert same(logits, expected) or is_rounding(folder, row, logits, expected), f"row of {len(row)} tokens"
    if len(rows) < len(tokens):
        with pytest.raises(ValueError, match=f"a row has {len(tokens[-1])} tokens"):
            ours.hidden(tokens[-1], [len(tokens[-1])])
    prompt = max((row for row in rows if len(row) + N_NEW <= limit), key=len)
    everything = torch.ones(1, len(prompt), dtype=torch.int64)  # by default without the pad tokens of the prompt
    found = theirs.generate(prompt[None], attention_mask=everything, generation_config=GenerationConfig(
        max_new_tokens=N_NEW, do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=1,
        use_cache=False,  # with its cache, a window of one token sees all
        output_logits=True, return_dict_in_generate=True))  # fmt: skip
    cache, at = ours.new_cache(2, max(row_lengths) + N_NEW), len(prompt)
    logits = [ours.logits(ours.hidden(prompt, [at], cache, [0])[-1:])]
    with ours.decoding():
        for token in found.sequences[0, at:-1]:
            logits.append(ours.logits(ours.decode(token[None], torch.tensor([at]), cache)))
            at += 1
    for mine, expected in zip(logits, found.logits, strict=True):
        assert same(mine, expected), f"continuation of {len(prompt)} tokens"


def is_rounding(folder: Path, row: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether our log-probabilities are at most twice as far as theirs from those in float64.

    The norm of a state that is almost zero makes some tokens of hybrid models that inexact.
    """
    model = fresh(folder).double()
    model.set_experts_implementation("eager")  # grouped products have no float64
    exact = model(row[None]).logits[0].log_softmax(-1)
    errors = [(logits.log_softmax(-1) - exact).abs().max() for logits in (ours, theirs)]
    return bool(errors[0] <= 2 * errors[1])


def is_limited(model: Transformer) -> bool:
    kind = dict(model.config.rotary_scaling).get("rope_type")
    return model.config.learned_positions or kind in ("dynamic", "longrope")


def outcome(folder: Path, config: dict[str, Any], changed: list[str], seed: int) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    theirs = transformers_model(folder, seed)
    try:
        ours = load_model(folder)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return f"refused: {error}" if theirs is not None else "invalid"
    assert theirs is not None, "no weights were saved"
    with torch.no_grad():
        compare(folder, ours, theirs)
    return "computed"


def outcomes(family: str, seeds: range, tmp_path: Path) -> Counter:
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    known = list(AutoConfig.for_model(family).to_dict())
    counts: Counter = Counter()
    for seed in seeds:
        config, changed = edited_config(family, known, random.Random(f"{family} {seed}"))
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            counts[outcome(folder, config, changed, seed)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, {changed} of {config}") from error
    return counts


@pytest.mark.parametrize("family", OWN)
def test_a_random_configuration_is_computed_or_refused(family: str, tmp_path: Path) -> None:
    """Most random values of some families are refused, so there are more seeds until one is computed."""
    n, counts = examples(6), Counter[str]()
    for start in range(0, 10 * n, n):
        counts += outcomes(family, range(start, start + n), tmp_path)
        if counts["computed"]:
            break
    assert counts["computed"]
