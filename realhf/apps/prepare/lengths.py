"""Expected response lengths of an experiment: as given by its options, from a file, or measured in an earlier run."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.batch_meta import PROMPT
from realhf.api.config import ExperimentConfig
from realhf.api.experiment import Experiment
from realhf.base.errors import UserError, did_you_mean
from realhf.base.paths import RunDir
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.lengths import (
    EXAMPLES,
    MAX_LENGTHS,
    MAX_TOKENS,
    LengthDistribution,
    MeasuredLengths,
    default_lengths,
    parse_lengths,
)

OPTION = "planner.lengths"
FIRST_TAIL, MAX_TAIL = 1 << 20, 1 << 26
"""Bytes that are read from the end of a run's events, at first and at most."""
HINT = f"use {', '.join(EXAMPLES.values())}, a file of lengths, or an earlier run"
_DECODER = msgspec.json.Decoder(RowsReady)


def lengths_of(experiment: Experiment) -> LengthDistribution | None:
    """Return the expected response lengths; None if the experiment does not generate."""
    sampling = experiment.planned_sampling()
    if sampling is None:
        return None
    options = experiment.planner
    if not options.lengths:
        return default_lengths(experiment.expected_new_tokens(), sampling.max_new_tokens)
    if options.new_tokens is not None:
        raise UserError(f"{OPTION}={options.lengths} and planner.new_tokens are both set; set one of them")
    return given_lengths(experiment)


def given_lengths(config: ExperimentConfig) -> LengthDistribution:
    """Return the distribution of ``planner.lengths``; ``UserError`` names the option, its value and a valid form."""
    text = config.planner.lengths
    where = f"{OPTION}={text}"
    path, trials = Path(text), Path(config.fileroot) / config.experiment_name
    # unlike methods of Path, these accept texts that cannot be a path
    if folder := next((some for some in (path, trials / text, trials.parent / text) if os.path.isdir(some)), None):
        return run_lengths(RunDir(folder), where)
    if os.path.isfile(path):
        return file_lengths(path, where)
    try:
        found = parse_lengths(text)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if found is None:
        known = sorted(
            some.name for some in (Path(config.fileroot) / config.experiment_name).glob("*") if some.is_dir()
        )
        hint = did_you_mean(text, [*known, *EXAMPLES.values()])
        raise UserError(f"{where}: there is no such distribution, file or run in {trials}; {HINT}{hint}")
    return found


def file_lengths(path: Path, where: str) -> MeasuredLengths:
    """Return the lengths in a file: one integer per line, a file of generations/, or the metrics of a run."""
    paths = RunDir(path.parent)
    if path.name in (paths.metrics.name, paths.events.name):
        return run_lengths(paths, where)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot read the file ({error})") from error
    lines = text.split("\n")  # a JSON text may have other line separators
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UserError(f"{where}: the file is empty; {HINT}")
    return MeasuredLengths(tuple(_length(line, number, where) for number, line in enumerate(lines, 1)), path.name)


def _length(line: str, number: int, where: str) -> int:
    """Return the length in a line of a file."""
    value: Any = None
    if line.strip().startswith("{"):
        try:
            value = json.loads(line).get("answer_tokens")
        except ValueError as error:
            raise UserError(f"{where}: line {number} is not valid JSON ({error})") from error
    elif line.strip().isascii() and line.strip().isdecimal():
        value = int(line) if len(line.strip()) < 20 else None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_TOKENS:
        return value
    raise UserError(f"{where}: line {number} is {line.strip()!r:.60}; expected a number of tokens from 1 to "
                    f"{MAX_TOKENS}, or a row of generations/ with answer_tokens")  # fmt: skip


def run_lengths(paths: RunDir, where: str) -> MeasuredLengths:
    """Return the lengths of the last responses of a run, in its events: all of a step's, without those of evaluation.

    ``MAX_LENGTHS`` or more are read if there are as many, of whole steps. They include tokens of environments.
    """
    if paths.stages.is_file():
        names = sorted(some.parent.name for some in paths.root.glob(f"*/{paths.events.name}"))
        raise UserError(f"{where}: {paths.root} has several runs; name one of them: {', '.join(names) or 'none yet'}")
    if not paths.events.is_file():
        raise UserError(
            f"{where}: {paths.root} is not the folder of a run: it has no {paths.events.name}{_mean(paths)}"
        )
    steps: Mapping[int, list[int]] = {}
    try:
        size, tail = paths.events.stat().st_size, FIRST_TAIL
        while True:
            steps = lengths_by_step(_tail(paths.events, size, tail))
            if tail >= min(size, MAX_TAIL) or sum(map(len, steps.values())) >= MAX_LENGTHS:
                break
            tail *= 4
    except OSError as error:
        raise UserError(f"{where}: cannot read {paths.events} ({error})") from error
    found, first, last = list[int](), 0, 0
    for step in sorted(steps, reverse=True):
        if len(found) < MAX_LENGTHS:
            found, first, last = found + steps[step], step + 1, last or step + 1
    if not found:
        raise UserError(f"{where}: {paths.root} has no responses yet{_mean(paths)}")
    which = f"step {last}" if first == last else f"steps {first} to {last}"
    return MeasuredLengths(tuple(found), f"{which} of {paths.root.parent.name}/{paths.root.name}")


def lengths_by_step(lines: Iterable[bytes]) -> dict[int, list[int]]:
    """Return the lengths of responses by step in the lines of events; damaged lines and unknown prompts are skipped."""
    prompts, steps = dict[int, int](), dict[int, list[int]]()
    for event in _events(lines):
        for meta in event.outputs.values():
            if event.mfc is None and "prompts" in meta.columns:
                prompts |= {i.prompt: n for i, n in zip(meta.ids, meta.columns["prompts"].lengths, strict=True)}
            elif event.mfc is not None and "tokens" in meta.columns:
                for row, n in zip(meta.ids, meta.columns["tokens"].lengths, strict=True):
                    if row.sample != PROMPT and (length := n - prompts.get(row.prompt, n)) > 0:
                        steps.setdefault(event.span.step, []).append(length)
    return steps


def _events(lines: Iterable[bytes]) -> Iterator[RowsReady]:
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError):  # cut off by a kill, or by the start of the tail
            continue


def _tail(path: Path, size: int, length: int) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(max(0, size - length))
        return file.read(length).splitlines()


def _mean(paths: RunDir) -> str:
    """Return how to use the mean of a run of which only metrics remain."""
    try:
        last = json.loads(paths.metrics.read_bytes().splitlines()[-1])
        return f"; its metrics have the mean: planner.new_tokens={float(last['length/response']):.6g}"
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return f"; {HINT}"
