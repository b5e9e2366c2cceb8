"""What all studies share: their files, their verdict, which follows from the results, and their command line."""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from docs.drawing import for_both_schemes
from experiments.sums import StudyOptions, study_options

Results = dict[str, Any]
METADATA = ("Creator", "Date", "Format", "Type")
"""Entries of an SVG file that are left out: names of versions, times and addresses."""


class Outcome(Enum):
    REPRODUCED = "reproduced"
    PARTLY = "partly reproduced"
    NOT = "not reproduced"


@dataclass(frozen=True)
class Verdict:
    """Whether the claim was reproduced, by what was registered before the first run, with the figures."""

    outcome: Outcome
    figures: str

    @property
    def line(self) -> str:
        """The first line of the verdict in the README."""
        return f"**Verdict: {self.outcome.value}.**"


def verdict_of(conditions: Sequence[bool], figures: str) -> Verdict:
    """Return ``REPRODUCED`` if all conditions hold, ``PARTLY`` if some do."""
    outcome = Outcome.REPRODUCED if all(conditions) else Outcome.PARTLY if any(conditions) else Outcome.NOT
    return Verdict(outcome, figures)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, 0 of one value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), standard_error(values)


def cell(values: Sequence[float], digits: int = 3) -> str:
    """Return mean and standard error for a table."""
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} +- {error:.{digits}f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def load_results(folder: Path) -> Results:
    found: Results = json.loads((folder / "results.json").read_text())
    return found


def save_figure(file: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> None:
    """Draw a figure and write it as SVG; the same results make the same file."""
    figure, text = Figure(figsize=size, layout="tight"), StringIO()
    with rc_context({"svg.hashsalt": file.parent.name, "svg.fonttype": "none", "font.size": 9}):
        draw(figure)
        figure.savefig(text, format="svg", metadata=dict.fromkeys(METADATA))
    svg = text.getvalue()
    file.write_text("\n".join(line.rstrip() for line in for_both_schemes(svg[svg.index("<svg") :]).splitlines()) + "\n")


@dataclass(frozen=True)
class Study:
    """How a study in ``folder`` gets its results, and what it makes of them; ``size`` of the figure is in inches."""

    folder: Path
    description: str
    collect: Callable[[StudyOptions], Results]
    verdict: Callable[[Results], Verdict]
    table: Callable[[Results], str]
    draw: Callable[[Results, Figure], None]
    size: tuple[float, float]
    jobs: int = 2

    def main(self) -> None:
        """Run the study by the command line, and write results.json, table.md and figure.svg."""
        name = self.folder.name.replace("_", "-")
        options, began = study_options(self.description, f"{name}-run", self.jobs), time.monotonic()
        found = self.collect(options)
        minutes = round((time.monotonic() - began) / 60, 1)
        results: Results = {"minutes": minutes, "cores": os.cpu_count(), "machine": platform.machine(), **found}
        (self.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        results = load_results(self.folder)
        (self.folder / "table.md").write_text(self.table(results))
        save_figure(self.folder / "figure.svg", self.size, partial(self.draw, results))
        print(self.verdict(results))
