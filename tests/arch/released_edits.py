"""Edits of released configurations that users, fine-tuning tools and versions of transformers make.

Positions are divided by ``POSITIONS_PER_ONE``, so rows of ``LENGTHS`` exceed windows and original positions.
"""

import random
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig

from tests.arch.test_real_configs import RELEASED
from tests.models.config_edits import edits

LENGTHS = (3, 12, 20, 41, 70)
POSITIONS_PER_ONE = 256
POSITIONS = ("max_position_embeddings", "original_max_position_embeddings", "n_positions", "n_ctx", "sliding_window",
             "initial_context_length")  # fmt: skip
ORACLE_TYPES = {"kimi_k2": "deepseek_v3"}
"""Families that transformers has under another ``model_type``."""
KIMI_K2 = {
    **RELEASED["deepseek-v3"], "model_type": "kimi_k2", "bos_token_id": 5, "eos_token_id": 6, "n_group": 1,
    "topk_group": 1, "max_position_embeddings": 262144, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.827, "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
}  # fmt: skip
SHAPES = {**RELEASED, "kimi-k2": KIMI_K2}
REMOVED = object()
"""The value of a field that an edit removes."""
Edit = dict[str, Any]

LABELS: tuple[Edit, ...] = (
    {"transformers_version": "4.28.0"}, {"torch_dtype": "bfloat16"}, {"dtype": "float16", "torch_dtype": "float16"},
    {"dtype": "bfloat16", "transformers_version": "5.2.0"}, {"use_cache": False}, {"pretraining_tp": 2},
    {"attn_implementation": "eager"}, {"_attn_implementation_autoset": True}, {"quantization_config": None},
    {"auto_map": None}, {"auto_map": REMOVED}, {"architectures": ["AForCausalLM"], "_name_or_path": "a/b"},
    {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "problem_type": None}, {"gradient_checkpointing": False},
    {"output_router_logits": True}, {"cache_implementation": None, "unsloth_version": "2025.1.1"},
    {"is_decoder": False, "return_dict": True, "torchscript": False, "pruned_heads": {}, "sep_token_id": None},
)  # fmt: skip
"""Fields that newer or older versions and tools write, without influence on the mathematics."""
SPELLINGS: tuple[Edit, ...] = (
    {"rope_theta": 20000}, {"rms_norm_eps": 1}, {"layer_norm_eps": 1}, {"layer_norm_epsilon": 1},
    {"attention_dropout": 0}, {"logits_scaling": 4}, {"final_logit_softcapping": 20},
    {"routed_scaling_factor": 2}, {"num_hidden_layers": 2.0}, {"sliding_window": [16]}, {"sliding_window": 8.0},
    {"eos_token_id": [3, 4]}, {"pad_token_id": [3]}, {"num_key_value_heads": [2, 2]}, {"intermediate_size": [48, 40]},
    {"head_dim": [8]}, {"hidden_act": ["silu"]}, {"rope_theta": [1e4]}, {"rope_theta": "10000"}, {"rope_scaling": []},
    {"tie_word_embeddings": "true"}, {"tie_word_embeddings": 1}, {"num_experts_per_tok": 2.0}, {"layer_types": "full"},
    {"partial_rotary_factor": 1}, {"rope_scaling": "yarn"}, {"vocab_size": 72}, {"max_position_embeddings": 64.0},
)  # fmt: skip
"""Integers for floats, lists for scalars, and other types than released configurations have."""
SCALINGS: tuple[Edit, ...] = (
    {"kind": "linear", "factor": 2}, {"kind": "linear", "factor": 4.0}, {"kind": "dynamic", "factor": 2.0},
    {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, {"kind": "yarn", "factor": 4.0},
    {"kind": "yarn", "factor": 4, "original_max_position_embeddings": 16, "attention_factor": 0.9},
    {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0},
    {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.8},
    {"kind": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2},
    {"kind": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 0.2, "truncate": False},
    {"kind": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 0.2},
    {"kind": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 1, "beta_slow": 1},
    {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"kind": "llama3", "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4},
    {"kind": "longrope", "original_max_position_embeddings": 32, "short_factor": 1.1, "long_factor": 3.0},
    {"kind": "longrope", "original_max_position_embeddings": 32, "short_factor": 1.0, "long_factor": 4.0,
     "factor": 4.0},
    {"kind": "longrope", "original_max_position_embeddings": 32, "short_factor": 1.0, "long_factor": 2.0,
     "attention_factor": 1.2},
    {"kind": "su", "short_factor": 1.0, "long_factor": 2.0}, {"kind": "default"},
)  # fmt: skip
"""Rotary scaling as released configurations have it; the factors of LongRoPE are the first ones of lists."""


def families() -> list[str]:
    return sorted({shape["model_type"] for shape in SHAPES.values()})


def scaled(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with positions divided, also in objects."""
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            value = scaled(value)
        shortest = 32 if key in ("max_position_embeddings", "n_positions", "n_ctx") else 4
        found[key] = max(shortest, value // POSITIONS_PER_ONE) if key in POSITIONS and value else value
    return found


def rotary_pairs(config: dict[str, Any]) -> int:
    """Return the rotated pairs of dimensions of a released configuration."""
    head_dim = config.get("qk_rope_head_dim") or config.get("head_dim") or 8
    default = {"gpt_neox": 0.25, "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5}.get(config["model_type"], 1.0)
    return int(head_dim * config.get("partial_rotary_factor", config.get("rotary_pct", default))) // 2


def rotary_edit(config: dict[str, Any], scaling: Edit, rng: random.Random) -> Edit:
    """Return a scaling as transformers 4 spells it, or as transformers 5 does."""
    own = {key: value for key, value in scaling.items() if key != "kind"}
    for key in ("short_factor", "long_factor"):
        if key in own:
            own[key] = [own[key] + 0.5 * i for i in range(rotary_pairs(config))]
    if rng.random() < 0.5:
        names = rng.choice((["type"], ["rope_type"], ["type", "rope_type"]))
        return {"rope_scaling": {**own, **dict.fromkeys(names, scaling["kind"])}}
    new: Edit = {"rope_theta": config.get("rope_theta", 1e4), "rope_type": scaling["kind"], **own}
    if config["model_type"] == "ministral3" and rng.random() < 0.9:
        new |= {"original_max_position_embeddings": 16, **new, "llama_4_scaling_beta": 0.1}
    if "partial_rotary_factor" in config and rng.random() < 0.5:
        new["partial_rotary_factor"] = config["partial_rotary_factor"]
    if config["model_type"] in ("gemma3_text", "olmo3") and rng.random() < 0.8:
        new = {"full_attention": new, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    older = rng.choice(({"rope_theta": REMOVED, "rope_scaling": REMOVED}, {"rope_scaling": REMOVED},
                        {"rope_scaling": None}))  # fmt: skip
    return {**older, "rope_parameters": new}


def field_edit(config: dict[str, Any], field: str, rng: random.Random) -> Edit:
    """Return another value of a field, of ``layer_types`` usually one for every layer."""
    n_layers = config.get("num_hidden_layers", 2)
    kinds = ("full_attention", "sliding_attention")
    if field == "layer_types" and rng.random() < 0.85:
        return {field: rng.choice(([rng.choice(kinds) for _ in range(n_layers)], [kinds[0]] * n_layers,
                                   [kinds[1]] * n_layers, None))}  # fmt: skip
    if field == "no_rope_layers":
        return {field: [rng.choice((0, 1)) for _ in range(n_layers)]}
    if field == "sliding_window":
        return {field: rng.choice((None, 5, 16, 4096))}
    if field.endswith(("norm_eps", "epsilon")):  # a row of zeros, that of the pad token, needs one
        return {field: rng.choice((1e-8, 1e-6, 1e-5, 0.05))}
    if field == "hidden_size":
        return {field: rng.choice((48, 64))}
    return {field: edits(rng)[field]}


def edits_of(family: str) -> list[Callable[[dict[str, Any], random.Random], Edit]]:
    """Return every edit of a family, in a random order: one of each field that its class or its shapes have."""
    shapes = [shape for shape in SHAPES.values() if shape["model_type"] == family]
    known = {key for shape in shapes for key in shape}
    known |= set(AutoConfig.for_model(ORACLE_TYPES.get(family, family)).to_dict())
    rotary = ("rope_scaling", "rope_parameters")
    found: list[Callable[[dict[str, Any], random.Random], Edit]] = [
        lambda config, rng, field=field: field_edit(config, field, rng)  # type: ignore[misc]
        for field in edits(random.Random(0)) if field in known and field not in rotary
    ]  # fmt: skip
    found += [lambda config, rng, edit=edit: edit  # type: ignore[misc]
              for edit in (*LABELS, *SPELLINGS) if edit in LABELS or set(edit) <= known]  # fmt: skip
    if family != "gpt2":
        found += [lambda config, rng, scaling=scaling: rotary_edit(config, scaling, rng)  # type: ignore[misc]
                  for scaling in SCALINGS]  # fmt: skip
    random.Random(family).shuffle(found)
    return found


def edited_shape(family: str, number: int) -> tuple[dict[str, Any], Edit]:
    """Return edit ``number`` of the family's shapes, with up to two further ones, and all fields that it changes."""
    rng = random.Random(f"{family} {number}")
    config = scaled(rng.choice([shape for shape in SHAPES.values() if shape["model_type"] == family]))
    makers = edits_of(family)
    chosen = [makers[number % len(makers)], *rng.sample(makers, rng.choice((0, 0, 1, 2)))]
    changed: Edit = {}
    for maker in chosen:
        changed |= maker(config, rng)
    edited = {key: value for key, value in {**config, **changed}.items() if value is not REMOVED}
    return edited, changed
