"""Checks of sampling options, and of options that must be positive."""

from realhf.api.config import GenerationConfig


def positive_problems(prefix: str, options: object, *names: str) -> list[str]:
    """Return one line per option of ``names`` that is set and not positive."""
    values = {name: vars(options)[name] for name in names}
    return [f"{prefix}{k} must be positive, got {v}" for k, v in values.items() if v is not None and v <= 0]


def sampling_problems(name: str, gen: GenerationConfig) -> list[str]:
    """Return one line per invalid option of ``gen``, whose option group is ``name``."""
    checks = [
        (0 <= gen.min_new_tokens <= gen.max_new_tokens,
         f"{name}.min_new_tokens must be between 0 and max_new_tokens={gen.max_new_tokens}, got {gen.min_new_tokens}"),
        (0 < gen.top_p <= 1, f"{name}.top_p must be in (0, 1], got {gen.top_p}"),
        (gen.top_k >= 0, f"{name}.top_k must be 0 (all) or positive, got {gen.top_k}"),
        (gen.temperature >= 0, f"{name}.temperature must not be negative, got {gen.temperature}"),
    ]  # fmt: skip
    problems = positive_problems(f"{name}.", gen, "max_new_tokens", "n", "max_num_seqs")
    return problems + [line for holds, line in checks if not holds]
