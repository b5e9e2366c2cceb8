"""Parses ``key=value`` words and YAML files into options, with Hydra's override grammar and OmegaConf's types."""

import contextlib
import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from realhf.api.config import ExperimentConfig
from realhf.api.config.option import leaves, range_problems
from realhf.apps.prepare.option_help import choices, suggestion, type_text
from realhf.base.atomic_io import atomic_write
from realhf.base.errors import UserError, did_you_mean

T = TypeVar("T")
Fields = Mapping[str, Field]  # of all options, by their full names

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


def updated(options: T, overrides: Sequence[str], config_file: str | None = None) -> T:
    """Return a copy updated from the file, then from the overrides; ``UserError`` lists all invalid options."""
    known = {key: field for key, field, _ in leaves(options)}
    tree = _tree(options)
    problems: list[str] = []
    if config_file:
        for key, value in _load_yaml(config_file, known):
            problems += _set(tree, key, value, known, f" ({config_file})")
    for word in overrides:
        problems += _apply(tree, word, known)
    try:
        result: T = _to_object(tree, known)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(map(_one_line, problems))
    return result


def read_options(cls: type[T], overrides: Sequence[str], problems_of: Callable[[T], list[str]]) -> T:
    """Return the options of a command; ``UserError`` lists all invalid overrides, or else ``problems_of``."""
    options = updated(cls(), overrides)
    if problems := problems_of(options):
        raise UserError(problems)
    return options


def load_experiment(cls: type[T], path: Path) -> T:
    """Return the options in a file with all of them; ``UserError`` if some are missing, or have invalid values."""
    known = {key: field for key, field, _ in leaves(cls())}
    if missing := known.keys() - dict(_load_yaml(str(path), known)).keys():
        raise UserError(f"{path} is damaged, or of another version: {len(missing)} options are missing, such as "
                        f"{min(missing)}; add them, or start the run again with overwrite=True")  # fmt: skip
    return updated(cls(), (), str(path))


def save_experiment(config: ExperimentConfig, path: Path) -> None:
    """Write the options; interpolations are not resolved, because environment variables may be secret."""
    atomic_write(path, OmegaConf.to_yaml(_tree(config)))


def absolute(text: Any, value: Any, exists: Callable[[str], bool]) -> Any:
    """Return ``text`` with the working directory in front if its ``value`` is an existing relative path.

    ``value`` is ``text`` with interpolations resolved. A path may be followed by a name: ``file.py:function``.
    """
    if isinstance(text, list):
        return [absolute(*both, exists) for both in zip(text, value, strict=True)]
    if not isinstance(value, str) or os.path.isabs(value):
        return text
    file, suffix, _ = value.partition(".py:")
    if not value or not exists(file + suffix.removesuffix(":")):
        return text
    return os.path.join(os.getcwd().replace("${", "\\${"), text)


def _tree(options: object) -> DictConfig:
    """Return the options as a tree, with interpolations as they were given."""
    given = options.unresolved() if isinstance(options, ExperimentConfig) else {}
    if not given:
        return OmegaConf.structured(options)
    tree = OmegaConf.structured(type(options))  # a resolved value may look like an interpolation
    for key, _, value in leaves(options):
        OmegaConf.update(tree, key, given.get(key, value))
    return tree


