"""Every number of every option has a range; numbers outside are refused before torch is imported."""

import subprocess
import sys
import typing
from dataclasses import fields, is_dataclass
from math import inf, nan, nextafter
from pathlib import Path

import pytest

from realhf.api.config.option import Range
from realhf.apps.commands.profile import ProfileOptions
from realhf.apps.commands.verifier import ServeOptions
from realhf.apps.prepare.option_help import options_of
from realhf.apps.prepare.options import updated
from realhf.base.errors import UserError
from realhf.experiments import EXPERIMENTS, experiment_class

CLASSES = {**{name: experiment_class(name) for name in EXPERIMENTS}, "profile": ProfileOptions, "serve": ServeOptions}


def kinds(annotation: object) -> set[object]:
    """Return the types in an annotation: ``list[int] | None`` has list, int and NoneType."""
    arguments = typing.get_args(annotation)
    return {annotation, typing.get_origin(annotation)}.union(*map(kinds, arguments)) if arguments else {annotation}


def numbers(cls: type) -> dict[str, tuple[Range, bool, bool]]:
    """Return range, is_int and is_list of all numeric options, by walking type hints."""

    def walk(cls: type, options: object, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for field in fields(cls):
            value, found_kinds = getattr(options, field.name), kinds(hints[field.name])
            if is_dataclass(value):
                walk(type(value), value, f"{prefix}{field.name}.")
            elif found_kinds & {int, float}:
                found[prefix + field.name] = (field.metadata["domain"], int in found_kinds, list in found_kinds)

    found: dict[str, tuple[Range, bool, bool]] = {}
    walk(cls, cls(), "")
    return found


def refused(cls: type, words: list[str]) -> list[str]:
    try:
        updated(cls(), words)
    except UserError as error:
        return error.problems
    return []


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_has_a_range_that_contains_its_default(name: str) -> None:
    ranges = numbers(CLASSES[name])
    assert ranges and all(isinstance(valid, Range) for valid, _, _ in ranges.values()), ranges
    assert updated(CLASSES[name](), []) == CLASSES[name]()
    assert {o.key for o in options_of(CLASSES[name]) if o.range} == set(ranges)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("case", ["below", "above", "low", "high", "nan", "inf", "-inf"])
def test_numbers_are_accepted_exactly_within_their_range(name: str, case: str) -> None:
    words, wrong, cls = [], set(), CLASSES[name]
    for key, (valid, is_int, is_list) in numbers(cls).items():
        low, high = valid.low, valid.high
        below, above = (low - 1, high + 1) if is_int else (nextafter(low, -inf), nextafter(high, inf))
        value: float = {"below": below, "low": low, "high": high, "above": above, "nan": nan, "inf": inf,
                        "-inf": -inf}[case]  # fmt: skip
        lower = value > low if valid.low_open else value >= low
        upper = value < high if valid.high_open else value <= high
        if (is_int and isinstance(value, float)) or f"{value}" in ("inf", "-inf") and case in ("below", "above"):
            continue  # no integer, or no number beyond
        words.append(f"{key}=[{value}]" if is_list else f"{key}={value}")
        wrong |= set() if lower and upper else {key}
    problems = refused(cls, words)
    assert {line.split("=")[0] for line in problems} == wrong and len(problems) == len(wrong)
    assert all(": must be " in line for line in problems)


def test_a_number_out_of_range_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    code = (
        "import sys; from realhf.apps.main import run\n"
        "words = ['quickstart', 'ppo-math', 'actor.optimizer.lr=-1', 'reward.timeout=-3', 'ppo.eps_clip=nan']\n"
        "print(run(words), [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=True
    )
    assert done.stdout == "2 []\n" and list(tmp_path.iterdir()) == []
    assert done.stderr.splitlines()[1:] == [
        "  1. actor.optimizer.lr=-1.0: must be >= 0",
        "  2. ppo.eps_clip=nan: must be > 0 and <= inf",
        "  3. reward.timeout=-3.0: must be > 0",
    ]


def test_defaults_of_an_experiment_are_shown() -> None:
    shown = {o.key: o.default for o in options_of(experiment_class("grpo"))}
    assert shown["ppo.group_size"] == "8" and shown["ppo.kl_in"] == "loss"
