"""Runs TRL's tool loop for bench_turns.py.

    PYTHON benchmarks/peer_turns.py FOLDER STEPS SECONDS

FOLDER contains model/ with its tokenizer. Prints the median seconds of a rollout (`GRPOTrainer._generate`), without the
first, the tokens per reply and the replies per episode. Runs in a separate environment with TRL.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template, qwen3_training_chat_template

N_PROMPTS, N_RESPONSES, N_TURNS = 16, 8, 4
SECONDS = float(sys.argv[3])


class Game:
    def reset(self, **row: Any) -> None:
        """Start."""

    async def move(self) -> str:
        """Make a move."""
        await asyncio.sleep(SECONDS)
        return "ok"


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = qwen3_training_chat_template, qwen3_template
    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=steps, num_generations=N_RESPONSES, beta=0.0, temperature=1.0,
        per_device_train_batch_size=N_PROMPTS * N_RESPONSES, max_completion_length=400, top_k=0, top_p=1.0,
        max_tool_calling_iterations=N_TURNS - 1, learning_rate=0.0, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", logging_strategy="no", gradient_checkpointing=False, disable_tqdm=True, seed=1,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"play {k}"}]} for k in range(N_PROMPTS * steps)])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"), processing_class=tokenizer, args=config,
        reward_funcs=lambda completions, **_: [float(len(one)) for one in completions], train_dataset=data,
        environment_factory=Game,
    )  # fmt: skip
    seconds, messages = list[float](), list[float]()
    inner = trainer._generate

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = inner(*args, **options)
        seconds.append(time.perf_counter() - began)
        completions = next(one for one in result if isinstance(one, list) and isinstance(one[0], list) and one[0]
                           and isinstance(one[0][0], dict))  # fmt: skip
        replies = [sum(message["role"] == "assistant" for message in one) for one in completions]
        messages.append(sum(replies) / len(replies))
        return result

    trainer._generate = timed
    trainer.train()
    print(json.dumps({"rollout_s": statistics.median(seconds[1:]), "turns": messages[-1]}))


if __name__ == "__main__":
    main()
