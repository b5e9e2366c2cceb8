"""The weights of a stage as its blocks take them: fused products, adapters beside their weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from realhf.api.model_config import ModelConfig
from realhf.api.param_box import box_shape
from realhf.arch.lora import adapter_of, b_name
from realhf.models.attention.delta_mixer import DeltaMixer
from realhf.models.attention.latent_attention import LatentProducts
from realhf.models.attention.norm_weights import Norm
from realhf.models.blocks import Attention, Block, Experts, LinearAttention, Mlp
from realhf.models.flat_params import FlatParams
from realhf.models.fused.fused_blocks import FusedBlocks
from realhf.models.low_rank import LowRank, column_keys, stacked
from realhf.models.quantized_matrix import Matrix
from realhf.models.quantized_params import QuantizedParams
from realhf.models.routed_mlps import RoutedMlps


@dataclass(frozen=True)
class StageWeights:
    """The weights of a stage; ``fused`` are its blocks for a kernel that decodes all of them, if it can."""

    embed: Tensor | None
    positions: Tensor | None
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    head: Tensor | None
    fused: FusedBlocks | None = None


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
        if weight is None:
            return None
        config = self.config
        return Norm(weight, bias, config.norm_eps, config.norm_offset, config.norm == "layer")

    def adapter(self, *names: str) -> LowRank | None:
        """Return the adapter of the product with these weights, None without one."""
        modules = {name: module for name in names if (module := adapter_of(self.config).get(name))}
        if not modules or self.config.lora is None:
            return None
        firsts = dict.fromkeys(module.a for module in modules.values())
        leaf, n_rows = lambda name: self.params.leaf(b_name(name)), lambda name: box_shape(self.base.box(name))[0]
        bs: list[Tensor | int] = [leaf(name) if name in modules else n_rows(name) for name in names]
        columns = None
        if self.config.lora.dropout:
            name = next(iter(firsts))
            columns = column_keys(name, *self.params.box(name)[-1], self.params.data.device)
        numbers = {first: number for number, first in enumerate(firsts)}
        shared = [numbers[modules[name].a] if name in modules else 0 for name in names]
        return stacked(self.params.leaf(*firsts), bs, shared, self.config.lora.scaling, columns)

    def stage(self, layers: Sequence[int], is_first: bool, head: str) -> StageWeights:
        """Return the weights of a stage with these layers and the ``head`` of this name, empty for none."""
        return StageWeights(
            embed=self.optional("embed.weight") if is_first else None,
            positions=self.optional("embed.positions"),
            blocks=tuple(self.block(f"layers.{layer}.") for layer in layers),
            final_norm=self.norm("final_norm"),
            head=self.leaf(head) if head else None,
        )

    def block(self, prefix: str) -> Block:
        norm = lambda name: self.norm(prefix + name)
        is_linear = f"{prefix}delta.norm" in self.base.names
        attention = self._linear_attention(prefix) if is_linear else self._attention(prefix)
        pre_norm = attention.norm if self.config.shared_norm else norm("mlp_norm")
        if f"{prefix}router" in self.base.names:
            return Block(attention, self._experts(prefix, pre_norm, norm("mlp_post_norm")))
        return Block(attention, self._mlp(prefix, pre_norm, norm("mlp_post_norm")))

    def _attention(self, prefix: str) -> Attention:
        matrix = lambda *names: self.matrix(*(prefix + name for name in names))
        optional = lambda *names: self.optional(*(prefix + name for name in names))
        adapter = lambda *names: self.adapter(*(prefix + name for name in names))
        norm = lambda name: self.norm(prefix + name)
        parts = "qkvg" if self.config.attention_gate else "qkv"
        products = tuple(f"w{part}" for part in parts)
        return Attention(
            norm=norm("attn_norm"),
            wqkv=None if self.config.latent else matrix(*products),
            bqkv=optional(*(f"b{part}" for part in parts)),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            wo=matrix("wo"),
            bo=optional("bo"),
            post_norm=norm("attn_post_norm"),
            qkv_adapter=None if self.config.latent else adapter(*products),
            o_adapter=adapter("wo"),
            sinks=optional("sinks"),
            latent=self._latent(prefix) if self.config.latent else None,
        )

    def _linear_attention(self, prefix: str) -> LinearAttention:
        names = tuple(f"{prefix}delta.{part}" for part in "qkvzba")
        mixer = DeltaMixer(
            self.matrix(*names),
            self.leaf(*(f"{prefix}delta.conv_{part}" for part in "qkv")),
            self.leaf(f"{prefix}delta.a_log"),
            self.leaf(f"{prefix}delta.dt_bias"),
            self.leaf(f"{prefix}delta.norm"),
            self.adapter(*names),
        )
        norm, post_norm, wo = self.norm(f"{prefix}attn_norm"), self.norm(f"{prefix}attn_post_norm"), f"{prefix}wo"
        return LinearAttention(norm, mixer, self.matrix(wo), post_norm, self.adapter(wo))

    def _mlp(self, prefix: str, norm: Norm | None, post_norm: Norm | None) -> Mlp:
        matrix = lambda *names: self.matrix(*(prefix + name for name in names))
        optional = lambda *names: self.optional(*(prefix + name for name in names))
        adapter = lambda *names: self.adapter(*(prefix + name for name in names))
        parts = ("gate", "up") if self.config.mlp == "gated" else ("up",)
        bias, b_down = optional(*(f"b_{part}" for part in parts)), optional("b_down")
        adapters = adapter(*parts), adapter("down")
        return Mlp(norm, matrix(*parts), bias, matrix("down"), b_down, post_norm, *adapters)

    def _latent(self, prefix: str) -> LatentProducts:
        leaf, optional = lambda name: self.leaf(prefix + name), lambda name: self.optional(prefix + name)
        adapter = lambda name: self.adapter(prefix + name)
        return LatentProducts(
            wq=leaf("wq"),
            kv_a=leaf("kv_a"),
            kv_norm=leaf("kv_a_norm.weight"),
            wkv=leaf("wkv"),
            q_a=optional("q_a"),
            q_norm=optional("q_a_norm.weight"),
            b_q_a=optional("b_q_a"),
            b_kv_a=optional("b_kv_a"),
            q_adapter=adapter("wq"),
            q_a_adapter=adapter("q_a"),
            kv_a_adapter=adapter("kv_a"),
            kv_adapter=adapter("wkv"),
        )

    def _experts(self, prefix: str, norm: Norm | None, post_norm: Norm | None) -> Experts:
        optional = lambda name: self.optional(prefix + name)
        shared = None
        if self.config.shared_intermediate:
            up, down = self.matrix(f"{prefix}shared.gate", f"{prefix}shared.up"), self.matrix(f"{prefix}shared.down")
            shared = Mlp(None, up, None, down, None, None)
        return Experts(
            norm=norm,
            router=self.leaf(f"{prefix}router"),
            mlps=self._routed_mlps(f"{prefix}experts."),
            post_norm=post_norm,
            choice_bias=optional("choice_bias"),
            shared=shared,
            shared_gate=optional("shared_gate"),
            b_router=optional("b_router"),
        )

    def _routed_mlps(self, prefix: str) -> RoutedMlps:
        b_down = f"{prefix}b_down"
        return RoutedMlps(
            up=self.leaf(f"{prefix}up"),
            down=self.leaf(f"{prefix}down"),
            up_adapter=self.adapter(f"{prefix}up"),
            down_adapter=self.adapter(f"{prefix}down"),
            b_up=self.optional(f"{prefix}b_up"),
            b_down=self.optional(b_down),
            first_column=self.base.box(b_down)[1][0] if b_down in self.base.names else 0,
        )


def count_heads(config: ModelConfig, base: FlatParams, layers: Sequence[int], tp: int) -> tuple[int, int, int]:
    """Return a shard's query and key/value heads, and how many of ``tp`` ranks hold the latter."""
    first = next((layer for layer in layers if layer not in config.delta_layers), None)
    if first is None:
        return 0, 0, 1
    wq, wk = (f"layers.{first}.{name}" for name in ("wq", "wq" if config.latent else "wk"))
    n_q, n_kv = (box_shape(base.box(name))[0] // config.head_dim for name in (wq, wk))
    return n_q, n_kv, base.n_holders(wk, tp)
