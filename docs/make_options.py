"""Writes docs/options.md from the code: every group of options once, and the groups and defaults of each experiment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from realhf.api.config import ExperimentConfig
from realhf.apps.prepare.option_help import OptionInfo, options_of
from realhf.experiments import EXPERIMENTS, experiment_class

INTRODUCTION = """# Options

Made by `make docs` from the code. `realhf quickstart EXPERIMENT --help` prints the most used options of an experiment
with its defaults, `--help all` all of them, and `--help WORD` those with WORD in name or text.

Options that every experiment has come first. Then each experiment lists its groups of options, such as `actor.*`, with
the defaults in which it differs; the options of each kind of group are at the end."""
TABLE = ["| option | type | range | default | |", "|---|---|---|---|---|"]


def main() -> None:
    lines = [INTRODUCTION, "", "## Every experiment", "", *TABLE, *map(row, options_of(ExperimentConfig))]
    kinds: dict[type, list[str]] = {}
    for name in EXPERIMENTS:
        lines += ["", *experiment_lines(name, kinds)]
    for kind, groups in kinds.items():
        names = ", ".join(f"`{group}.*`" for group in dict.fromkeys(groups))
        lines += ["", f"## {kind.__name__}", "", f"The options of {names}.", "", *TABLE, *map(row, options_of(kind))]
    (Path(__file__).parent / "options.md").write_text("\n".join(lines) + "\n")


def experiment_lines(name: str, kinds: dict[type, list[str]]) -> Iterator[str]:
    """Yield the section of an experiment, and add its groups to ``kinds``."""
    cls = experiment_class(name)
    options = {option.key: option for option in options_of(cls)}
    common = {field.name for field in fields(ExperimentConfig)}
    yield from (
        f"## {name}",
        "",
        (cls.__doc__ or "").strip(),
        "",
        "| option | type | default, or where it differs | |",
        "|---|---|---|---|",
    )
    values = vars(cls())
    for field in (field for field in fields(cls) if field.name not in common):
        kind, text = type(values[field.name]), field.metadata["help"]
        if not is_dataclass(kind):
            option = options[field.name]
            yield f"| `{field.name}` | {cell(option.type)} {option.range} | `{option.default}` | {text} |"
            continue
        kinds.setdefault(kind, []).append(field.name)
        usual = {option.key: option for option in options_of(kind)}
        yield f"| `{field.name}.*` | {kind.__name__} | {', '.join(changes(field.name, usual, options))} | {text} |"


def changes(group: str, usual: Mapping[str, OptionInfo], options: Mapping[str, OptionInfo]) -> Sequence[str]:
    """Return the options of a group whose defaults are not those of its kind."""
    found = ((key, options[f"{group}.{key}"].default, option.default) for key, option in usual.items())
    return [f"`{key}={default}`" for key, default, ordinary in found if default != ordinary]


def row(option: OptionInfo) -> str:
    return f"| `{option.key}` | {cell(option.type)} | {option.range} | `{option.default}` | {option.help} |"


def cell(text: Any) -> str:
    return str(text).replace("|", "\\|")


if __name__ == "__main__":
    main()
