"""Checks of options, one line per problem."""

from collections.abc import Sequence

from realhf.api.config import GenerationConfig


def unmet(checks: Sequence[tuple[object, str]]) -> list[str]:
    """Return the messages of the conditions that do not hold."""
    return [message for holds, message in checks if not holds]


def positive_problems(prefix: str, options: object, *names: str) -> list[str]:
    """Return the options of ``names`` that are set and not positive."""
    values = {name: vars(options)[name] for name in names}
    return [f"{prefix}{k} must be positive, got {v}" for k, v in values.items() if v is not None and v <= 0]


def sampling_problems(name: str, gen: GenerationConfig) -> list[str]:
    """Return the invalid options of ``gen``, whose option group is ``name``."""
    problems = positive_problems(f"{name}.", gen, "max_new_tokens", "n", "max_num_seqs")
    return problems + unmet([
        (0 <= gen.min_new_tokens <= gen.max_new_tokens,
         f"{name}.min_new_tokens must be between 0 and max_new_tokens={gen.max_new_tokens}, got {gen.min_new_tokens}"),
        (0 < gen.top_p <= 1, f"{name}.top_p must be in (0, 1], got {gen.top_p}"),
        (gen.top_k >= 0, f"{name}.top_k must be 0 (all) or positive, got {gen.top_k}"),
        (gen.temperature >= 0, f"{name}.temperature must not be negative, got {gen.temperature}"),
    ])  # fmt: skip
