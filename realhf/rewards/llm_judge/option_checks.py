"""Checks of the options of the language model that judges. Contacts no endpoint."""

import os
from pathlib import Path

from realhf.api.config import LLMJudgeConfig
from realhf.rewards.llm_judge.questions import template_of
from realhf.rewards.registry import check_url

TEXT_FILES = (".txt", ".md")


def judge_problems(preset: str, config: LLMJudgeConfig) -> list[str]:
    """Return the problems of ``reward.judge``, one line each, for a preset that asks a language model."""
    priced = config.price_in or config.price_out
    checks = [
        (bool(config.base_url), f"reward.group_fn={preset} needs reward.judge.base_url=http://host:port/v1"),
        ("?" not in config.base_url and "#" not in config.base_url,
         f"reward.judge.base_url={config.base_url}: /chat/completions is added, so it must end with a path"),
        (bool(config.model), f"reward.group_fn={preset} needs reward.judge.model, the model's name at the endpoint"),
        (not config.api_key_env or bool(os.environ.get(config.api_key_env)),
         f"reward.judge.api_key_env={config.api_key_env}: this environment variable is not set or empty"),
        (not config.api_key_env or is_header(os.environ.get(config.api_key_env, "")),
         f"reward.judge.api_key_env={config.api_key_env}: the key must be printable ASCII without spaces"),
        (config.min_score < config.max_score,
         f"reward.judge.min_score={config.min_score:g} must be less than max_score={config.max_score:g}"),
        (config.budget is None or priced,
         f"reward.judge.budget={config.budget} needs reward.judge.price_in and reward.judge.price_out"),
    ]  # fmt: skip
    problems = [message for holds, message in checks if not holds]
    if config.base_url:
        problems += check_url("reward.judge.base_url", config.base_url, "reward.judge.api_key_env")
    return problems + template_problems(preset, config) + (folder_problems(config.cache) if config.cache else [])


def folder_problems(folder: str) -> list[str]:
    if not Path(folder).is_dir():
        return [f"reward.judge.cache={folder}: no such folder; create it, or leave it out to use the run directory"]
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return [f"reward.judge.cache={folder}: no permission to write there"]
    return []


def template_problems(preset: str, config: LLMJudgeConfig) -> list[str]:
    if config.prompt and not config.prompt.endswith(TEXT_FILES):
        return [f"reward.judge.prompt={config.prompt} must be a file with the suffix {' or '.join(TEXT_FILES)}"]
    try:
        template_of(preset, config)
    except (OSError, ValueError) as error:
        return [f"reward.judge.prompt={config.prompt}: {error}"]
    return []


def is_header(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key
