"""GRPO by TRL, as bench_peer.py asks for it: PYTHON benchmarks/peer_trl.py FOLDER STEPS THREADS ROWS

FOLDER holds model/ (with its tokenizer) and prompts.jsonl. ROWS are those of a backward pass. Prints the median of the
seconds of a step, the first of which is not counted. Runs in an environment of TRL's own: ``make bench-peer`` makes it.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

N_PROMPTS, N_ANSWERS, N_NEW = 16, 8, 64


class Stopwatch(TrainerCallback):
    """Notes how long every step took."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.perf_counter() - self.began)


def share_of_low_words(completions: list[str], **_: Any) -> list[float]:
    words = [[word for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in some) / max(1, len(some)) for some in words]


def main() -> None:
    folder, n_steps, n_threads, rows = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(n_threads)
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=rows, num_generations=N_ANSWERS,
        gradient_accumulation_steps=N_PROMPTS * N_ANSWERS // rows, max_completion_length=N_NEW, temperature=1.0,
        top_p=1.0, top_k=0, beta=0.0, learning_rate=1e-6, max_steps=n_steps, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", logging_strategy="no", gradient_checkpointing=False, disable_tqdm=True, seed=1,
    )  # fmt: skip
    watch = Stopwatch()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=share_of_low_words, args=config, callbacks=[watch],
        train_dataset=Dataset.from_list([{"prompt": line["prompt"]} for line in lines]),
    )  # fmt: skip
    trainer.train()
    print(json.dumps({"step_s": statistics.median(watch.steps[1:]), "steps": watch.steps}))


if __name__ == "__main__":
    main()
