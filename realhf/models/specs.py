"""The parameters of a model and its stages, from sizes alone. No tensors: the planner reads this file."""

import json
from itertools import accumulate
from pathlib import Path

from realhf.api.model import ModelConfig
from realhf.api.params import ParamSpec
from realhf.base.errors import did_you_mean
from realhf.models.families import FAMILIES


def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return every parameter in the order of the layers. Matrices are ``[out, in]``.

    Names: ``embed.weight``, ``embed.positions``, ``layers.{i}.{attn_norm.weight, wq, wk, wv, bq, bk, bv, q_norm.weight,
    k_norm.weight, wo, bo, attn_post_norm.weight, mlp_norm.weight, gate, up, b_up, down, b_down, router, experts.up,
    experts.down, mlp_post_norm.weight}`` (and ``.bias`` of layer norms), ``final_norm.weight``, ``head.weight`` (absent
    when it is the embedding; ``[1, hidden]`` for a scalar head). What a fused product needs is declared side by side;
    ``experts.up`` is ``[E, 2, wide, hidden]`` (gate and up of each expert), ``experts.down`` ``[E, hidden, wide]``.
    """
    d, vocab = config.hidden, config.vocab
    tied = config.n_layers + 1 if config.tied_embedding and config.head == "lm" else None
    specs = [ParamSpec("embed.weight", (vocab, d), 0, 0, vocab, shared_layer=tied)]
    if config.learned_positions:
        specs.append(ParamSpec("embed.positions", (config.max_positions, d), 0))
    for layer in range(config.n_layers):
        specs += _block_specs(config, layer)
    last = config.n_layers + 1
    specs += _norm_specs(config, "final_norm", last)
    if config.head == "scalar":
        specs.append(ParamSpec("head.weight", (1, d), last))
    elif not config.tied_embedding:
        specs.append(ParamSpec("head.weight", (vocab, d), last, 0, vocab))
    return tuple(specs)


def _norm_specs(config: ModelConfig, name: str, layer: int) -> list[ParamSpec]:
    parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return [ParamSpec(f"{name}.{part}", (config.hidden,), layer) for part in parts]


def _block_specs(config: ModelConfig, index: int) -> list[ParamSpec]:
    layer, prefix = index + 1, f"layers.{index}."
    specs = _norm_specs(config, prefix + "attn_norm", layer)
    specs += _attention_specs(config, prefix, layer)
    if config.post_norms:
        specs += _norm_specs(config, prefix + "attn_post_norm", layer)
    specs += _norm_specs(config, prefix + "mlp_norm", layer)
    specs += (_expert_specs if index in config.routed_layers else _mlp_specs)(config, prefix, layer)
    if config.post_norms:
        specs += _norm_specs(config, prefix + "mlp_post_norm", layer)
    return specs


def _attention_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    d, inner = config.hidden, config.n_heads * config.head_dim
    heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
    specs = [ParamSpec(f"{prefix}w{part}", (n * config.head_dim, d), layer, 0, n) for part, n in heads.items()]
    if config.qkv_bias:
        specs += [ParamSpec(f"{prefix}b{part}", (n * config.head_dim,), layer, 0, n) for part, n in heads.items()]
    if config.qk_norm:
        specs += [ParamSpec(f"{prefix}{part}_norm.weight", (config.head_dim,), layer) for part in "qk"]
    specs.append(ParamSpec(prefix + "wo", (d, inner), layer, 1, config.n_heads))
    if config.proj_bias:
        specs.append(ParamSpec(prefix + "bo", (d,), layer))
    return specs


def _mlp_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    d, wide = config.hidden, config.intermediate
    names = ("gate", "up") if config.mlp == "gated" else ("up",)
    specs = [ParamSpec(prefix + name, (wide, d), layer, 0, wide) for name in names]
    specs.append(ParamSpec(prefix + "down", (d, wide), layer, 1, wide))
    if config.proj_bias and config.mlp == "plain":
        specs += [ParamSpec(prefix + "b_up", (wide,), layer, 0, wide), ParamSpec(prefix + "b_down", (d,), layer)]
    return specs


def _expert_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    """The router is whole everywhere; each expert is cut like an MLP."""
    d, wide, count = config.hidden, config.expert_intermediate, config.n_experts
    return [
        ParamSpec(prefix + "router", (count, d), layer),
        ParamSpec(prefix + "experts.up", (count, 2, wide, d), layer, 2, wide),
        ParamSpec(prefix + "experts.down", (count, d, wide), layer, 2, wide),
    ]


def stage_layers(config: ModelConfig, pp: int) -> tuple[range, ...]:
    """Cut layers 0..L+1 into ``pp`` runs, each with a block or more, so that the heaviest has fewest parameters.

    A tied embedding counts on both ends: the last stage multiplies by it too. Raises ValueError when there are more
    stages than blocks.
    """
    n = config.n_layers
    if not 1 <= pp <= n:
        raise ValueError(f"cannot cut {n} layers into {pp} pipeline stages")
    weights = [0] * (n + 2)
    for spec in param_specs(config):
        weights[spec.layer] += spec.numel
    if config.tied_embedding and config.head == "lm":
        weights[n + 1] += config.vocab * config.hidden
    total = [0, *accumulate(weights)]
    # best[stop]: (heaviest stage, sum of squares, cuts) over layers before ``stop``, with the stages placed so far
    best: dict[int, tuple[int, int, tuple[int, ...]]]
    best = {stop: (total[stop], total[stop] ** 2, (0, stop)) for stop in range(2, n + 2)}
    best[n + 2] = (total[-1], total[-1] ** 2, (0, n + 2))
    for stage in range(2, pp + 1):
        stops = [n + 2] if stage == pp else range(stage + 1, n + 1)
        best = {stop: min(_extended(best, total, stop, n)) for stop in stops}
    cuts = best[n + 2][2]
    return tuple(range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False))


def _extended(best: dict, total: list[int], stop: int, n_layers: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """The ways to add a last stage that ends at ``stop`` and holds at least one block."""
    ways = []
    for start, (heaviest, squares, cuts) in best.items():
        if start < min(stop, n_layers + 1):
            load = total[stop] - total[start]
            ways.append((max(heaviest, load), squares + load**2, (*cuts, stop)))
    return ways


def read_hf_config(path: Path | str, scalar_head: bool) -> ModelConfig:
    """Read the sizes of a Hugging Face model from its folder or its ``config.json``.

    Raises ValueError for a missing or malformed file, an unknown ``model_type`` and fields that make no sense.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise ValueError(f"no model configuration at '{file}': give a Hugging Face folder or its config.json")
    try:
        hf = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"'{file}' is not JSON: {error}") from error
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    if kind not in FAMILIES:
        hint = did_you_mean(str(kind), FAMILIES)
        raise ValueError(f"'{file}': unknown model_type {kind!r}, known are {', '.join(FAMILIES)}{hint}")
    try:
        return check_sizes(FAMILIES[kind].config_from_hf(hf, scalar_head))
    except ValueError as error:
        raise ValueError(f"'{file}': {error}") from error


def check_sizes(config: ModelConfig) -> ModelConfig:
    """Return the configuration unchanged when its sizes fit together, else raise ValueError."""
    if config.n_heads % config.n_kv_heads:
        raise ValueError(f"{config.n_heads} query heads are not a multiple of {config.n_kv_heads} key/value heads")
    turning = config.rotary_dims or config.head_dim
    if not config.learned_positions and (turning % 2 or turning > config.head_dim):
        raise ValueError(f"rotary positions need an even part of a head of {config.head_dim}, got {turning}")
    if config.windows and len(config.windows) != config.n_layers:
        raise ValueError(f"{config.n_layers} layers have {len(config.windows)} attention windows")
    if config.n_experts and not 1 <= config.experts_per_token <= config.n_experts:
        raise ValueError(f"each token goes to {config.experts_per_token} of {config.n_experts} experts")
    return config
