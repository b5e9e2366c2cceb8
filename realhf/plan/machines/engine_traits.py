"""What determines an engine's time on a GPU besides the GPU itself: its kernels, their fusion, and what it overlaps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineTraits:
    """Traits of an engine; the defaults are those of ``models/engine``.

    ``products`` is the speed of its matrix products relative to torch's, which ``Hardware.flops`` describes;
    ``attention`` is the speed of its attention relative to FlashAttention-2, which ``Hardware.attention_flops``
    describes. ``score_elements`` are read and written per attention score by kernels that store scores (0: they are
    not stored). ``hidden_elements``, ``head_elements`` and ``mlp_elements`` are read and written per token by the
    elementwise kernels of a block's forward pass, as multiples of the hidden size, of the width of queries, keys and
    values, and of the MLP's width; a backward pass moves ``backward_elements`` times as many. ``head_passes`` are the
    forward passes of the vocabulary head in a training pass, with those that are computed again. ``skips_prompts``
    False: the head also computes tokens whose log-probabilities are not read.
    ``decode_kernels`` are the kernels of a block in a captured decoding step. ``captures_decoding`` False: decoding
    steps are never graphs. ``has_grouped_kv`` False: keys and values are repeated for every query head. ``tp_overlap``
    is the fraction of tensor-parallel communication that a training pass hides. ``host_row`` is in seconds: between two
    captured decoding steps the device waits so long for the host, for each row. ``launches`` are the kernels of a block
    that the host launches outside of a graph in an inference pass, a training pass and a decoding step (None: as
    counted for this engine).
    """

    products: float = 1.0
    attention: float = 1.0
    score_elements: float = 0.0
    hidden_elements: float = 10.0  # two norms (one read, one write), two residual additions (two reads, one write)
    head_elements: float = 2.0  # rotary embedding, attention
    mlp_elements: float = 3.0  # gated: two reads, one write; without a gate two thirds of it
    backward_elements: float = 2.0
    head_passes: int = 2
    skips_prompts: bool = True
    decode_kernels: int = 16  # norms, projections, rotary embedding, attention and its reduction, activation, additions
    captures_decoding: bool = True
    has_grouped_kv: bool = True
    tp_overlap: float = 0.0
    host_row: float = 0.0
    launches: tuple[int, int, int] | None = None


OWN = EngineTraits()


@dataclass(frozen=True)
class MemoryTraits:
    """What determines an engine's activation memory; the defaults are those of ``models/engine``.

    Attention saves ``saved_queries`` copies of the width of queries and ``saved_keys`` of that of keys for the backward
    pass. While the loss is computed, all logits exist with ``logits_bytes`` each (0: a chunk of them). A pass without
    autograd needs ``workspace_elements`` per token, as multiples of the hidden size (0: the temporaries of a block),
    and ``score_bytes`` for each attention score of all rows.
    """

    saved_queries: int = 3  # as projected, rotated, and the output
    saved_keys: int = 3  # keys and values as projected, rotated keys
    logits_bytes: int = 0
    workspace_elements: float = 0.0
    score_bytes: int = 0


OWN_MEMORY = MemoryTraits()
