"""Descriptions of machines: the YAML files of ``machines/``, or one of the user's own."""

from dataclasses import MISSING, fields, replace
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realhf.api.codec import from_plain
from realhf.api.hardware import Hardware
from realhf.base.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent / "machines"
LINKS = ("node", "cluster", "host")


def machine_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def read_hardware(name: str, node_size: int | None = None) -> Hardware:
    """Return the machine of a name (see ``machine_names``) or of a YAML file, with ``node_size`` devices a node.

    ``UserError`` names what a file lacks, has too much of, or has wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = machine_names()
        raise UserError(f"hardware={name}: no such machine or file; known are {', '.join(known)}"
                        f"{did_you_mean(name, known)}")  # fmt: skip
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"hardware={name}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"hardware={name}: the file holds no table of values")
    hardware = _read(name, {str(k): v for k, v in values.items()})
    return replace(hardware, node_size=node_size) if node_size else hardware


def _read(name: str, values: dict[str, object]) -> Hardware:
    known = {f.name: f.default is MISSING for f in fields(Hardware)}
    problems = [f"unknown '{key}'{did_you_mean(key, known)}" for key in values if key not in known]
    problems += [f"'{key}' is missing" for key, needed in known.items() if needed and key not in values]
    for key, value in values.items():
        numbers = value.values() if isinstance(value, dict) else [] if key == "name" else [value]
        problems += [f"{key}={number} is no positive number" for number in numbers if not _is_positive(number)]
        if (key in LINKS) != isinstance(value, dict) or (key in LINKS and "bandwidth" not in dict(value)):  # type: ignore[call-overload]
            problems.append(f"{key}={value}: links, and only they, have a bandwidth and a latency")
    if problems:
        raise UserError([f"hardware={name}: {problem}" for problem in problems])
    return from_plain(values, Hardware)


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and number >= 0
