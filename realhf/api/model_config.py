"""The architecture of one decoder-only transformer of any family. Sizes only: weights are in models/."""

from dataclasses import dataclass, replace
from typing import Any

LENGTH_SCALINGS = ("longrope", "dynamic")
"""Rotary scaling that depends on the length of a row."""
KERNEL_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""The activations that the compiled kernels compute, in their numbering."""
CLAMPED_SWIGLU = "clamped_swiglu"
"""The activation of gpt-oss, which is always gated: both inputs are limited, and one is added to the second."""


@dataclass(frozen=True)
class Lora:
    """Adapters of a frozen model: its weights W act as W + alpha / rank * B @ A (LoRA, arXiv 2106.09685, section 4.1).

    ``targets`` are names of modules of the Hugging Face model (``q_proj``); empty: all products of the blocks, but
    not the router. Rank 0 stands for the frozen model alone. ``dropout`` is the share of the adapters' inputs that are
    zero in training. ``bits`` is the size of the frozen model's integer weights, 0 for weights that are not quantized;
    ``group_size`` adjacent ones of a row share a scale.
    """

    rank: int
    alpha: float = 1.0
    targets: tuple[str, ...] = ()
    bits: int = 0
    group_size: int = 0
    dropout: float = 0.0

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Latent:
    """Keys and values are products of one vector per token, ``kv_rank`` wide (DeepSeek-V2, arXiv 2405.04434).

    A head of queries and keys has ``head_dim`` dimensions, of which the first ``rotary_dims`` are rotated and, in keys,
    shared by all heads; one of values has ``value_dim``. Queries are products of a vector of ``q_rank``, 0: of tokens.
    """

    kv_rank: int
    value_dim: int
    q_rank: int = 0


@dataclass(frozen=True)
class GatedDelta:
    """Attention with a state per head instead of cached keys and values: the gated delta rule (arXiv 2412.06464).

    Each of ``key_heads`` heads of queries and keys belongs to ``value_heads / key_heads`` adjacent heads of values.
    They have ``key_dim`` and ``value_dim`` dimensions. A causal convolution of ``kernel`` tokens precedes the rule.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        """The width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state_numel(self) -> int:
        """Elements of the recurrent states of a row in one block, float32."""
        return self.values * self.key_dim

    @property
    def tail_numel(self) -> int:
        """Elements of the last inputs of the convolution of a row in one block."""
        return (self.kernel - 1) * (2 * self.keys + self.values)

    def slot_bytes(self, itemsize: int) -> int:
        """Return the bytes of both; inputs are in the type of the model, which has ``itemsize``."""
        return 4 * self.state_numel + itemsize * self.tail_numel


@dataclass(frozen=True)
class ModelConfig:
    family: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    head: str = "lm"  # lm (vocabulary logits) | scalar (critic, reward)
    norm: str = "rms"  # rms | layer
    norm_bias: bool = True  # of layer norms
    shared_norm: bool = False  # attention and MLP read the output of one norm
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to the weight of an RMS norm
    norm_placement: str = "pre"  # pre | post | sandwich: norms on the inputs of attention and MLP, the outputs, or both
    qk_norm: str = "none"  # none | head | full: queries and keys are normalised per head or over the whole projection
    mlp: str = "gated"  # gated | ungated
    activation: str = "silu"  # a name of ``ops/activations.ACTIVATIONS``
    parallel_residual: bool = False  # attention and MLP read the same hidden states
    rotary_base: float = 10000.0
    rotary_scaling: tuple[tuple[str, Any], ...] = ()  # parameters by their names in transformers; empty: none
    rotary_length: int = 0  # row length that LongRoPE and dynamic scaling assume for all rows, 0: one without effect
    rotary_dims: int = 0  # leading dimensions of a head that are rotated, 0: all
    windowed_rotary_base: float = 0.0  # of layers with a sliding window, without scaling; 0: as in other layers
    unrotated_layers: tuple[int, ...] = ()  # blocks whose queries and keys are not rotated
    query_growth: tuple[float, int] = (0.0, 0)  # (b, n): queries at position p are scaled by 1 + b * ln(1 + p // n)
    learned_positions: bool = False
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(hidden)
    embedding_scale: float = 1.0  # they are multiplied by this too
    residual_scale: float = 1.0  # outputs of attention and MLP are multiplied by this before the residual addition
    logit_scale: float = 1.0
    sliding_windows: tuple[int, ...] = ()  # window of each layer in tokens, including its own (0: all); empty: all
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # c * tanh(scores / c), 0: none
    logit_softcap: float = 0.0
    latent: Latent | None = None  # latent attention, with as many key as query heads
    attention_gate: bool = False  # outputs of heads are multiplied by the sigmoid of one more product with the token
    delta: GatedDelta | None = None  # what ``delta_layers`` have instead of attention
    delta_layers: tuple[int, ...] = ()
    attention_sinks: bool = False  # every head has the score of one more key, without a value
    qkv_bias: bool = False
    proj_bias: bool = False  # of the output projection of attention
    mlp_bias: bool = False
    tied_embedding: bool = False
    n_experts: int = 0  # routed experts that replace the MLP, 0: none
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()  # blocks of a routed model that keep an MLP of size ``intermediate``
    expert_bias: bool = False  # of the router and of the experts
    expert_scores: str = "softmax"  # softmax | sigmoid of the router's products
    choice_bias: bool = False  # a bias of every expert's score, which only its choice depends on
    expert_groups: tuple[int, int] = (1, 1)  # groups of adjacent experts, and of how many a token may choose experts
    renormalise_experts: bool = True  # the expert weights of a token sum to one
    expert_scale: float = 1.0  # the expert weights are multiplied by this
    shared_intermediate: int = 0  # width of an MLP beside the routed experts, for all tokens
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a product with the token
    balance_loss: float = 0.0  # coefficient of the router's load-balancing loss in training
    z_loss: float = 0.0  # coefficient of its squared log-partition function
    init_std: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    padding_row: int | None = None  # row of the embedding that gets no gradient from inputs
    lora: Lora | None = None  # adapters; None: all weights may be trained

    @property
    def pre_norms(self) -> bool:
        """The inputs of attention and MLP are normalised."""
        return self.norm_placement != "post"

    @property
    def post_norms(self) -> bool:
        """The outputs of attention and MLP are normalised before the residual addition."""
        return self.norm_placement != "pre"

    @property
    def routed_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.n_layers) if i not in self.dense_layers) if self.n_experts else ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The blocks with attention, and so with a KV cache."""
        return tuple(i for i in range(self.n_layers) if i not in self.delta_layers)

    def rotary(self, layer: int) -> tuple[float, tuple[tuple[str, Any], ...]] | None:
        """Return base and scaling of a block's rotary embeddings; None for a block without them."""
        if self.learned_positions or layer in self.unrotated_layers:
            return None
        if self.windowed_rotary_base and self.sliding_window(layer):
            return self.windowed_rotary_base, ()
        return self.rotary_base, self.rotary_scaling

    def sliding_window(self, layer: int) -> int:
        """Return the attention window of a block in tokens, including the query's own; 0: all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def cache_numel(self) -> int:
        """Elements per token and block of the KV cache."""
        if self.latent is not None:
            return self.latent.kv_rank + self.rotary_dims
        return 2 * self.n_kv_heads * self.head_dim

    @property
    def attention_numel(self) -> int:
        """Weights of the products of an attention."""
        out = self.n_heads * self.value_dim * self.hidden
        if self.latent is None:
            n_queries = self.n_heads * (2 if self.attention_gate else 1)
            return self.hidden * self.head_dim * (n_queries + 2 * self.n_kv_heads) + out
        kv_rank, q_rank = self.latent.kv_rank, self.latent.q_rank
        queries = self.n_heads * self.head_dim * (q_rank or self.hidden) + q_rank * self.hidden
        of_values = self.head_dim - self.rotary_dims + self.latent.value_dim
        return queries + (kv_rank + self.rotary_dims) * self.hidden + self.n_heads * of_values * kv_rank + out

    @property
    def delta_numel(self) -> int:
        """Weights of the products of a block with the gated delta rule."""
        if self.delta is None:
            return 0
        return self.hidden * (2 * self.delta.keys + 3 * self.delta.values + 2 * self.delta.value_heads)

    @property
    def max_row_len(self) -> int:
        """Return the length of the longest row, which ``rotary_length`` sets if rotary scaling depends on it."""
        if self.rotary_length:
            return self.rotary_length
        scaling = dict(self.rotary_scaling)
        is_long = scaling.get("rope_type") == "longrope"
        return min(self.max_positions, scaling["original_max_position_embeddings"]) if is_long else self.max_positions

    @property
    def has_length_scaling(self) -> bool:
        """Rotary embeddings depend on the length of a row."""
        return dict(self.rotary_scaling).get("rope_type") in LENGTH_SCALINGS

    def with_fixed_rotary(self) -> "ModelConfig":
        """Return the model with the rotary embeddings of rows of ``max_row_len`` tokens for rows of any length.

        So log-probabilities of generation, whose cached keys stay, and of training agree. Transformers has those of the
        longest row of a batch.
        """
        scaling, longest = dict(self.rotary_scaling), self.max_row_len
        match scaling.get("rope_type"):
            case "longrope":  # arXiv 2402.13753
                is_long = longest > scaling["original_max_position_embeddings"]
                factors = scaling["long_factor" if is_long else "short_factor"]
                scaling |= {"short_factor": factors, "long_factor": factors}
                return replace(self, rotary_scaling=tuple(scaling.items()))
            case "dynamic":  # arXiv 2309.00071, section 3.3: the lowest frequency is divided by ``growth``
                dims, factor, positions = self.rotary_dims or self.head_dim, scaling["factor"], self.max_positions
                growth = factor * max(longest / positions, 1) - (factor - 1)
                base = self.rotary_base * growth ** (dims / (dims - 2))
                return replace(self, rotary_base=base, rotary_scaling=(), max_positions=max(longest, positions))
        return self
