"""Options of environments for multi-turn rollouts."""

from dataclasses import dataclass
from typing import Any

from realhf.api.config.option import COUNT, FILE, FRACTION, GIGABYTES, NATURAL, SECONDS, opt

MESSAGE_TOKENS = 256
"""Tokens that a message of an environment may have by default."""


@dataclass
class EnvConfig:
    cls: str = opt("", "environment of multi-turn rollouts: my_file.py:Class or package.module:Class", FILE)
    options: dict[str, Any] = opt(dict, "arguments of the class, such as {size: 5}")
    workers: int = opt(2, "environment processes per model worker", COUNT)
    max_concurrency: int = opt(64, "concurrent calls per process of async methods", COUNT)
    tool_format: str = opt("hermes", "how the model writes tool calls: hermes (Qwen), llama3, mistral, qwen3_coder or "
                                     "pythonic")  # fmt: skip
    max_turns: int = opt(8, "maximum number of replies of the model per episode", COUNT)
    max_episode_len: int | None = opt(None, "maximum tokens of an episode (default: the prompt, max_turns replies, and "
                                            "messages of as many tokens, at least 256 each)", COUNT)  # fmt: skip
    max_episodes: int | None = opt(None, "open episodes per model replica (default: 2 * max_num_seqs)", COUNT)
    partial_tokens: int | None = opt(None, "partial rollout: tokens that an episode samples per step; it goes on in "
                                           "the next step with newer weights", COUNT)  # fmt: skip
    timeout: float = opt(30.0, "timeout of reset, step and close in seconds", SECONDS)
    memory_gb: float = opt(4.0, "memory limit of an environment process", GIGABYTES)
    sandbox: bool = opt(False, "run environments without network, child processes and files (Linux)")
    seed_per_sample: bool = opt(False, "different seeds for the samples of a prompt (default: one seed per prompt)")
    turn_discount: float = opt(1.0, "discount of rewards per turn", FRACTION)
    retries: int = opt(0, "play an episode again that has failed, up to so many times", NATURAL)
    max_failures: float = opt(0.05, "stop the run when more than this fraction of a step's episodes fails", FRACTION)

    def max_len(self, prompt_length: int, max_new_tokens: int) -> int:
        """Return the maximum number of tokens of an episode's row."""
        message = max(max_new_tokens, MESSAGE_TOKENS)
        default = prompt_length + message + self.max_turns * (max_new_tokens + message)
        return self.max_episode_len or default
