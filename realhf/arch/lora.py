"""LoRA adapters (arXiv 2106.09685): which low-rank matrices a model has, and which parameters stay frozen.

The modules are those of the Hugging Face model, so that an adapter is one of PEFT: a fused module, such as GPT-2's
``c_attn``, has one matrix A for all weights of ours that it stores.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import ParamSpec
from realhf.arch.families import FAMILIES
from realhf.arch.param_specs import param_specs

PRODUCTS = (
    ("q_a",),
    ("wq", "wk", "wv", "wg"),
    tuple(f"delta.{part}" for part in "qkvzba"),
    ("kv_a",),
    ("wkv",),
    ("wo",),
    ("gate", "up"),
    ("down",),
    ("experts.up",),
    ("experts.down",),
)
"""The weights of a block that can have adapters; those of a line are one product."""
EXPERT_MODULES = {"experts.up": "mlp.experts.gate_up_proj", "experts.down": "mlp.experts.down_proj"}
"""Parameters of all experts, as transformers holds them for every routed family."""
UNADAPTED = {"gpt_oss": tuple(EXPERT_MODULES)}
"""By family: parameters that it stores as ``[E, in, out]``, which PEFT takes for ``[E, out, in]``."""
DENSE_MLP = ("gate", "up", "down")
"""Of a routed model, these have no adapters: PEFT takes their modules' names for those of experts."""


@dataclass(frozen=True)
class LoraModule:
    """A Hugging Face module with an adapter. ``weights`` are our weights that it stores; they share the matrix A.

    Adapters of experts have the path of the parameter of all experts, ``model.layers.0.mlp.experts.down_proj``. A rank
    of ``rank_factor`` times that of the options belongs to a fused one, as in PEFT.
    """

    path: str
    weights: tuple[str, ...]
    rank_factor: int = 1

    @property
    def name(self) -> str:
        """The last part of the path, which options and PEFT's files name."""
        return self.path.rpartition(".")[2]

    @property
    def is_of_experts(self) -> bool:
        return ".experts." in self.path

    @property
    def a(self) -> str:
        return a_name(self.weights[0])


def a_name(weight: str) -> str:
    return f"{weight}.lora_a"


def b_name(weight: str) -> str:
    return f"{weight}.lora_b"


def other_half(name: str) -> str:
    """Return the matrix B of a matrix A, and the reverse."""
    weight, _, half = name.rpartition(".")
    return b_name(weight) if half == "lora_a" else a_name(weight)


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_a", ".lora_b"))


@lru_cache(maxsize=256)
def lora_modules(config: ModelConfig) -> tuple[LoraModule, ...]:
    """Return the modules that have adapters; ValueError for a target that the model lacks."""
    if config.lora is None or not config.lora.rank:
        return ()
    modules = tuple(_modules(config))
    names, targets = {module.name for module in modules}, config.lora.targets
    if unknown := [target for target in targets if target not in names]:
        raise ValueError(f"lora.targets={unknown[0]} is no module of a {config.family} model, which has "
                         f"{', '.join(sorted(names))}")  # fmt: skip
    chosen = tuple(module for module in modules if not targets or module.name in targets)
    if config.lora.dropout and (expert := next((module for module in chosen if module.is_of_experts), None)):
        others = ",".join(sorted({module.name for module in modules if not module.is_of_experts}))
        raise ValueError(f"lora.dropout={config.lora.dropout}: routed experts ({expert.name}) have none, as in peft; "
                         f"set lora.targets=[{others}]")  # fmt: skip
    return chosen


def _modules(config: ModelConfig) -> Iterator[LoraModule]:
    stored = FAMILIES[config.family].hf_tensors(config)
    without = (*UNADAPTED.get(config.family, ()), *(DENSE_MLP if config.n_experts else ()))
    for layer in range(config.n_layers):
        for product in PRODUCTS:
            by_path: dict[str, list[str]] = {}
            for name in product:
                weight = f"layers.{layer}.{name}"
                if weight in stored and name not in without:
                    path = stored[weight][0].name.removesuffix(".weight")
                    if product[0] in EXPERT_MODULES:
                        path = f"{path.rpartition('.experts.')[0].rpartition('.')[0]}.{EXPERT_MODULES[product[0]]}"
                    by_path.setdefault(path, []).append(weight)
            for path, weights in by_path.items():
                yield LoraModule(path, tuple(weights), 2 if product[0] == "experts.up" else 1)


@lru_cache(maxsize=256)
def adapter_of(config: ModelConfig) -> dict[str, LoraModule]:
    """Return the module of every weight that has an adapter."""
    return {weight: module for module in lora_modules(config) for weight in module.weights}


@lru_cache(maxsize=256)
def own_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the parameters that a role owns: that it trains, moves and saves.

    Without LoRA these are all. With it they are a scalar head and the adapters, ``{weight}.lora_a`` ``[rank, in]`` and
    ``{weight}.lora_b`` ``[out, rank]``; of experts ``[E, rank, in]`` and ``[E, out, rank]`` or ``[E, 2, wide, rank]``.
    A matrix A is sharded if the weight's columns are, B if its rows are. Adapters of one product are adjacent.
    """
    if config.lora is None:
        return param_specs(config)
    if not config.lora.rank:
        return ()
    specs, modules = {spec.name: spec for spec in param_specs(config)}, adapter_of(config)
    own: list[ParamSpec] = []
    for layer in range(config.n_layers):
        for product in PRODUCTS:
            weights = [name for part in product if (name := f"layers.{layer}.{part}") in modules]
            firsts = dict.fromkeys(modules[weight].weights[0] for weight in weights)
            rank = config.lora.rank * (modules[weights[0]].rank_factor if weights else 1)
            own += [_a_spec(specs[weight], rank) for weight in firsts]
            own += [_b_spec(specs[weight], rank) for weight in weights]
    return (*own, *(specs[name] for name in _trained_heads(config)))


def _a_spec(weight: ParamSpec, rank: int) -> ParamSpec:
    has_experts, is_sharded = len(weight.shape) > 2, weight.tp_dim == len(weight.shape) - 1
    shape = (*weight.shape[: int(has_experts)], rank, weight.shape[-1])
    at, units = (len(shape) - 1, weight.tp_units) if is_sharded else (None, 0)
    return replace(weight, name=a_name(weight.name), shape=shape, tp_dim=at, tp_units=units)


def _b_spec(weight: ParamSpec, rank: int) -> ParamSpec:
    is_sharded = weight.tp_dim is not None and weight.tp_dim < len(weight.shape) - 1
    at, units = (weight.tp_dim, weight.tp_units) if is_sharded else (None, 0)
    return replace(weight, name=b_name(weight.name), shape=(*weight.shape[:-1], rank), tp_dim=at, tp_units=units)


@lru_cache(maxsize=256)
def base_specs(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Return the frozen parameters, which adapters add to; none without LoRA."""
    heads = _trained_heads(config)
    return () if config.lora is None else tuple(spec for spec in param_specs(config) if spec.name not in heads)


def _trained_heads(config: ModelConfig) -> tuple[str, ...]:
    """A scalar head is trained as a whole: it is new, or as small as an adapter."""
    return ("head.weight",) if config.lora and config.lora.rank and config.head == "scalar" else ()
