"""Options of sampling."""

from dataclasses import dataclass, replace

from realhf.api.config.choices import CacheType, WeightType
from realhf.api.config.option import COUNT, NATURAL, NON_NEGATIVE, PROBABILITY, opt


@dataclass
class GenerationConfig:
    n: int = opt(1, "number of responses per prompt (gen only; PPO uses group_size)", COUNT)
    max_new_tokens: int = opt(256, "maximum response length in tokens, including the stop token", COUNT)
    min_new_tokens: int = opt(0, "minimum number of tokens before a stop token may be sampled", NATURAL)
    greedy: bool = opt(False, "greedy decoding")
    top_p: float = opt(1.0, "probability mass of nucleus sampling", PROBABILITY)
    top_k: int = opt(0, "sample from the k most likely tokens, 0 for all", NATURAL)
    temperature: float = opt(1.0, "sampling temperature, 0 for greedy decoding", NON_NEGATIVE)
    stop_token_ids: list[int] = opt(list, "token ids that end a response, besides the EOS token", NATURAL)
    prompt_lookup_num_tokens: int = opt(
        0,
        "maximum number of tokens proposed from a row's own text per step, 0 for none; on CPUs, for few rows",
        NATURAL,
    )
    weight_dtype: WeightType = opt(
        WeightType.auto,
        "on CPUs, the type of attention and MLP matrices in decoding: bfloat16, int8 with a scale per output, or auto, "
        "that of the model; log-probs are those of the model that samples: set ppo.recompute_logprobs=True",
    )
    kv_cache_dtype: CacheType = opt(
        CacheType.auto,
        "on CPUs, the type of cached keys and values: bfloat16, or auto, that of the model; see weight_dtype",
    )
    keep_first: int | None = opt(
        None,
        "responses per prompt that are kept: those that end first; the others are cancelled (default: all); favours "
        "short responses",
        COUNT,
    )
    max_num_seqs: int = opt(256, "maximum number of sequences decoded at a time (continuous batching)", COUNT)

    @property
    def has_bf16_cache(self) -> bool:
        return self.kv_cache_dtype is CacheType.bfloat16

    @property
    def is_rounded(self) -> bool:
        """The model that samples is another one than the trained one, by an option of its types."""
        return self.weight_dtype is not WeightType.auto or self.has_bf16_cache

    def without_rounding(self) -> "GenerationConfig":
        return replace(self, weight_dtype=WeightType.auto, kv_cache_dtype=CacheType.auto)


@dataclass
class EvaluationConfig:
    """Sampling on held-out prompts; lengths and stop tokens are those of ppo.gen."""

    n: int = opt(1, "number of responses per held-out prompt", COUNT)
    greedy: bool = opt(True, "greedy decoding")
    top_p: float = opt(1.0, "probability mass of nucleus sampling", PROBABILITY)
    top_k: int = opt(0, "sample from the k most likely tokens, 0 for all", NATURAL)
    temperature: float = opt(1.0, "sampling temperature, 0 for greedy decoding", NON_NEGATIVE)