def _to_object(tree: DictConfig, known: Fields) -> Any:
    """Return the options, with interpolations resolved and paths absolute; ``UserError`` lists invalid values."""
    plain: Any = OmegaConf.to_container(tree)
    texts, problems = dict[str, Any](), list[str]()
    for key, field in known.items():
        texts[key], exists = reduce(getitem, key.split("."), plain), field.metadata.get("domain")
        try:
            value = OmegaConf.select(tree, key, throw_on_missing=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ")
            problems.append(f"{key}={texts[key]}: {reason}")
            continue
        problems += range_problems([(key, field, value)])
        if callable(exists):
            texts[key] = absolute(texts[key], value, exists)
            OmegaConf.update(tree, key, texts[key])
    if problems:
        raise UserError(problems)
    options = OmegaConf.to_object(tree)
    if isinstance(options, ExperimentConfig):
        options.interpolations = {key: (texts[key], value) for key, _, value in leaves(options) if texts[key] != value}
    return options


def _load_yaml(path: str, known: Fields) -> list[tuple[str, Any]]:
    """Return the options of a file and their values, not resolved."""
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        loaded = OmegaConf.load(path)
        if isinstance(loaded, DictConfig):
            return list(_flatten(loaded, known))
    except Exception as error:  # of many kinds: the file, its encoding, YAML, unsupported values
        raise UserError(_one_line(f"{path}: invalid YAML: {error}")) from error
    raise UserError(f"{path}: expected a mapping, got a list")


def _flatten(section: DictConfig, known: Fields, prefix: str = "") -> Iterator[tuple[str, Any]]:
    plain: Any = OmegaConf.to_container(section)
    for name, text in plain.items():
        key = f"{prefix}{name}"
        if key not in known and OmegaConf.is_dict(value := section[name]):  # resolves 'critic: ${actor}'
            yield from _flatten(value, known, f"{key}.")
        else:
            yield key, text


def _apply(tree: DictConfig, word: str, known: Fields) -> list[str]:
    key, equals, text = word.partition("=")
    if not equals:
        return [f"'{word}' is not of the form key=value{suggestion(word, known)}"]
    kind = known[key].type if key in known else None
    if kind in (str, str | None) and text != "null" and text[:1] not in ("'", '"'):
        return _set(tree, key, text, known, "")  # URLs, times and patterns need no quotes
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        if get_origin(kind) is list and (items := _list_items(text)) is not None:
            return _set(tree, key, items, known, "")
        if _mapping_of(key, known):
            return _set(tree, key, text, known, "")
        return [f"'{word}' cannot be parsed: {str(error).splitlines()[0]} (quote values with special characters)"]
    if override.type is not OverrideType.CHANGE or override.package is not None:
        return [f"'{word}': options cannot be added, deleted or moved; write key=value"]
    # no sweeps: 'node01,node02' is a string
    return _set(tree, override.key_or_group, text if override.is_sweep_override() else override.value(), known, "")


def _mapping_of(key: str, known: Fields) -> str:
    """Return the option that ``key`` is an entry of, as ``env.options`` of ``env.options.size``; empty for none."""
    parent = key.rpartition(".")[0]
    return parent if parent in known and get_origin(known[parent].type) is dict else ""


def _list_items(text: str) -> list[str] | None:
    """Return the items of a list in brackets, each of which may be quoted; None for other texts."""
    if text[:1] != "[" or text[-1:] != "]":
        return None
    quotechar = "'" if "'" in text else '"'
    with contextlib.suppress(csv.Error):
        (items,) = csv.reader([text[1:-1]], quotechar=quotechar, skipinitialspace=True, strict=True)
        return items
    return None


def _set(tree: DictConfig, key: str, value: Any, known: Fields, source: str) -> list[str]:
    if parent := _mapping_of(key, known):
        entries: Any = OmegaConf.to_container(OmegaConf.select(tree, parent))
        return _set(tree, parent, {**entries, key.rpartition(".")[2]: value}, known, source)
    if key not in known:
        if example := next((k for k in known if k.startswith(f"{key}.")), None):
            return [f"{key} is a group of options; set one of them, like {example}=...{source}"]
        renamed = ".".join(RENAMED_OPTIONS.get(part, part) for part in key.split("."))
        hint = f": renamed to {renamed}" if renamed != key and renamed in known else suggestion(renamed, known)
        return [f"unknown option {key}{hint}{source}"]
    try:
        OmegaConf.update(tree, key, value)
    except GrammarParseError as error:
        return [f"{key}={value}: {str(error).splitlines()[0]}{source}"]
    except (OmegaConfBaseException, OverflowError):
        kind = known[key].type
        new = next((new for old, new in RENAMED_VALUES.items() if f"{key}={value}".endswith(old)), None)
        hint = f"renamed to {new}" if new else f"expected {type_text(kind)}{did_you_mean(str(value), choices(kind))}"
        return [f"{key}={value}: {hint}{source}"]
    return []


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
