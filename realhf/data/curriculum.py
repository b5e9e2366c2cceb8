"""Chooses the rows of every step by source, earlier results and epoch. Pure: no IO, no clock, no torch.

Without a curriculum ``order.py`` alone determines the rows.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, pairwise
from math import fsum
from typing import NamedTuple

import numpy as np

from realhf.api.curriculum import Band, CurriculumRules, PromptResult
from realhf.base.seeds import stable_seed
from realhf.data.order import epoch_order
from realhf.plan.train_schedule import PromptRange, TrainSchedule


class RowResult(NamedTuple):
    """The last result of a row: how many of ``n`` responses passed, their mean reward, and when.

    ``time`` is the number of the prompt, and in memory the epoch of the row's source in which the result became known.
    """

    row: int
    time: int
    n: int
    n_passed: int
    mean: float

    @property
    def pass_rate(self) -> float:
        return self.n_passed / self.n

    def merged(self, later: "RowResult") -> "RowResult":
        """Return the result of both, of a row that a step has sampled twice."""
        n = self.n + later.n
        mean = (self.mean * self.n + later.mean * later.n) / n
        return RowResult(self.row, later.time, n, self.n_passed + later.n_passed, mean)


@dataclass
class SourceState:
    """The position in a source: the epoch, its remaining rows, the next one last, and the rows that it leaves out.

    ``debt`` is the number of prompts by which the source is behind its share.
    """

    epoch: int = -1
    rest: list[int] = field(default_factory=list)
    left_out: frozenset[int] = frozenset()
    debt: float = 0.0


@dataclass(frozen=True)
class CurriculumState:
    """What a checkpoint has of a ``Curriculum``. ``sizes`` are the numbers of rows of the sources.

    ``filtered`` are the rows that have left the data. ``pending`` are results of steps that are not in memory yet;
    ``chosen`` are the rows of steps that are not finished.
    """

    sizes: tuple[int, ...]
    sources: tuple[SourceState, ...]
    memory: tuple[RowResult, ...] = ()
    filtered: tuple[int, ...] = ()
    pending: tuple[tuple[int, tuple[RowResult, ...]], ...] = ()
    chosen: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Curriculum:
    """The rows of all steps of a run, chosen in order. Only ``rows``, ``record`` and ``finish`` change it.

    The rows of a step depend on the results of the steps at least ``lag`` earlier, all of which are finished when its
    data are requested; later results are not used even if they are known, so timing does not matter. After its rows, a
    step has replacements for resampled prompts. ``state`` continues another run on the same rows.
    """

    def __init__(
        self,
        rules: CurriculumRules,
        sizes: Sequence[int],
        schedule: TrainSchedule,
        seed: int,
        shuffle: bool,
        lag: int,
        state: CurriculumState | None = None,
    ) -> None:
        self.rules = replace(rules, weights=rules.weights or tuple(map(float, sizes)))
        self.sizes, self.schedule, self.seed, self.shuffle, self.lag = tuple(sizes), schedule, seed, shuffle, lag
        self._starts = [0, *accumulate(sizes)]
        if state is None or state.sizes != self.sizes:  # the remembered rows are others now
            state = CurriculumState(self.sizes, tuple(SourceState() for _ in sizes))
        self._sources = [replace(source, rest=[*source.rest]) for source in state.sources]
        self._memory = {result.row: result for result in state.memory}
        self._filtered = set(state.filtered)
        self._pending = {step: [*results] for step, results in state.pending}
        self._chosen = {step: self._resized(step, rows) for step, rows in state.chosen}
        self._next_step = max(self._chosen, default=schedule.first_step - 1) + 1

    def rows(self, span: PromptRange) -> tuple[int, ...]:
        """Return the rows of prompts of a step. Steps are requested in order."""
        while self._next_step <= span.step:
            self._choose(self._next_step)
            self._next_step += 1
        first = self.schedule.span(span.step).start
        return self._chosen[span.step][span.start - first : span.stop - first]

    def record(self, step: int, results: Iterable[PromptResult]) -> None:
        """Add results of a step."""
        first, limit = self.schedule.span(step).start, self.rules.pass_reward
        for prompt, rewards, n_right in results:
            n_passed = sum(reward > limit for reward in rewards) if n_right is None else n_right
            mean = fsum(rewards) / len(rewards)
            result = RowResult(self._chosen[step][prompt - first], prompt, len(rewards), n_passed, mean)
            self._pending.setdefault(step, []).append(result)

    def finish(self, step: int) -> dict[str, float]:
        """Forget the rows of a finished step, and return its metrics."""
        rules, span = self.rules, self.schedule.span(step)
        chosen, own = self._chosen.pop(step), span.stop - span.start
        metrics = dict[str, float]()
        if len(rules.names) > 1:
            counts = np.bincount(np.searchsorted(self._starts, chosen[:own], "right") - 1, minlength=len(self.sizes))
            metrics |= {f"prompts/source_{name}": n / own for name, n in zip(rules.names, counts.tolist(), strict=True)}
        if not rules.reads_rewards:
            return metrics
        known, now = dict(self._memory), self._pending.get(step, [])
        for number in sorted(number for number in self._pending if number <= step):
            known |= merged_results(self._pending[number])
        used = zip(self.sizes, self._sources, rules.shares_at(step), strict=True)
        n_out = sum(len(source.left_out - self._filtered) for source in self._sources)
        metrics["prompts/active"] = float(sum(n - len(source.left_out) for n, source, share in used if share > 0))
        metrics["prompts/left_out"] = float(n_out)
        metrics["prompts/filtered"] = float(len(self._filtered))
        metrics["prompts/unseen"] = float(sum(self.sizes) - len(known))
        if known:
            metrics["prompts/pass_rate"] = fsum(result.pass_rate for result in known.values()) / len(known)
        if now:
            metrics["prompts/all_right"] = sum(result.n_passed == result.n for result in now) / len(now)
            metrics["prompts/all_wrong"] = sum(result.n_passed == 0 for result in now) / len(now)
        return metrics

    def state(self, step: int) -> CurriculumState:
        """Return the state after ``step`` finished steps; results of later ones are computed again."""
        return CurriculumState(
            self.sizes,
            tuple(replace(source, rest=[*source.rest]) for source in self._sources),
            tuple(sorted(self._memory.values())),
            tuple(sorted(self._filtered)),
            tuple((s, tuple(sorted(results))) for s, results in sorted(self._pending.items()) if s < step),
            tuple((s, rows) for s, rows in sorted(self._chosen.items()) if s >= step),
        )

    def _resized(self, step: int, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the rows of a step of another schedule, in which it may have been the last and smaller."""
        span, n_replacements = self.schedule.span(step), self.schedule.batch_size * self.schedule.resamples
        own, n = rows[: len(rows) - n_replacements], span.stop - span.start
        return (*own[:n], *self._take(step, max(0, n - len(own))), *rows[len(own) :])

    def _choose(self, step: int) -> None:
        for number in sorted(number for number in self._pending if number <= step - self.lag):
            for row, result in merged_results(self._pending.pop(number)).items():
                source = self._sources[int(np.searchsorted(self._starts, row, "right")) - 1]
                self._memory[row] = result._replace(time=source.epoch)
        span = self.schedule.span(step)
        own = self._take(step, span.stop - span.start)
        self._chosen[step] = (*own, *self._replacements(step, own))

    def _take(self, step: int, n: int) -> list[int]:
        """Take the next ``n`` rows from the sources."""
        debts = [source.debt for source in self._sources]
        rows = []
        for number in draw_sources(self.rules.shares_at(step), debts, n):
            if not self._sources[number].rest:
                self._begin_epoch(number, step)
            rows.append(self._sources[number].rest.pop())
        for source, debt in zip(self._sources, debts, strict=True):
            source.debt = debt
        return rows

    def _begin_epoch(self, number: int, step: int) -> None:
        source, first, size = self._sources[number], self._starts[number], self.sizes[number]
        source.epoch += 1
        is_shuffled = self.shuffle and not (self.rules.is_sorted and source.epoch == 0)
        seed = self.seed if len(self.sizes) == 1 else stable_seed("source", self.seed, number)
        order = (first + epoch_order(seed, source.epoch, size, is_shuffled)).tolist()
        active = [row for row in order if row not in self._filtered]
        known = {row: self._memory[row] for row in active if row in self._memory}
        least = min(size, self.schedule.batch_size)
        limit = min(int(self.rules.max_filtered * len(active) + 1e-9), len(active) - least)
        means = {row: result.mean for row, result in known.items()}
        self._filtered |= {*filtered_rows(means, self.rules.filter_threshold, limit)}
        active = [row for row in active if row not in self._filtered]
        rates = {row: known[row].pass_rate for row in active if row in known and self._is_recent(known[row], source)}
        left_out = rows_outside(active, rates, self.rules.band_at(step), least)
        source.rest = [row for row in reversed(active) if row not in left_out]
        source.left_out = frozenset(order) - {*source.rest}

    def _is_recent(self, result: RowResult, source: SourceState) -> bool:
        """Return True if a result may still leave its row out of the epoch that begins."""
        return not self.rules.recheck_epochs or source.epoch - result.time <= self.rules.recheck_epochs

    def _replacements(self, step: int, own: Collection[int]) -> list[int]:
        """Return the replacement rows of a step: other active rows, by source, shuffled by (seed, step).

        They are repeated if there are too few; a source without other rows repeats the step's own ones.
        """
        n = self.schedule.batch_size * self.schedule.resamples
        if not n:
            return []
        order = np.random.default_rng(stable_seed("redraw", self.seed, step)).permutation(sum(self.sizes))
        left_out = [row for source in self._sources for row in source.left_out]
        active = order[~np.isin(order, left_out)]
        others = active[~np.isin(active, list(own))]
        by_source = []
        for start, stop in pairwise(self._starts):
            found = [part[(part >= start) & (part < stop)] for part in (others, active)]
            by_source.append(cycle((found[0] if len(found[0]) else found[1]).tolist()))
        return [next(by_source[k]) for k in draw_sources(self.rules.shares_at(step), [0.0] * len(self.sizes), n)]


