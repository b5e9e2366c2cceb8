"""Options of runs that differ from the defaults."""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.api.config.option import leaves
from realhf.api.experiment import Experiment

NAMES = ("experiment_name", "trial_name", "fileroot", "overwrite")  # they identify a run and have no effect on it
NO_OPTION = "no such option"


@dataclass(frozen=True)
class OptionRow:
    """An option, its help, its default, and its value in every run; ``differs`` if the values are not equal."""

    key: str
    help: str
    default: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def option_text(value: object) -> str:
    if value is None or value == "":
        return "none"
    return str(getattr(value, "value", value))


def changed_options(configs: Sequence[Experiment]) -> list[OptionRow]:
    """Return the options that differ from the default in some run, in order of declaration.

    Values that were given as ``${...}`` are shown as given, because environment variables may be secret.
    """
    columns: list[dict[str, str]] = []
    defaults: dict[str, str] = {}
    helps: dict[str, str] = {}
    for config in configs:
        given = config.unresolved()
        columns.append({key: option_text(given.get(key, value)) for key, _, value in leaves(config)})
        own = {key: option_text(value) for key, _, value in leaves(type(config)())}
        helps |= {key: str(option.metadata.get("help", "")) for key, option, _ in leaves(config)}
        defaults = {**own, **defaults}
    rows = []
    for key, default in defaults.items():
        values = tuple(column.get(key, NO_OPTION) for column in columns)
        if key not in NAMES and any(value not in (default, NO_OPTION) for value in values):
            rows.append(OptionRow(key, helps[key], default, values))
    return rows
