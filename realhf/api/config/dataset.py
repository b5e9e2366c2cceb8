"""Options of the dataset."""

from dataclasses import dataclass

from realhf.api.config.choices import OnBadRow
from realhf.api.config.option import (
    COUNT,
    DATA,
    DECAY,
    FINITE,
    FRACTION,
    NATURAL,
    NON_NEGATIVE,
    SEED,
    Range,
    opt,
)


@dataclass
class CurriculumConfig:
    min_pass_rate: float = opt(0.0, "prompts whose responses pass less often are left out of the next epochs", FRACTION)
    max_pass_rate: float = opt(1.0, "prompts whose responses pass more often are left out of the next epochs", FRACTION)
    recheck_epochs: int = opt(2, "epochs for which a prompt is left out before it is tried again, 0: all", NATURAL)
    pass_reward: float = opt(0.0, "a response passes if its reward is larger; math and code: if it is correct", FINITE)
    sort_by: str = opt("", "column of numbers by which the first epoch is sorted, smallest first")
    ramp_steps: int = opt(0, "steps in which pass rates and weights change linearly to the final ones", NATURAL)
    final_min_pass_rate: float | None = opt(None, "min_pass_rate after ramp_steps steps", FRACTION)
    final_max_pass_rate: float | None = opt(None, "max_pass_rate after ramp_steps steps", FRACTION)
    final_weights: list[float] = opt(list, "dataset.weights after ramp_steps steps", NON_NEGATIVE)


@dataclass
class DatasetConfig:
    path: str = opt("", "training data: a file, or FOLDER or ORG/NAME[@revision] with [:config[:split]]", DATA)
    paths: list[str] = opt(list, "several sources of training data instead of path, mixed by weights", DATA)
    weights: list[float] = opt(list, "relative weight of each of paths (default: its number of rows)", NON_NEGATIVE)
    columns: dict[str, str] = opt(dict, "new names of columns, such as {question: prompt}")
    max_prompt_len: int = opt(1024, "maximum prompt length in tokens", COUNT)
    max_seqlen: int = opt(2048, "maximum length of prompt and response together in tokens (sft, rw)", COUNT)
    train_bs_n_seqs: int = opt(128, "number of prompts per step", COUNT)
    max_pairs_per_prompt: int = opt(2, "number of pairs sampled per prompt (rw, dpo)", COUNT)
    max_responses: int = opt(5, "responses per ranked list (rw.type=ranked)", Range(2, 2**31 - 1))
    label_noise: float = opt(0.0, "fraction of training pairs with swapped responses", FRACTION)
    eval_path: str = opt("", "held-out data", DATA)
    eval_fraction: float = opt(0.0, "fraction of the rows of path that is held out", DECAY)
    split_seed: int = opt(1, "seed of the held-out split and of label noise; use one value for a whole ensemble", SEED)
    on_bad_row: OnBadRow = opt(OnBadRow.error, "error: stop and name the invalid row; skip: count invalid rows")
    prompt_template: str = opt("{prompt}", "template of every prompt")
    shuffle: bool = opt(True, "shuffle every epoch, seeded")
    curriculum: CurriculumConfig = opt(CurriculumConfig, "choice of prompts by earlier results, and by step")

    @property
    def holds_out(self) -> bool:
        return bool(self.eval_path or self.eval_fraction)

    @property
    def sources(self) -> list[str]:
        """The paths of the training data."""
        return self.paths or [self.path]
