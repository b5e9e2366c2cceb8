"""Checks of sampling options."""

from realhf.api.config import GenerationConfig


def sampling_problems(name: str, gen: GenerationConfig) -> list[str]:
    """Return one line per invalid option of ``gen``, whose option group is ``name``."""
    checks = [
        (gen.max_new_tokens >= 1, f"{name}.max_new_tokens must be positive, got {gen.max_new_tokens}"),
        (0 <= gen.min_new_tokens <= gen.max_new_tokens,
         f"{name}.min_new_tokens must be between 0 and max_new_tokens={gen.max_new_tokens}, got {gen.min_new_tokens}"),
        (0 < gen.top_p <= 1, f"{name}.top_p must be in (0, 1], got {gen.top_p}"),
        (gen.top_k >= 0, f"{name}.top_k must be 0 (all) or positive, got {gen.top_k}"),
        (gen.temperature >= 0, f"{name}.temperature must not be negative, got {gen.temperature}"),
        (gen.n >= 1, f"{name}.n must be positive, got {gen.n}"),
        (gen.max_num_seqs >= 1, f"{name}.max_num_seqs must be positive, got {gen.max_num_seqs}"),
    ]  # fmt: skip
    return [line for holds, line in checks if not holds]
