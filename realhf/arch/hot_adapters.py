"""Which LoRA adapters vLLM applies beside the base weights, and which are merged into the weights that it gets."""

from realhf.api.model_config import ModelConfig
from realhf.arch.lora import lora_modules

FAMILIES_WITH_ADAPTERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
"""Families whose classes in vLLM declare ``SupportsLoRA``. Those of gpt2, gpt_neox and olmo2 do not."""
MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``max_lora_rank``; it stores adapters with zeros up to that rank."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
         "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}  # fmt: skip
"""Modules of vLLM that contain several modules of the Hugging Face model."""


def merge_reason(config: ModelConfig, merge_lora: bool) -> str | None:
    """Return why the adapters of a model are merged for vLLM; None if vLLM applies them itself."""
    if config.lora is None or not config.lora.rank:
        return "there are no adapters"
    if merge_lora:
        return "vllm.merge_lora=True"
    if config.lora.bits:
        return "the base is quantized"
    if config.n_experts:
        return "the model has routed experts"
    if config.family not in FAMILIES_WITH_ADAPTERS:
        return f"vLLM has no adapters for {config.family} models"
    if config.lora.rank > MAX_RANKS[-1]:
        return f"lora.rank={config.lora.rank} exceeds vLLM's maximum of {MAX_RANKS[-1]}"
    return None


def padded_rank(rank: int) -> int:
    """Return the smallest ``max_lora_rank`` of vLLM for adapters of a rank."""
    return next(one for one in MAX_RANKS if one >= rank)


def served_modules(config: ModelConfig) -> list[str]:
    """Return the names of modules with adapters, and of the modules of vLLM that contain them."""
    names = {module.name for module in lora_modules(config)}
    return sorted(names | {FUSED[name] for name in names if name in FUSED})
