"""Options of data files."""

from dataclasses import dataclass

from realhf.api.config.choices import OnBadRow
from realhf.api.config.option import opt


@dataclass
class DatasetConfig:
    path: str = opt("", "file of rows: JSONL, a JSON list, or Parquet")
    max_prompt_len: int = opt(1024, "longest prompt, in tokens")
    max_seqlen: int = opt(2048, "longest prompt and answer together, in tokens (sft, rw)")
    train_bs_n_seqs: int = opt(128, "prompts per step")
    max_pairs_per_prompt: int = opt(2, "pairs drawn per prompt (rw, dpo)")
    max_responses: int = opt(5, "answers drawn per prompt from a ranked list (rw.type=ranked)")
    label_noise: float = opt(0.0, "share of training pairs whose chosen and rejected answers change places, for good")
    eval_path: str = opt("", "file of held-out rows")
    eval_fraction: float = opt(0.0, "share of the rows of path that is held out")
    split_seed: int = opt(1, "seed of held-out share and label noise, which all members of an ensemble have in common")
    on_bad_row: OnBadRow = opt(OnBadRow.error, "error names the row and stops; skip counts it")
    prompt_template: str = opt("{prompt}", "text around every prompt")
    shuffle: bool = opt(True, "a new seeded order every epoch")

    @property
    def holds_out(self) -> bool:
        """Whether rows are kept for evaluation."""
        return bool(self.eval_path or self.eval_fraction)
