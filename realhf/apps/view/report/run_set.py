"""The runs of a page: those of directories, with the stages of multi-stage experiments as they start."""

from collections.abc import Sequence
from pathlib import Path

from realhf.apps.view.report.responses import MAX_TOTAL
from realhf.apps.view.report.run_reader import RunReader
from realhf.base.errors import UserError
from realhf.base.paths import RunDir

MAX_RUNS = 32


class RunSet:
    """The runs in ``roots``; ``UserError`` if one of them has none."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.readers: list[RunReader] = []
        self._open([run for root in roots for run in runs_of(root)])

    @property
    def title(self) -> str:
        if len(self.roots) == 1:
            return "/".join(self.roots[0].absolute().parts[-2:])
        return f"Comparison of {len(self.readers)} runs"

    def update(self) -> bool:
        """Read what has changed, and stages that have started; return True if the page changes."""
        try:
            found = [run for root in self.roots for run in runs_of(root)]
        except (UserError, OSError):  # a directory was removed
            found = []
        is_extended = len(found) > len(self.readers) and len(found) <= MAX_RUNS
        if is_extended:
            self._open(found)
        changed = [reader.update() for reader in self.readers]
        return is_extended or any(changed)

    def _open(self, found: Sequence[Path]) -> None:
        if len(found) > MAX_RUNS:
            raise UserError(f"{len(found)} runs: a page has at most {MAX_RUNS}")
        before = {reader.paths.root: reader for reader in self.readers}
        names = short_names([root.absolute() for root in found])
        self.readers = [before.pop(root) if root in before else RunReader(root) for root in found]
        for reader, name in zip(self.readers, names, strict=True):
            reader.name, reader.response_budget = name, MAX_TOTAL // len(found)


def runs_of(root: Path) -> list[Path]:
    """Return the runs in a directory: itself, its stages in order of their starts, or the runs of a SLURM array."""
    paths = RunDir(root)
    is_run = paths.plan.is_file() or paths.metrics.is_file()
    if not is_run and (plans := list(root.glob("*/plan.json"))):
        return [plan.parent for plan in sorted(plans, key=lambda plan: (plan.stat().st_mtime_ns, plan))]
    if paths.stages.is_file():
        raise UserError(f"{root} has several runs, but none has started")
    if not is_run and not paths.config.is_file():
        raise UserError(f"{root} has no run: {paths.config.name} or {paths.plan.name} is missing")
    return [root]


def short_names(roots: Sequence[Path]) -> list[str]:
    """Return short distinct names of directories: as many of their last parts as each one needs."""
    names = [_short_name(root, [other for other in roots if other != root]) for root in roots]
    numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if number == 1 else f"{name} ({number})" for name, number in zip(names, numbers, strict=True)]


def _short_name(root: Path, others: Sequence[Path]) -> str:
    n = next(n for n in range(1, len(root.parts) + 1) if all(root.parts[-n:] != o.parts[-n:] for o in others))
    return "/".join(root.parts[-n:])
