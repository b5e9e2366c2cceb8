"""Which prompts of the data stream are those of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptRange:
    """Prompts of one step: positions ``start <= p < stop`` in the data stream."""

    step: int
    start: int
    stop: int


@dataclass(frozen=True)
class TrainSchedule:
    """Prompts per step, total prompts (the last step may be smaller), and total steps; starts at ``first_step``.

    A step may sample up to ``resamples`` additional batches of prompts; position numbers are reserved for them.
    """

    batch_size: int
    n_prompts: int
    n_steps: int
    first_step: int = 0
    resamples: int = 0

    @property
    def stride(self) -> int:
        """Difference of the first positions of consecutive steps."""
        return self.batch_size * (1 + self.resamples)

    def span(self, step: int) -> PromptRange:
        """Return the prompts of a step, without resampled ones."""
        start = step * self.stride
        return PromptRange(step, start, start + min(self.batch_size, self.n_prompts - step * self.batch_size))


def make_train_schedule(
    batch_size: int, n_rows: int, epochs: int, max_steps: int | None, resamples: int = 0
) -> TrainSchedule:
    """Return the schedule of ``epochs`` passes over ``n_rows`` rows, limited to ``max_steps`` steps."""
    total = n_rows * epochs
    steps = -(-total // batch_size)
    return TrainSchedule(batch_size, total, steps if max_steps is None else min(steps, max_steps), resamples=resamples)
