"""Reads hardware descriptions: the YAML files of ``machines/`` or a user-defined file."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from math import inf
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from realhf.api.codec import from_plain
from realhf.api.machine import ExpectedErrors, Hardware, Link
from realhf.base.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent
NESTED: dict[str, type[Link] | type[ExpectedErrors]] = {
    "node": Link,
    "cluster": Link,
    "host": Link,
    "disk": Link,
    "errors": ExpectedErrors,
}
DIVISORS = ("node_size", "memory", "flops", "memory_bandwidth", "bandwidth", "oversubscription")
WHOLE = ("node_size", "cores", "sms", "pod_nodes")


def read_hardware(name: str, node_size: int | None = None) -> Hardware:
    """Return a machine by name or YAML file; raises UserError with all missing, unknown and invalid values."""
    known = sorted(file.stem for file in FOLDER.glob("*.yaml"))
    path = FOLDER / f"{name}.yaml" if name in known else Path(name)
    if not path.is_file():
        raise UserError(f"planner.hardware={name}: no such machine or file; known are {', '.join(known)}"
                        f"{did_you_mean(name, known)}")  # fmt: skip
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError, OSError, RecursionError) as error:
        raise UserError(f"planner.hardware={name}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"planner.hardware={name}: expected a mapping of values")
    values: dict[str, object] = {str(key): value for key, value in content.items()}
    problems = list(_problems(values, Hardware, ""))
    for name_, kind in NESTED.items():
        value = values.get(name_)
        if isinstance(value, dict):
            problems += _problems(value, kind, f"{name_}.")
        elif name_ in values:
            keys = " and ".join(f.name for f in fields(kind))
            problems.append(f"{name_}={value}: expected a mapping with {keys}")
    if problems:
        raise UserError([f"planner.hardware={name}: {problem}" for problem in problems])
    hardware = from_plain(values, Hardware)
    return replace(hardware, node_size=node_size) if node_size else hardware


def _problems(
    values: Mapping[str, object], kind: type[Hardware] | type[Link] | type[ExpectedErrors], prefix: str
) -> Iterator[str]:
    """Yield the missing, unknown and invalid values of a mapping; nested mappings are checked separately."""
    known = {f.name: f for f in fields(kind)}
    yield from (f"unknown '{prefix}{key}'{did_you_mean(key, known)}" for key in values if key not in known)
    yield from (f"'{prefix}{k}' is missing" for k, f in known.items() if f.default is MISSING and k not in values)
    for key, value in values.items():
        if key not in known or key in (*NESTED, "name"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
            yield f"{prefix}{key}={value} must be a finite number >= 0"
        elif key == "memory_reserve_fraction" and value >= 1:
            yield f"{prefix}{key}={value} must be below 1: it is a fraction of the memory"
        elif value == 0 and key in DIVISORS:
            yield f"{prefix}{key} must be above 0"
        elif key in WHOLE and value != int(value):
            yield f"{prefix}{key}={value} must be a whole number"
