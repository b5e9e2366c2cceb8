"""Edits of released configurations: log-probabilities equal those of transformers, or a field is refused by name."""

import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from realhf.arch.hf_config import read_hf_config
from realhf.models.hf_folder import config_json
from tests.arch.released_edits import LENGTHS, ORACLE_TYPES, SHAPES, edited_shape, edits_of, families, scaled
from tests.models.test_config_oracle import compare, fresh, is_rounding, transformers_model
from tests.models.tiny_models import load_model
from tests.scaling import subset

N_QUICK = 3
ONLY_HERE = "accepted, but not by transformers"
WORD = re.compile(r"[a-z0-9_]+")


def same_log_probs(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4, rtol=0)


def names_in(fields: dict[str, Any]) -> set[str]:
    inner = [names_in(value) for value in fields.values() if isinstance(value, dict)]
    return set(fields).union(*inner)


def typed(config: dict[str, Any], oracle_type: str) -> dict[str, Any]:
    """Return the fields with the types that transformers 5 checks and older versions do not, and the same meaning."""
    defaults = AutoConfig.for_model(oracle_type).to_dict()
    found = dict(config)
    for key, value in config.items():
        if type(value) is int and (isinstance(defaults.get(key), float) or key.endswith("softcapping")):
            found[key] = float(value)
        if isinstance(value, list) and key.endswith("_token_id") and len(value) == 1:
            found[key] = value[0]
        if value is None and key in ("head_dim", "attention_bias", "mlp_bias"):
            del found[key]
    if "head_dim" not in found and "head_dim" in defaults and defaults["head_dim"] is None:
        found["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if config.get("num_key_value_heads", 1) is None:
        found["num_key_value_heads"] = config["num_attention_heads"]
    if config.get("sliding_window", 1) is None or config.get("use_sliding_window") is False:
        found["sliding_window"] = 2 * max(LENGTHS)  # without effect
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "su" and oracle_type == "phi3":
        found["rope_scaling"] = {**scaling, "rope_type": "longrope"}
    return found


def oracle(folder: Path, config: dict[str, Any]) -> PreTrainedModel | None:
    """Return a model of transformers, which reads the written configuration or one that means the same."""
    oracle_type = ORACLE_TYPES.get(config["model_type"], config["model_type"])
    fields = {key: value for key, value in config.items() if key != "auto_map"} | {"model_type": oracle_type}
    for readable in (fields, typed(fields, oracle_type)):
        (folder / "config.json").write_text(json.dumps(readable))
        if (model := transformers_model(folder, 0)) is not None:
            return model
    return None


def outcome(folder: Path, config: dict[str, Any], changed: dict[str, Any]) -> str:
    """Return ``computed``, ``refused``, or ``invalid`` for a configuration that transformers refuses too."""
    theirs, file = oracle(folder, config), folder / "config.json"
    readable = file.read_text()
    file.write_text(json.dumps(config))
    try:
        sizes = read_hf_config(folder, False)
    except ValueError as error:
        message = str(error).removeprefix(f"'{file}': ")
        assert "\n" not in message and len(message) < 500
        named = names_in({**config, **changed}) & set(WORD.findall(message)) or " is missing" in message
        assert named, f"no field is named: {message}"
        return "invalid" if theirs is None else "refused"
    if theirs is None:
        return ONLY_HERE
    ours = load_model(folder)
    file.write_text(readable)
    with torch.no_grad():
        compare(folder, ours, theirs, LENGTHS, same_log_probs)
        saved = config_json(sizes, torch.float32)
        file.write_text(json.dumps(saved))
        assert read_hf_config(folder, False) == sizes, "the saved configuration differs"
        file.write_text(json.dumps({**saved, "model_type": ORACLE_TYPES.get(sizes.family, sizes.family)}))
        n = min(max(LENGTHS), sizes.max_row_len)
        row = torch.arange(n) % sizes.vocab
        logits, expected = ours.logits(ours.hidden(row, [n])), fresh(folder)(row[None]).logits[0]
        assert same_log_probs(logits, expected) or is_rounding(folder, row, logits, expected), "saved"
    return "computed"


def outcomes(family: str, numbers: range, folder: Path) -> Counter[str]:
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for number in numbers:
        config, changed = edited_shape(family, number)
        own = folder / str(number)
        own.mkdir()
        try:
            counts[outcome(own, config, changed)] += 1
        except Exception as error:
            raise AssertionError(f"{family} {number}: {changed} of {config}") from error
    return counts


@pytest.mark.parametrize("family", families())
def test_an_edited_configuration_is_computed_or_refused_by_name(family: str, tmp_path: Path) -> None:
    counts = outcomes(family, range(N_QUICK), tmp_path)
    assert not counts[ONLY_HERE]


@pytest.mark.slow
@pytest.mark.parametrize("family", subset(families(), 8))
def test_every_edit_of_a_family(family: str, tmp_path: Path) -> None:
    """Every field that the family has is edited at least once."""
    counts = outcomes(family, range(N_QUICK, N_QUICK + len(edits_of(family))), tmp_path)
    assert not counts[ONLY_HERE] and counts["computed"] >= 20


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo3", "cohere2", "gpt_oss", "ministral"])
def test_transformers_reads_a_saved_model_whose_layers_have_no_window(family: str, tmp_path: Path) -> None:
    shape = next(shape for shape in SHAPES.values() if shape["model_type"] == family)
    config = scaled(shape) | {"layer_types": ["full_attention"] * shape["num_hidden_layers"]}
    assert outcome(tmp_path, config, {}) == "computed"
