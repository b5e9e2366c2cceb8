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
    mlp: str = "gated"  # gated | plain
    activation: str = "silu"  # silu | gelu_tanh | gelu
    rotary_base: float = 10000.0
    rotary_scaling: tuple[tuple[str, float], ...] = ()  # llama3 scaling parameters, empty when plain
    learned_positions: bool = False
    qkv_bias: bool = False
    proj_bias: bool = False
    tied_embedding: bool = False
    init_std: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.n_kv_heads
