"""The share of time that a run with failures spends on useful steps, and the checkpoint cadence that maximizes it.

Failures are a Poisson process. A checkpoint is copied while the workers wait, written during the next step, and counts
from the end of that step (system/master.py). Failures that depend on load or age, and failures of storage, are not
modelled.
"""

from dataclasses import dataclass
from math import exp, expm1, inf, sqrt


@dataclass(frozen=True)
class CheckpointTimes:
    """Seconds in which the workers copy their state and do nothing else, and seconds until the files are on disk."""

    copy_s: float
    write_s: float


@dataclass(frozen=True)
class FailureRate:
    """``mtbf_s`` is the mean time in seconds between failures of the whole run, ``down_s`` that from a failure to the
    first step after it. A failure during ``down_s`` makes the recovery start again.
    """

    mtbf_s: float
    down_s: float

    @property
    def mean_down_s(self) -> float:
        """Expected seconds until ``down_s`` seconds have passed without a failure."""
        return self.mtbf_s * _expm1(self.down_s / self.mtbf_s)


def checkpoint_overhead(step_s: float, times: CheckpointTimes) -> float:
    """Return the seconds by which a checkpoint delays the steps: the copy, and writing that outlasts the next step."""
    return times.copy_s + max(0.0, times.write_s - step_s)


def daly_interval(overhead_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints that minimize the time of a run, approximately.

    The higher-order estimate of Daly (2006, doi:10.1016/j.future.2004.11.016); its first term is Young's estimate
    (1974, doi:10.1145/361147.361115), sqrt(2 overhead mtbf).
    """
    ratio = overhead_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return sqrt(2 * overhead_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - overhead_s


def useful_share(step_s: float, cadence: int, times: CheckpointTimes, rate: FailureRate) -> float:
    """Return the expected share of the time of a long run that is spent on steps that never have to be repeated.

    ``cadence`` is the number of steps between checkpoints. The result is exact for steps of constant length, by renewal
    theory: a launch that lasts X seconds keeps ``cadence`` steps for every checkpoint that is complete by then. The
    first is complete after ``cadence`` steps, the copy, and the longer of a step and the writing; further ones follow
    after ``cadence`` steps and the overhead each. X is exponential, and every launch costs ``mtbf_s + mean_down_s``.
    """
    work = cadence * step_s
    first = work + times.copy_s + max(step_s, times.write_s)
    period = work + checkpoint_overhead(step_s, times)
    mean_checkpoints = exp(-first / rate.mtbf_s) / -expm1(-period / rate.mtbf_s)
    return work * mean_checkpoints / (rate.mtbf_s + rate.mean_down_s)


def scratch_share(total_s: float, rate: FailureRate) -> float:
    """Return the expected share of useful time of a run of ``total_s`` seconds that starts again after every failure.

    The mean time until ``total_s`` seconds pass without a failure is ``(mtbf + mean down) (exp(total / mtbf) - 1)``.
    """
    return total_s / ((rate.mtbf_s + rate.mean_down_s) * _expm1(total_s / rate.mtbf_s))


def best_cadence(step_s: float, times: CheckpointTimes, rate: FailureRate, n_steps: int) -> int:
    """Return the number of steps between checkpoints, at most ``n_steps``, with the largest ``useful_share``.

    The share has one maximum: with x = cadence step_s / mtbf_s, it is where x + exp(-x - overhead / mtbf_s) = 1, whose
    left side increases. The search starts at Daly's estimate of it.
    """
    share = lambda cadence: useful_share(step_s, cadence, times, rate)
    estimate = daly_interval(checkpoint_overhead(step_s, times), rate.mtbf_s) / step_s
    cadence = min(max(1, round(estimate)), n_steps)
    for direction in (-1, 1):
        while 1 <= cadence + direction <= n_steps and share(cadence + direction) > share(cadence):
            cadence += direction
    return cadence


@dataclass(frozen=True)
class CheckpointPlan:
    """A cadence in steps of ``step_s`` predicted seconds, the expected share of useful time, and the causes."""

    cadence: int
    share: float
    step_s: float
    times: CheckpointTimes
    rate: FailureRate

    def __str__(self) -> str:
        times, rate = self.times, self.rate
        return (f"every {self.cadence} steps ({_duration(self.cadence * self.step_s)}): {100 * self.share:.3g} % "
                f"useful time expected, with a failure every {_duration(rate.mtbf_s)} (planner.mtbf_hours), "
                f"{_duration(rate.down_s)} until a restart's first step, and checkpoints of {_duration(times.copy_s)} "
                f"to copy and {_duration(times.write_s)} to write")  # fmt: skip


def choose_checkpoints(step_s: float, times: CheckpointTimes, rate: FailureRate, n_steps: int) -> CheckpointPlan:
    """Return the best cadence of a run of ``n_steps`` steps."""
    cadence = best_cadence(step_s, times, rate, n_steps)
    return CheckpointPlan(cadence, useful_share(step_s, cadence, times, rate), step_s, times, rate)


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _expm1(x: float) -> float:
    return expm1(x) if x < 700 else inf
