"""Tiny random models of some families, saved as Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.models.engine.tiny_engine import FAMILIES, VOCAB
from tests.models.tiny_models import OTHERS, of_config

HfModels = dict[str, tuple[Path, nn.Module]]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.2}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "qwen3_5_text": lambda: of_config("qwen3_5_text", **OTHERS["qwen3_5_text"] | {"vocab_size": VOCAB}),
}


def hugging_face_model(name: str) -> nn.Module:
    """Return a random model with random biases and norms; the same for the same name."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if parameter_name.endswith("A_log"):
                parameter.sub_(4.0)  # without this a state forgets the token before
    return model


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory: pytest.TempPathFactory) -> HfModels:
    """By family: a folder, and the Hugging Face model saved in it."""
    models = {}
    for name in FAMILIES:
        folder, model = tmp_path_factory.mktemp(name), hugging_face_model(name)
        model.save_pretrained(folder)
        models[name] = (folder, model)
    return models


@pytest.fixture(scope="session")
def llama(hf_models: HfModels) -> Path:
    return hf_models["llama"][0]
