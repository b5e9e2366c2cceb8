"""The architecture of one decoder-only transformer, whatever its family. Sizes only: weights live in models/."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a model. ``head`` is ``lm`` (vocabulary logits) or ``scalar`` (critic, reward)."""

    family: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    head: str = "lm"
    norm: str = "rms"  # rms | layer
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # what is added to the weight of an RMS norm
    post_norms: bool = False  # what attention and MLP return is normalised too
    qk_norm: bool = False  # queries and keys are normalised in each head
    mlp: str = "gated"  # gated | ungated
    activation: str = "silu"  # silu | gelu_tanh | gelu
    parallel_residual: bool = False  # the MLP reads what attention reads
    rotary_base: float = 10000.0
    rotary_scaling: tuple[tuple[str, float], ...] = ()  # parameters of linear or llama3 scaling
    rotary_dims: int = 0  # how many dimensions of a head turn with the position, 0: all
    learned_positions: bool = False
    scaled_embedding: bool = False  # embeddings are multiplied by the root of ``hidden``
    sliding_windows: tuple[int, ...] = ()  # tokens that each layer sees, its own included (0: all); empty: all
    attention_scale: float = 0.0  # 0: one over the root of ``head_dim``
    attention_softcap: float = 0.0  # c * tanh(scores / c), 0: none
    logit_softcap: float = 0.0
    qkv_bias: bool = False
    proj_bias: bool = False
    tied_embedding: bool = False
    n_experts: int = 0  # routed experts in place of the MLP, 0: none
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()  # blocks that have an MLP of ``intermediate`` in spite of that
    renormalise_experts: bool = True  # the weights of a token's experts add up to one
    balance_loss: float = 0.0  # coefficient of the router's load-balancing loss in training
    z_loss: float = 0.0  # coefficient of its squared log-partition function
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
        """Blocks with routed experts."""
        return tuple(i for i in range(self.n_layers) if i not in self.dense_layers) if self.n_experts else ()

    def window(self, layer: int) -> int:
        """Return how many tokens a block looks back on, itself included; 0: all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    @property
    def is_fusable(self) -> bool:
        """Tell whether a compiled call takes its blocks: dense ones, of sizes that are multiples of 16."""
        return not self.n_experts and not any(n % 16 for n in (self.hidden, self.head_dim, self.intermediate))
