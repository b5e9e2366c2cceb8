"""Options of the dataset."""

from dataclasses import dataclass

from realhf.api.config.choices import OnBadRow
from realhf.api.config.option import COUNT, DATA, DECAY, FRACTION, SEED, Range, opt


@dataclass
class DatasetConfig:
    path: str = opt("", "training data: a file, or FOLDER or ORG/NAME[@revision] with [:config[:split]]", DATA)
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

    @property
    def holds_out(self) -> bool:
        return bool(self.eval_path or self.eval_fraction)
