"""Decoding and training of every model family against transformers, on one CPU thread.

    python benchmarks/bench_families.py [--rounds N] [FAMILY ...]

A random model of every family (width 256, four layers) decodes 16 rows of 32 + 48 tokens, and computes a training pass
(forward and backward) over 16 rows of 64 to 128 tokens. Both programs run in turns; a ratio is that of the medians.
transformers decodes with its cache and trains on a padded batch. The machine should be idle.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig as Sampling
from realhf.api.config import ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.process_groups import ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.plan.run_spec import model_config

VOCAB, N_ROWS, PROMPT_LEN, N_NEW = 2048, 16, 32, 48
LENGTHS = [64 + 4 * number for number in range(N_ROWS)]
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4,
         "intermediate_size": 704, "vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": 0,
         "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
GPT2 = {"n_embd": 256, "n_head": 8, "n_layer": 4, "vocab_size": VOCAB, "n_positions": 512}
HEADS, ROUTED = {"head_dim": 32}, {"num_experts_per_tok": 2, "moe_intermediate_size": 176}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
          "linear_value_head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": HEADS, "mistral": {}, "gemma": HEADS, "gpt2": {}, "gpt_neox": {}, "olmo2": {},
    "gemma2": {**HEADS, **WINDOWS, "query_pre_attn_scalar": 32}, "olmo3": WINDOWS,
    "gemma3_text": {**HEADS, **WINDOWS, "query_pre_attn_scalar": 32}, "phi3": {}, "glm": HEADS, "glm4": HEADS,
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.3}, "cohere2": WINDOWS, "seed_oss": HEADS,
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]}, "ministral": {**HEADS, **WINDOWS}, "ministral3": HEADS,
    "mixtral": {"intermediate_size": 176, "num_local_experts": 8},
    "qwen2_moe": {**ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 352},
    "qwen3_moe": {**ROUTED, **HEADS, "num_experts": 8},
    "olmoe": {"intermediate_size": 176, "num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**ROUTED, **HEADS, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "gpt_oss": {**HEADS, **WINDOWS, "intermediate_size": 176, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**ROUTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                    "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16,
                    "qk_nope_head_dim": 32, "v_head_dim": 32},
    "qwen3_next": {**ROUTED, **LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 176},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**ROUTED, **LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 176},
}  # fmt: skip


def models(family: str, folder: Path) -> tuple[PreTrainedModel, NativeEngine]:
    """Return the models of both programs, with the same random weights."""
    sizes = GPT2 if family == "gpt2" else SIZES
    torch.manual_seed(0)
    fields = {**sizes, **OWN[family]}
    if family == "gpt_neox":
        del fields["num_key_value_heads"]
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).eval()
    theirs.save_pretrained(folder)
    role = RoleSpec(ModelSpec(path=str(folder)))
    context = ParallelContext(Layout(DeviceMesh((0,)), ParallelStrategy()), 0)
    ours = build_engine(model_config(role), role, context, trained=True, holds_weights=True, seed=1, total_steps=10,
                        stop_ids=(), tokenizer_folder=None)  # fmt: skip
    return theirs, ours


def programs(theirs: PreTrainedModel, ours: NativeEngine) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCAB, (N_ROWS, PROMPT_LEN), generator=generator)
    rows = [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=2)
    options = GenerationConfig(max_new_tokens=N_NEW, min_new_tokens=N_NEW, do_sample=True, pad_token_id=2,
                               eos_token_id=None, bos_token_id=0)  # fmt: skip
    ids = tuple(RowId(number, PROMPT) for number in range(N_ROWS))
    batch = SequenceBatch(ids, {"prompts": Column.of(list(prompts))})

    def their_decoding() -> None:
        with torch.no_grad():
            theirs.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=options)

    def their_training() -> None:
        theirs.zero_grad()
        labels = padded.masked_fill(~mask, -100)
        theirs(padded, attention_mask=mask.long(), labels=labels, use_cache=False).loss.backward()

    def our_decoding() -> None:
        ours.generate(batch, Sampling(max_new_tokens=N_NEW, min_new_tokens=N_NEW, max_num_seqs=N_ROWS), 1, 1)

    def our_training() -> None:
        ours.params.zero_grad()
        tokens = torch.cat(rows)
        (-ours.model.logprobs(ours.model.hidden(tokens, LENGTHS), tokens, LENGTHS).sum() / len(tokens)).backward()

    return {"their decoding": their_decoding, "our decoding": our_decoding, "their training": their_training,
            "our training": our_training}  # fmt: skip


def seconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each function over rounds, after a first one."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if number:
                taken[name].append(time.perf_counter() - begin)
    return {name: median(some) for name, some in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(OWN))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(f"{'family':<12} {'decoding':>9} {'training':>9}   transformers / realhf")
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            taken = seconds(programs(*models(family, Path(folder))), arguments.rounds)
        ratios = (taken[f"their {kind}"] / taken[f"our {kind}"] for kind in ("decoding", "training"))
        print(f"{family:<12} {next(ratios):>8.2f}x {next(ratios):>8.2f}x   {json.dumps(taken)}", flush=True)


if __name__ == "__main__":
    main()
