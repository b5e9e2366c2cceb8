"""The weights of a stage as its blocks take them: fused products, adapters beside their weights."""

from dataclasses import dataclass

from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_shape
from realhf.arch.lora import adapter_of, b_name
from realhf.models.blocks import Attention, Block, Experts, Mlp, Norm
from realhf.models.flat_params import FlatParams
from realhf.models.low_rank import LowRank, column_keys, stacked
from realhf.models.quantized_matrix import Matrix
from realhf.models.quantized_params import QuantizedParams


@dataclass(frozen=True)
class BoundWeights:
    """Views of ``params``, or where they lack a name of the frozen ``base`` (the same one without LoRA)."""

    config: ModelConfig
    params: FlatParams
    base: FlatParams

    def leaf(self, *names: str) -> Tensor:
        return (self.params if names[0] in self.params.names else self.base).leaf(*names)

    def matrix(self, *names: str) -> Matrix:
        """Return the weights of one product, which may be quantized."""
        if isinstance(self.base, QuantizedParams) and self.base.is_quantized(names[0]):
            return self.base.matrix(*names)
        return self.leaf(*names)

    def optional(self, *names: str) -> Tensor | None:
        return self.leaf(*names) if names[0] in self.params.names or names[0] in self.base.names else None

    def norm(self, name: str) -> Norm | None:
        weight, bias = (self.optional(f"{name}.{part}") for part in ("weight", "bias"))
        return None if weight is None else Norm(weight, bias, self.config.norm_eps, self.config.norm_offset)

    def adapter(self, *names: str) -> LowRank | None:
        """Return the adapter of the product with these weights, None without one."""
        modules = {name: module for name in names if (module := adapter_of(self.config).get(name))}
        if not modules or self.config.lora is None:
            return None
        firsts = dict.fromkeys(module.a for module in modules.values())
        bs: list[Tensor | int] = []
        for name in names:
            b = self.params.leaf(b_name(name)) if name in modules else box_shape(self.base.box(name))[0]
            bs.append(b.flatten(1, 2) if isinstance(b, Tensor) and b.dim() == 4 else b)  # gate and up of an expert
        columns = None
        if self.config.lora.dropout:
            name = next(iter(firsts))
            columns = column_keys(name, *self.params.box(name)[-1], self.params.data.device)
        return stacked(self.params.leaf(*firsts), bs, len(firsts) < len(modules), self.config.lora.scaling, columns)

    def block(self, prefix: str) -> Block:
        matrix = lambda *names: self.matrix(*(prefix + name for name in names))
        optional = lambda *names: self.optional(*(prefix + name for name in names))
        adapter = lambda *names: self.adapter(*(prefix + name for name in names))
        norm = lambda name: self.norm(prefix + name)
        attention = Attention(
            norm=norm("attn_norm"),
            wqkv=matrix("wq", "wk", "wv"),
            bqkv=optional("bq", "bk", "bv"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            wo=matrix("wo"),
            bo=optional("bo"),
            post_norm=norm("attn_post_norm"),
            qkv_adapter=adapter("wq", "wk", "wv"),
            o_adapter=adapter("wo"),
        )
        pre_norm, post_norm = norm("mlp_norm"), norm("mlp_post_norm")
        router = optional("router")
        if router is not None:
            up, down = (self.leaf(f"{prefix}experts.{name}") for name in ("up", "down"))
            adapters = adapter("experts.up"), adapter("experts.down")
            return Block(attention, Experts(pre_norm, router, up, down, post_norm, *adapters))
        parts = ("gate", "up") if self.config.mlp == "gated" else ("up",)
        bias, b_down = optional(*(f"b_{part}" for part in parts)), optional("b_down")
        adapters = adapter(*parts), adapter("down")
        return Block(attention, Mlp(pre_norm, matrix(*parts), bias, matrix("down"), b_down, post_norm, *adapters))
