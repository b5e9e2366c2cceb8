"""Multimodal folders: refused by name, or their text part alone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3Config, Mistral3Config, Qwen3_5Config

from realhf.arch.hf_config import read_hf_config
from realhf.models.hf_folder import load_hf, save_hf
from realhf.models.transformer import Transformer
from tests.models.tiny_models import OTHERS, SIZES, load_model, whole_params

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
ROWS = torch.arange(3, 30)


def multimodal(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gemma3":
        text = {"model_type": "gemma3_text", **SIZES, **OTHERS["gemma3_text"]}
        config: object = Gemma3Config(text_config=text, vision_config={"model_type": "siglip_vision_model", **VISION},
                                      mm_tokens_per_image=4)  # fmt: skip
    elif kind == "qwen3_5":
        text = {"model_type": "qwen3_5_text", **SIZES, **OTHERS["qwen3_5_text"]}
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [1, 1, 1], "mrope_interleaved": True}
        vision = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
        config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=60, video_token_id=61,
                               vision_start_token_id=62, vision_end_token_id=63)  # fmt: skip
    else:
        text = {"model_type": "ministral3", **SIZES, **OTHERS["ministral3"]}
        config = Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **VISION})
    return AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_5"])
def test_the_text_part_equals_that_of_transformers(kind: str, tmp_path: Path) -> None:
    reference = multimodal(kind)
    reference.save_pretrained(tmp_path / "in")
    with pytest.raises(ValueError, match=f"{kind} is a multimodal model; text_only=True uses its text part"):
        read_hf_config(tmp_path / "in", scalar_head=False)
    config = read_hf_config(tmp_path / "in", scalar_head=False, text_only=True)
    params = whole_params(config)
    load_hf(tmp_path / "in", config, params, 0)
    ours = Transformer(config, params)
    with torch.no_grad():
        logits = ours.logits(ours.hidden(ROWS, [len(ROWS)]))
        assert torch.allclose(logits, reference(ROWS[None]).logits[0], atol=1e-4)
    save_hf(tmp_path / "out", config, params.view, None)
    assert torch.equal(load_model(tmp_path / "out").params.data, params.data)
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type == config.family


def test_parts_that_are_not_supported_and_text_models(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}}))
    with pytest.raises(ValueError, match="unknown model_type 'qwen2_5_vl_text'"):
        read_hf_config(file, scalar_head=False, text_only=True)
    file.write_text(json.dumps({"model_type": "llama", **SIZES}))
    with pytest.raises(ValueError, match="text_only=True, but llama has no 'text_config'"):
        read_hf_config(file, scalar_head=False, text_only=True)
