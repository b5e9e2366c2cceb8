"""Adapters that we save, loaded by vLLM itself."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from realhf.models.peft_folder import save_peft
from tests.models.test_low_rank import with_adapters
from tests.vllm.model import INTERPRETER

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
SCRIPT = """
import json, os, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    folder, tokens = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(f"{folder}/model", dtype="float32", enable_lora=True, max_lora_rank=8, skip_tokenizer_init=True,
              enforce_eager=True, max_model_len=128)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0)
    for adapter in (None, LoRARequest("adapter", 1, f"{folder}/adapter")):
        (out,) = llm.generate([{"prompt_token_ids": tokens}], sampling, lora_request=adapter)
        print("logprobs", [p[t].logprob for p, t in list(zip(out.prompt_logprobs, tokens))[1:]], flush=True)
    os._exit(0)  # an abort while vLLM is taken down says nothing about its results
"""


def test_vllm_computes_the_same_log_probabilities(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)).save_pretrained(tmp_path / "model")
    ours = with_adapters(tmp_path / "model")
    save_peft(tmp_path / "adapter", ours.config, ours.params.view, str(tmp_path / "model"), None)
    row = torch.randint(3, 90, (20,))
    with torch.no_grad():
        expected = ours.logprobs(ours.hidden(row, [20]), row, [20])[1:]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1",
                   "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # fmt: skip
    script = tmp_path / "script.py"  # vLLM's processes import the main module
    script.write_text(SCRIPT)
    command = [INTERPRETER, script, str(tmp_path), json.dumps(row.tolist())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    base, adapted = (
        torch.tensor(json.loads(line.removeprefix("logprobs ")))
        for line in done.stdout.splitlines()
        if line.startswith("logprobs ")
    )
    assert torch.allclose(adapted, expected, atol=1e-4) and not torch.allclose(base, expected, atol=1e-2)
