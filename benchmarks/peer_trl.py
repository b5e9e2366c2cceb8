"""Runs a TRL trainer for bench_trl.py.

    PYTHON benchmarks/peer_trl.py SUBJECT FOLDER STEPS THREADS PROMPTS ROWS [by_length]

FOLDER contains model/ (with its tokenizer), reward/, prompts.jsonl, rows.jsonl and pairs.jsonl; ROWS is the number of
rows per pass. Prints the median seconds per step, without the first. Runs in a separate environment with TRL.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
N_PROMPTS = int(sys.argv[5])
N_RESPONSES, N_NEW = 8, 64
COMMON = {
    "learning_rate": 1e-6, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "seed": 1,
    "logging_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True,
}  # fmt: skip


class Stopwatch(TrainerCallback):
    """Records step times, from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.ended = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        before, self.ended = self.ended, time.perf_counter()
        if before:
            self.steps.append(self.ended - before)


def share_of_low_words(completions: list[str], **_: Any) -> list[float]:
    words = [[word for word in text.split() if word.startswith("w")] for text in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in some) / max(1, len(some)) for some in words]


def language_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def grpo(folder: Path, steps: int, rows: int, tokenizer: Any, watch: Stopwatch, peft_config: Any = None) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=rows, num_generations=N_RESPONSES, max_steps=steps,
        gradient_accumulation_steps=N_PROMPTS * N_RESPONSES // rows, max_completion_length=N_NEW, temperature=1.0,
        top_p=1.0, top_k=0, beta=0.0, **COMMON,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": line["prompt"]} for line in read(folder / "prompts.jsonl")])
    return GRPOTrainer(model=language_model(folder), processing_class=tokenizer, reward_funcs=share_of_low_words,
                       args=config, callbacks=[watch], train_dataset=data, peft_config=peft_config)  # fmt: skip


def lora(folder: Path, steps: int, rows: int, tokenizer: Any, watch: Stopwatch) -> Any:
    from peft import LoraConfig

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return grpo(folder, steps, rows, tokenizer, watch, adapters)


def ppo(folder: Path, steps: int, rows: int, tokenizer: Any, watch: Stopwatch) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    batch = N_PROMPTS * N_RESPONSES
    config = PPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=rows, gradient_accumulation_steps=batch // rows,
        total_episodes=steps * batch, num_ppo_epochs=1, num_mini_batches=1, local_rollout_forward_batch_size=rows,
        response_length=N_NEW, stop_token="eos", temperature=1.0, num_sample_generations=0, **COMMON,
    )  # fmt: skip
    texts = [line["prompt"] for line in read(folder / "prompts.jsonl")[: steps * N_PROMPTS]]
    data = Dataset.from_list([{"input_ids": tokenizer(t)["input_ids"]} for t in texts for _ in range(N_RESPONSES)])
    scorers = [AutoModelForSequenceClassification.from_pretrained(folder / "reward", num_labels=1) for _ in range(2)]
    return PPOTrainer(args=config, processing_class=tokenizer, model=language_model(folder), train_dataset=data,
                      ref_model=language_model(folder), reward_model=scorers[0], value_model=scorers[1],
                      eval_dataset=data.select(range(8)), callbacks=[watch])  # fmt: skip


def sft(folder: Path, steps: int, rows: int, tokenizer: Any, watch: Stopwatch, *by_length: str) -> Any:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=rows, max_steps=steps, **COMMON,
        gradient_accumulation_steps=N_PROMPTS * N_RESPONSES // rows, max_length=512,
        train_sampling_strategy="group_by_length" if by_length else "random",
    )  # fmt: skip
    data = [{"prompt": row["prompt"], "completion": row["answer"]} for row in read(folder / "rows.jsonl")]
    return SFTTrainer(model=language_model(folder), processing_class=tokenizer, args=config, callbacks=[watch],
                      train_dataset=Dataset.from_list(data))  # fmt: skip


def rw(folder: Path, steps: int, rows: int, tokenizer: Any, watch: Stopwatch) -> Any:
    from trl import RewardConfig, RewardTrainer

    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "reward", num_labels=1)
    config = RewardConfig(**of_pairs(folder, steps, rows))
    return RewardTrainer(model=scorer, processing_class=tokenizer, args=config, callbacks=[watch],
                         train_dataset=Dataset.from_list(read(folder / "pairs.jsonl")))  # fmt: skip


def dpo(folder: Path, steps: int, rows: int, tokenizer: Any, watch: Stopwatch) -> Any:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**of_pairs(folder, steps, rows))
    return DPOTrainer(model=language_model(folder), processing_class=tokenizer, args=config, callbacks=[watch],
                      train_dataset=Dataset.from_list(read(folder / "pairs.jsonl")))  # fmt: skip


def of_pairs(folder: Path, steps: int, rows: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"), "per_device_train_batch_size": rows // 2, "max_steps": steps,
        "gradient_accumulation_steps": N_PROMPTS * N_RESPONSES // rows, "max_length": 512, **COMMON,
    }  # fmt: skip


TRAINERS = {"grpo": grpo, "lora": lora, "ppo": ppo, "sft": sft, "rw": rw, "dpo": dpo}


def main() -> None:
    subject, folder = sys.argv[1], Path(sys.argv[2])
    steps, threads, rows = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[6])
    torch.set_num_threads(threads)
    tokenizer, watch = AutoTokenizer.from_pretrained(folder / "model", padding_side="left"), Stopwatch()
    TRAINERS[subject](folder, steps, rows, tokenizer, watch, *sys.argv[7:]).train()
    print(json.dumps({"step_s": statistics.median(watch.steps), "steps": watch.steps}))


if __name__ == "__main__":
    main()
