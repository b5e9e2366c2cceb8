"""Files of machine profiles: checked when they are read, updated under a lock."""

import json
import re
from collections.abc import Iterator
from math import isfinite
from pathlib import Path

from realhf.api.codec import from_json, to_plain
from realhf.base.atomic_io import atomic_write, try_lock
from realhf.base.errors import UserError
from realhf.plan.machines.profile import DIFFERENCES, Fit, Profile

MAX_PROBLEMS = 3  # reported ones of a file
LOCK_S = 60.0  # an update takes milliseconds
NAME = re.compile(
    r"(h\d[\w-]*/t[1-9]\d*/\w+|h\d[\w-]*/optimizer|interface/.+/\w+|cluster_[a-z_]+/[1-9]\d*x[1-9]\d*"
    r"|[a-z_]+/[1-9]\d*|[a-z_]+)", re.ASCII)  # fmt: skip
"""Name of a fit; see ``Profile``."""


def read_profile(path: Path, option: str) -> Profile:
    """Read a profile; ``UserError`` with the name of the ``option`` if the file is not one, or has invalid values."""
    try:
        profile = from_json(path.read_text(), Profile)
        problems = list(_problems(profile))
    except Exception as error:  # of the file system, of JSON, and of types
        problems = [f"{type(error).__name__}: {error}"[:200]]
    if problems:
        raise UserError(f"{option}={path} is not a valid profile ({'; '.join(problems[:MAX_PROBLEMS])}); remove it and "
                        "make it again with realhf profile")  # fmt: skip
    return profile


def _problems(profile: Profile) -> Iterator[str]:
    if not (isfinite(profile.resident) and profile.resident >= 0):
        yield f"resident={profile.resident} must be a finite number >= 0"
    for name, fit in profile.fits.items():
        if not NAME.fullmatch(name):
            yield f"unknown measurement '{name:.80}'"
        kinds = name.endswith("_bytes"), name.startswith(DIFFERENCES)
        yield from (f"{name}: {problem}" for problem in _fit_problems(fit, *kinds))


def _fit_problems(fit: Fit, is_memory: bool, is_difference: bool) -> Iterator[str]:
    for key, value in fit.coefficients.items():
        if not (isfinite(value) and value >= 0):
            yield f"the coefficient of {key} is {value}, must be a finite number >= 0"
    for point in fit.points:
        values = (point.low, point.median, point.high, *point.counts.values())
        if not all(map(isfinite, values)) or min(point.counts.values(), default=0) < 0:
            yield f"a point has the values {values}, must be finite, and counts >= 0"
        elif min(point.low, point.median) <= 0 or point.repeats < 1:
            yield f"a point has the median {point.median}, must be > 0, as low and repeats"
        elif not (point.low <= point.median <= point.high or is_difference):  # crossed in profiles of earlier versions
            yield f"a point has the quartiles {point.low}, {point.median} and {point.high}, must be in ascending order"
        elif set(point.counts) - set(fit.coefficients):
            yield "a point has counts without a coefficient"
        elif is_memory and fit(point.counts) <= 0:
            yield "the fit is 0 at a point"


def update_profile(path: Path, newer: Profile, option: str) -> Profile:
    """Add measurements to the profile in a file, or make the file; return its content.

    Concurrent updates wait for each other. ``UserError`` if the file is of another machine, or is not a profile; then
    the measurements are written to a new file beside it, which the message names.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with try_lock(path.with_name(f".{path.name}.lock"), LOCK_S) as is_acquired:
        if not is_acquired:
            raise UserError(f"{option}={path} is being written by another process for {LOCK_S:.0f} s")
        try:
            merged = read_profile(path, option) + newer if path.exists() else newer
        except (UserError, ValueError) as error:
            other = _unused(path)
            _write(newer, other)
            raise UserError(f"{error}; the new measurements are in {other}") from error
        _write(merged, path)
        return merged


def _unused(path: Path) -> Path:
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, 1000))
    return next(other for other in numbered if not other.exists())


def _write(profile: Profile, path: Path) -> None:
    """Write a profile atomically, with one line per fit and per point."""
    plain = to_plain(profile)
    fits = ",\n".join(f" {json.dumps(name)}: {_fit_lines(fit)}" for name, fit in plain.pop("fits").items())
    atomic_write(path, json.dumps(plain)[:-1] + f', "fits": {{\n{fits}\n}}}}\n')


def _fit_lines(fit: dict) -> str:
    points = ",\n".join(f"   {json.dumps(point)}" for point in fit["points"])
    return f'{{"coefficients": {json.dumps(fit["coefficients"])}, "points": [\n{points}\n  ]}}'
