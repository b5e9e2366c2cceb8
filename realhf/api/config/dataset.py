"""Options of the dataset."""

from dataclasses import dataclass

from realhf.api.config.choices import OnBadRow
from realhf.api.config.option import opt


@dataclass
class DatasetConfig:
    path: str = opt("", "training data: a JSONL, JSON or Parquet file")
    max_prompt_len: int = opt(1024, "maximum prompt length in tokens")
    max_seqlen: int = opt(2048, "maximum length of prompt and response together in tokens (sft, rw)")
    train_bs_n_seqs: int = opt(128, "number of prompts per step")
    max_pairs_per_prompt: int = opt(2, "number of pairs sampled per prompt (rw, dpo)")
    max_responses: int = opt(5, "number of responses sampled per prompt from a ranked list (rw.type=ranked)")
    label_noise: float = opt(0.0, "fraction of training pairs whose chosen and rejected responses are swapped")
    eval_path: str = opt("", "held-out data file")
    eval_fraction: float = opt(0.0, "fraction of the rows of path that is held out")
    split_seed: int = opt(1, "seed of the held-out split and of label noise; use one value for a whole ensemble")
    on_bad_row: OnBadRow = opt(OnBadRow.error, "error: stop and name the invalid row; skip: count invalid rows")
    prompt_template: str = opt("{prompt}", "template of every prompt")
    shuffle: bool = opt(True, "shuffle every epoch, seeded")

    @property
    def holds_out(self) -> bool:
        return bool(self.eval_path or self.eval_fraction)
