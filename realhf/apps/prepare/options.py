"""Parses ``key=value`` words and YAML files into options, with Hydra's override grammar and OmegaConf's types."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realhf.api.config import ExperimentConfig
from realhf.base.atomic_io import atomic_write
from realhf.base.errors import UserError, did_you_mean

T = TypeVar("T")

RENAMED_OPTIONS = {
    "behaviour_cap": "is_weight_cap",
    "dense": "prm",
    "eval_share": "eval_fraction",
    "group_std": "advantages.group.std",
    "in_flight": "max_concurrency",
    "kl_loss_mean": "kl_loss_aggregation",
    "loss_mean": "loss_aggregation",
    "max_redraws": "max_resamples",
    "max_replies": "max_responses",
    "max_slots": "max_num_seqs",
    "mismatch_limit": "logprob_diff_warning",
    "recover_deaths": "max_device_failures",
    "slots": "max_num_seqs",
    "splitter": "step_splitter",
}
"""New names of renamed parts of option keys: ``ppo.dense.splitter`` is now ``ppo.prm.step_splitter``."""
RENAMED_VALUES = {
    "ppo.advantage=baseline": "greedy_baseline",
    "ppo.advantage=given": "precomputed",
    "optimizer.type=empty": "none",
}


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """One line of ``--help``."""

    key: str
    type: str
    default: str
    help: str


def options_of(cls: type, prefix: str = "") -> Iterator[OptionInfo]:
    """Yield every leaf option of a config class, in order of declaration."""
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc, operator]
        if dataclasses.is_dataclass(default):
            yield from options_of(type(default), f"{key}.")
            continue
        if isinstance(default, Enum):
            kind, shown = "|".join(e.name for e in type(default)), default.name
        else:
            name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            kind, shown = name.replace(" | None", ""), str(default)
        yield OptionInfo(key, kind, shown, field.metadata.get("help", ""))


def print_options(cls: type) -> None:
    options = list(options_of(cls))
    width = max(len(o.key) + len(o.type) for o in options) + 3
    for option in options:
        print(f"  {option.key + ': ' + option.type:<{width}} {option.help} [{option.default}]")


def updated(options: T, overrides: Sequence[str], config_file: str | None = None) -> T:
    """Return a copy updated from the file, then from the overrides; ``UserError`` lists all invalid options."""
    known = [o.key for o in options_of(type(options))]
    tree = OmegaConf.structured(options)
    problems: list[str] = []
    if config_file:
        for key, value in _flatten(_load_yaml(config_file)):
            problems += _set(tree, key, value, known, f" ({config_file})")
    for word in overrides:
        problems += _apply(tree, word, known)
    if problems:
        raise UserError(problems)
    return _to_object(tree)


def read_options(cls: type[T], overrides: Sequence[str], problems_of: Callable[[T], list[str]]) -> T:
    """Return the options of a command; ``UserError`` lists all invalid overrides, or else ``problems_of``."""
    options = updated(cls(), overrides)
    if problems := problems_of(options):
        raise UserError(problems)
    return options


def load_experiment(cls: type[T], path: Path) -> T:
    return _to_object(OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.load(path)))


def save_experiment(config: ExperimentConfig, path: Path) -> None:
    atomic_write(path, OmegaConf.to_yaml(OmegaConf.structured(config)))


def _to_object(tree: Any) -> Any:
    try:
        return OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def _load_yaml(path: str) -> dict:
    if not Path(path).is_file():
        raise UserError(f"--config {path}: there is no such file")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:
        raise UserError(f"--config {path}: invalid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"--config {path}: expected a mapping, got a list")
    return loaded


def _flatten(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apply(tree: DictConfig, word: str, known: list[str]) -> list[str]:
    if "=" not in word:
        return [f"'{word}' is not of the form key=value{did_you_mean(word, known)}"]
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        return [f"'{word}' cannot be parsed: {str(error).splitlines()[0]} (quote values with special characters)"]
    if override.is_delete():
        return [f"'{word}': options cannot be deleted; set a value"]
    # no sweeps: 'actor_gen:d2,*:d1' and 'node01,node02' are strings
    value = word.partition("=")[2] if override.is_sweep_override() else override.value()
    return _set(tree, override.key_or_group, value, known, "")


def _set(tree: DictConfig, key: str, value: Any, known: list[str], source: str) -> list[str]:
    if key not in known:
        if example := next((k for k in known if k.startswith(f"{key}.")), None):
            return [f"{key} is a group of options; set one of them, like {example}=...{source}"]
        renamed = ".".join(RENAMED_OPTIONS.get(part, part) for part in key.split("."))
        hint = f": renamed to {renamed}" if renamed != key and renamed in known else did_you_mean(renamed, known)
        return [f"unknown option {key}{hint}{source}"]
    try:
        OmegaConf.update(tree, key, value)
    except OmegaConfBaseException as error:
        new = next((new for old, new in RENAMED_VALUES.items() if f"{key}={value}".endswith(old)), None)
        return [f"{key}={value}: {f'renamed to {new}' if new else str(error).splitlines()[0]}{source}"]
    return []
