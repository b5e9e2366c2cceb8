"""Which files a data path names: a file, or the files of one split of a folder, ``FOLDER[:config[:split]]``."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")  # in order of preference
COMPRESSED = (".gz", ".zst")
CARD = "README.md"  # its YAML header may list configurations, each with the files of its splits
FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
METADATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")  # of a shard, or its hash
MAX_NAMED = 5


def data_format(name: str) -> str:
    """Return the suffix of the format of a data file, without that of its compression; empty for other files."""
    suffixes = PurePosixPath(name).suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else ""


def split_selection(path: str) -> tuple[str, str, str]:
    """Return file or folder, config and split of a data path; a file name may contain colons if the file exists."""
    for n in range(3):
        where, *selection = path.rsplit(":", n)
        if os.path.exists(where) or n == 2:
            break
    config, split = [*selection, "", ""][:2]
    return where, config, split


def data_exists(path: str) -> bool:
    return os.path.exists(split_selection(path)[0])


def data_files(path: str) -> list[Path]:
    """Return the files of a data path in order; ValueError if a folder has none, or if a selection is necessary."""
    where, config, split = split_selection(path)
    folder = Path(where)
    if not folder.is_dir():
        return [Path(path)]
    names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return [folder / name for name in select_files(names, text, config, split)]


def select_files(names: Sequence[str], card: str, config: str, split: str) -> list[str]:
    """Return the files of a configuration's split, by default ``train``, among ``names`` relative to a folder.

    They are those that the card lists, or else those whose path contains the names of configuration and split, or
    else, for ``train``, all files if no path contains a split. All have one format. The choice depends on the chosen
    files only, so that it is the same in a folder into which only they were downloaded. ValueError without any, or if
    they are not shards of one file. Source: the data files of a repository as the library ``datasets`` finds them.
    """
    found = sorted(name for name in names if data_format(name) and is_data(PurePosixPath(name)))
    if not found:
        raise ValueError(f"it contains no data file ({', '.join(SUFFIXES)})")
    if configs := card_configs(card):
        patterns = _patterns(configs, config, split or "train")
        return [name for name in found if any(_matches(name, pattern) for pattern in patterns)] or _none(found)
    if config:
        found = [name for name in found if config in PurePosixPath(name).parts[:-1]] or _none(found)
    chosen = [name for name in found if _has_word(name, SPLITS.get(split or "train", re.escape(split)))]
    if not chosen and split in ("", "train") and not any(_has_word(n, s) for n in found for s in SPLITS.values()):
        chosen = found
    chosen = chosen or _none(found)
    kind = min((data_format(name) for name in chosen), key=SUFFIXES.index)
    chosen = [name for name in chosen if data_format(name) == kind]
    if len({NUMBER.sub("", name) for name in chosen}) > 1:
        raise ValueError(f"several of its files match ({_listed(chosen)}): give one file, or FOLDER:config:split")
    return chosen


def card_configs(card: str) -> dict[str, dict[str, Any]]:
    """Return the configurations of a dataset card by name; none if its header is missing or invalid."""
    match = FRONT_MATTER.match(card)
    try:
        header = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError):
        return {}
    configs = header.get("configs") if isinstance(header, dict) else None
    listed = [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []
    return {str(c.get("config_name", "default")): c for c in listed if c.get("data_files")}


def is_data(path: PurePosixPath) -> bool:
    return path.name not in METADATA and not any(part.startswith(".") for part in path.parts)


def _patterns(configs: dict[str, dict[str, Any]], config: str, split: str) -> list[str]:
    """Return the patterns of files that a card lists."""
    default = [name for name, entry in configs.items() if entry.get("default") is True or name == "default"]
    config = config or next(iter(default or (configs if len(configs) == 1 else ())), "")
    if config not in configs:
        known = ", ".join(configs)
        problem = f"no configuration '{config}': known are {known}" if config else f"the configurations {known}"
        raise ValueError(f"it has {problem}; name one, as in NAME:{next(iter(configs))}")
    listed: Any = configs[config]["data_files"]
    entries = listed if isinstance(listed, list) else [listed]
    paths: dict[str, list[Any]] = {"train": [e for e in entries if isinstance(e, str)]}
    for entry in entries:
        if isinstance(entry, dict):
            path = entry.get("path")
            paths.setdefault(str(entry.get("split", "train")), []).extend(path if isinstance(path, list) else [path])
    if not paths.get(split):
        raise ValueError(f"it has no split '{split}': known are {', '.join(name for name in paths if paths[name])}")
    return [str(path) for path in paths[split]]


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, p) for p in (pattern, pattern.replace("**/", ""), f"{pattern.rstrip('/')}/*"))


def _has_word(name: str, words: str) -> bool:
    return re.search(rf"(?<![a-z0-9])({words})(?![a-z])", name.lower()) is not None


def _none(found: Sequence[str]) -> list[str]:
    raise ValueError(f"none of its files is of the requested configuration and split; it contains {_listed(found)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
