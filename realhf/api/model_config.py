"""The architecture of a decoder-only transformer of any family."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a model."""

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
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to the weight of an RMS norm
    post_norms: bool = False  # normalise the outputs of attention and MLP too
    qk_norm: bool = False  # normalise queries and keys per head
    mlp: str = "gated"  # gated | ungated
    activation: str = "silu"  # silu | gelu_tanh | gelu
    parallel_residual: bool = False  # attention and MLP have the same input
    rotary_base: float = 10000.0
    rotary_scaling: tuple[tuple[str, float], ...] = ()  # parameters of linear or llama3 scaling
    rotary_dims: int = 0  # rotated dimensions of a head, 0: all
    learned_positions: bool = False
    scaled_embedding: bool = False  # multiply embeddings by sqrt(hidden)
    sliding_windows: tuple[int, ...] = ()  # attention window per layer, including the token itself (0: none)
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # c * tanh(scores / c), 0: none
    logit_softcap: float = 0.0
    qkv_bias: bool = False
    proj_bias: bool = False
    tied_embedding: bool = False
    n_experts: int = 0  # routed experts per MoE layer, 0: no MoE
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model with a dense MLP
    renormalise_experts: bool = True  # scale the weights of a token's experts to sum to one
    balance_loss: float = 0.0  # coefficient of the router's load-balancing loss
    z_loss: float = 0.0  # coefficient of the router's z-loss
    init_std: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(i for i in range(self.n_layers) if i not in self.dense_layers) if self.n_experts else ()

    def window(self, layer: int) -> int:
        return self.sliding_windows[layer] if self.sliding_windows else 0

    @property
    def is_fusable(self) -> bool:
        """Whether the compiled decode kernel supports the model: no experts, and sizes divisible by 16."""
        return not self.n_experts and not any(n % 16 for n in (self.hidden, self.head_dim, self.intermediate))