def merged_results(results: Iterable[RowResult]) -> dict[int, RowResult]:
    """Return the results of a step by row."""
    found: dict[int, RowResult] = {}
    for result in sorted(results, key=lambda result: result.time):
        found[result.row] = found[result.row].merged(result) if result.row in found else result
    return found


def draw_sources(shares: Sequence[float], debts: list[float], n: int) -> list[int]:
    """Return the sources of the next ``n`` prompts, and update ``debts``: shares of all prompts minus prompts taken."""
    drawn = []
    for _ in range(n):
        debts[:] = [debt + share for debt, share in zip(debts, shares, strict=True)]
        drawn.append(next_source(shares, debts))
        debts[drawn[-1]] -= 1
    return drawn


def next_source(shares: Sequence[float], debts: Sequence[float]) -> int:
    """Return the source of the next prompt.

    ``debts`` count this prompt, which no source has taken yet. With constant shares of K sources no number of prompts
    deviates by more than 1 - 1 / (2K - 2) (Tijdeman 1980, The chairman assignment problem): of the sources with
    a debt of at least 1 / (2K - 2), the one that would first exceed the bound is next.
    """
    slack = 1 / max(1, 2 * len(shares) - 2)
    positive = [k for k, share in enumerate(shares) if share > 0]
    due = [k for k in positive if debts[k] >= slack - 1e-9]
    if not due:  # rounding, or shares that have changed
        return max(positive, key=lambda k: debts[k])
    return min(due, key=lambda k: (1 - slack - debts[k]) / shares[k])


def filtered_rows(means: Mapping[int, float], threshold: float, limit: int) -> list[int]:
    """Return at most ``limit`` rows whose mean reward exceeds the threshold, highest first, then by number."""
    above = [row for row, mean in means.items() if mean > threshold]
    return sorted(above, key=lambda row: (-means[row], row))[: max(0, limit)]


def rows_outside(order: Sequence[int], rates: Mapping[int, float], band: Band, least: int) -> set[int]:
    """Return the rows with a rate outside the band; the nearest to it stay if fewer than ``least`` would remain."""
    low, high = band
    distances = {row: max(low - rates[row], rates[row] - high) for row in order if row in rates}
    outside = sorted((row for row, distance in distances.items() if distance > 0), key=distances.__getitem__)
    n_returned = max(0, least - (len(order) - len(outside)))
    return {*outside[n_returned:]}
