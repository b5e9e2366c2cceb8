"""The parameters of a model and its pipeline stages, from sizes only. No tensors."""

from functools import lru_cache
from itertools import accumulate

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import ParamSpec


@lru_cache(maxsize=256)
def param_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return all parameters in layer order. Matrices are ``[out, in]``.

    Names: ``embed.weight``, ``embed.positions``, ``layers.{i}.{attn_norm.weight, wq, wk, wv, bq, bk, bv, q_norm.weight,
    k_norm.weight, sinks, wo, bo, attn_post_norm.weight, mlp_norm.weight, gate, up, b_gate, b_up, down, b_down, router,
    b_router, choice_bias, experts.up, experts.down, experts.b_up, experts.b_down, shared.gate, shared.up, shared.down,
    shared_gate, mlp_post_norm.weight}`` (and ``.bias`` of layer norms; latent attention has ``q_a, q_a_norm.weight,
    kv_a, kv_a_norm.weight, wkv, b_q_a, b_kv_a`` instead of ``wk, wv`` and their biases; an output gate is ``wg, bg``;
    the gated delta rule has ``delta.{q, k, v, z, b, a, conv_q, conv_k, conv_v, a_log, dt_bias, norm}`` and ``wo``),
    ``final_norm.weight``, ``head.weight`` (absent if tied to the embedding; ``[1, hidden]`` for a scalar head). Inputs
    of a fused product are adjacent.
    ``experts.up`` is ``[E, 2, wide, hidden]`` (gate and up of each expert), ``experts.down`` ``[E, hidden, wide]``.
    """
    d, vocab, last = config.hidden, config.vocab, config.n_layers + 1
    tied = last if config.tied_embedding and config.head == "lm" else None
    specs = [ParamSpec("embed.weight", (vocab, d), 0, 0, vocab, shared_layer=tied)]
    if config.learned_positions:
        specs.append(ParamSpec("embed.positions", (config.max_positions, d), 0))
    for layer in range(config.n_layers):
        specs += _block_specs(config, layer)
    specs += _norm_specs(config, "final_norm", last)
    if config.head == "scalar":
        specs.append(ParamSpec("head.weight", (1, d), last))
    elif not config.tied_embedding:
        specs.append(ParamSpec("head.weight", (vocab, d), last, 0, vocab))
    return tuple(specs)


def _norm_specs(config: ModelConfig, name: str, layer: int, present: bool = True) -> list[ParamSpec]:
    parts = ("weight", "bias") if config.norm == "layer" and config.norm_bias else ("weight",)
    return [ParamSpec(f"{name}.{part}", (config.hidden,), layer) for part in parts] if present else []


def _block_specs(config: ModelConfig, index: int) -> list[ParamSpec]:
    layer, prefix = index + 1, f"layers.{index}."
    return [
        *_norm_specs(config, prefix + "attn_norm", layer, config.pre_norms),
        *(_delta_specs if index in config.delta_layers else _attention_specs)(config, prefix, layer),
        *_norm_specs(config, prefix + "attn_post_norm", layer, config.post_norms),
        *_norm_specs(config, prefix + "mlp_norm", layer, config.pre_norms and not config.shared_norm),
        *(_expert_specs if index in config.routed_layers else _mlp_specs)(config, prefix, layer),
        *_norm_specs(config, prefix + "mlp_post_norm", layer, config.post_norms),
    ]


def _attention_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    specs = _latent_specs(config, prefix, layer) if config.latent else _projection_specs(config, prefix, layer)
    if config.attention_sinks:
        specs.append(ParamSpec(prefix + "sinks", (config.n_heads,), layer, 0, config.n_heads))
    specs.append(ParamSpec(prefix + "wo", (config.hidden, config.n_heads * config.value_dim), layer, 1, config.n_heads))
    if config.proj_bias:
        specs.append(ParamSpec(prefix + "bo", (config.hidden,), layer))
    return specs


def _latent_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    """The products that make latents are replicated, those of heads are sharded."""
    assert config.latent is not None
    d, n, latent, rotary = config.hidden, config.n_heads, config.latent, config.rotary_dims
    specs = []
    if latent.q_rank:
        specs += [ParamSpec(prefix + "q_a", (latent.q_rank, d), layer),
                  ParamSpec(prefix + "q_a_norm.weight", (latent.q_rank,), layer)]  # fmt: skip
    specs += [
        ParamSpec(prefix + "wq", (n * config.head_dim, latent.q_rank or d), layer, 0, n),
        ParamSpec(prefix + "kv_a", (latent.kv_rank + rotary, d), layer),
        ParamSpec(prefix + "kv_a_norm.weight", (latent.kv_rank,), layer),
        ParamSpec(prefix + "wkv", (n * (config.head_dim - rotary + latent.value_dim), latent.kv_rank), layer, 0, n),
    ]
    if config.qkv_bias:
        biases = {"b_q_a": latent.q_rank, "b_kv_a": latent.kv_rank + rotary}
        specs += [ParamSpec(prefix + name, (size,), layer) for name, size in biases.items() if size]
    return specs


def _projection_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    d, head_dim = config.hidden, config.head_dim
    heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
    heads |= {"g": config.n_heads} if config.attention_gate else {}
    specs = [ParamSpec(f"{prefix}w{part}", (n * head_dim, d), layer, 0, n) for part, n in heads.items()]
    if config.qkv_bias:
        specs += [ParamSpec(f"{prefix}b{part}", (n * head_dim,), layer, 0, n) for part, n in heads.items()]
    if config.qk_norm == "head":
        specs += [ParamSpec(f"{prefix}{part}_norm.weight", (head_dim,), layer) for part in "qk"]
    elif config.qk_norm == "full":
        specs += [ParamSpec(f"{prefix}{p}_norm.weight", (heads[p] * head_dim,), layer, 0, heads[p]) for p in "qk"]
    return specs


def _delta_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    """Everything of a key head and of its value heads is on one rank; the norm of heads is replicated."""
    assert config.delta is not None
    d, n, delta = config.hidden, config.delta.key_heads, config.delta
    rows = {"q": delta.keys, "k": delta.keys, "v": delta.values, "z": delta.values}
    rows |= {"b": delta.value_heads, "a": delta.value_heads}
    return [
        *(ParamSpec(f"{prefix}delta.{part}", (size, d), layer, 0, n) for part, size in rows.items()),
        *(ParamSpec(f"{prefix}delta.conv_{part}", (rows[part], 1, delta.kernel), layer, 0, n) for part in "qkv"),
        *(ParamSpec(f"{prefix}delta.{part}", (delta.value_heads,), layer, 0, n) for part in ("a_log", "dt_bias")),
        ParamSpec(prefix + "delta.norm", (delta.value_dim,), layer),
        ParamSpec(prefix + "wo", (d, delta.values), layer, 1, n),
    ]


def _mlp_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    d, wide = config.hidden, config.intermediate
    names = ("gate", "up") if config.mlp == "gated" else ("up",)
    specs = [ParamSpec(prefix + name, (wide, d), layer, 0, wide) for name in names]
    specs.append(ParamSpec(prefix + "down", (d, wide), layer, 1, wide))
    if config.mlp_bias:
        specs += [ParamSpec(f"{prefix}b_{name}", (wide,), layer, 0, wide) for name in names]
        specs.append(ParamSpec(prefix + "b_down", (d,), layer))
    return specs


def _expert_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    """The router is replicated; each expert is sharded like an MLP. Every rank adds its columns of ``b_down``."""
    d, wide, count, shared = config.hidden, config.expert_intermediate, config.n_experts, config.shared_intermediate
    specs = [ParamSpec(prefix + "router", (count, d), layer)]
    if config.expert_bias:
        specs.append(ParamSpec(prefix + "b_router", (count,), layer))
    if config.choice_bias:
        specs.append(ParamSpec(prefix + "choice_bias", (count,), layer))
    specs += [
        ParamSpec(prefix + "experts.up", (count, 2, wide, d), layer, 2, wide, is_expert=True),
        ParamSpec(prefix + "experts.down", (count, d, wide), layer, 2, wide, is_expert=True),
    ]
    if config.expert_bias:
        specs.append(ParamSpec(prefix + "experts.b_up", (count, 2, wide), layer, 2, wide, is_expert=True))
        specs.append(ParamSpec(prefix + "experts.b_down", (count, d), layer, 1, d, is_expert=True))
    if shared:
        specs += [ParamSpec(f"{prefix}shared.{name}", (shared, d), layer, 0, shared) for name in ("gate", "up")]
        specs.append(ParamSpec(prefix + "shared.down", (d, shared), layer, 1, shared))
    if config.shared_gate:
        specs.append(ParamSpec(prefix + "shared_gate", (1, d), layer))
    return specs


@lru_cache(maxsize=1024)
def stage_layers(config: ModelConfig, pp: int, vpp: int = 1) -> tuple[frozenset[int], ...]:
    """Return the layers of each of ``pp`` stages: stage s has the chunks s, s + pp and so on of ``pp * vpp``.

    ValueError for more chunks than blocks.
    """
    chunks = chunk_layers(config, pp * vpp)
    return tuple(frozenset(layer for chunk in chunks[stage::pp] for layer in chunk) for stage in range(pp))


@lru_cache(maxsize=1024)
def chunk_layers(config: ModelConfig, n_chunks: int) -> tuple[range, ...]:
    """Split layers 0..L+1 into chunks with at least one block each, minimising the largest parameter count.

    A tied embedding counts on both ends: the last chunk multiplies by it too. ValueError for more chunks than blocks.
    """
    n = config.n_layers
    if not 1 <= n_chunks <= n:
        raise ValueError(f"cannot split {n} layers into {n_chunks} pipeline stages")
    weights = [0] * (n + 2)
    for spec in param_specs(config):
        weights[spec.layer] += spec.numel
    if config.tied_embedding and config.head == "lm":
        weights[n + 1] += config.vocab * config.hidden
    total = [0, *accumulate(weights)]
    # best[stop]: (heaviest chunk, sum of squares, cuts) of the layers before ``stop``, for the chunks placed so far
    best: dict[int, tuple[int, int, tuple[int, ...]]]
    best = {stop: (total[stop], total[stop] ** 2, (0, stop)) for stop in range(2, n + 3)}
    for chunk in range(2, n_chunks + 1):
        stops = [n + 2] if chunk == n_chunks else range(chunk + 1, n + 1)
        best = {stop: min(_extended(best, total, stop, n)) for stop in stops}
    cuts = best[n + 2][2]
    return tuple(range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False))


def _extended(best: dict, total: list[int], stop: int, n_layers: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the ways to add a last chunk that ends at ``stop`` and has at least one block."""
    ways = []
    for start, (heaviest, squares, cuts) in best.items():
        if start < min(stop, n_layers + 1):
            load = total[stop] - total[start]
            ways.append((max(heaviest, load), squares + load**2, (*cuts, stop)))
    return ways
