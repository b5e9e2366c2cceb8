"""Generation and a training step of realhf against Hugging Face transformers, on CPU.

    python benchmarks/bench_peer.py [decode] [train] [--rounds N] [--models tiny,small] [--threads N] [--bf16]

The baselines are ``generate``, a padded training step, and one over packed rows (``position_ids`` tell transformers
where a row begins). 16 prompts with 8 responses each, which end by a stop token (1 in 32) or after 64 tokens. Figures
are medians; both run in turns. On a shared machine only ratios are meaningful. Whole steps of TRL are in bench_trl.py.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import GenerationConfig, ModelSpec, OptimizerConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.arch.hf_config import read_hf_config
from realhf.comm.process_groups import ParallelContext
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine.native import NativeEngine, build_engine

N_PROMPTS, N_RESPONSES, N_NEW, MEAN = 16, 8, 64, 32
TURN_S = 1.0
PACKED_SIZES = (128, 256, 512)
"""Tokens of a sequence of packed rows in transformers."""
SIZES = {
    "tiny": (31, lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=352,
        vocab_size=512, max_position_embeddings=256, initializer_range=0.05,
    ))),
    "small": (42, lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1408,
        vocab_size=2048, max_position_embeddings=256, initializer_range=0.05,
    ))),
    "135m": (31, lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152, max_position_embeddings=256, initializer_range=0.05, tie_word_embeddings=True,
    ))),
}  # fmt: skip
"""Mean prompt length, and the model.

``small`` has the sizes of a Qwen2 except for its vocabulary, ``135m`` those of SmolLM2-135M.
"""


@dataclass(frozen=True)
class ModelPair:
    """A model in Hugging Face transformers and in realhf."""

    name: str
    theirs: PreTrainedModel
    ours: NativeEngine
    mean_prompt: int

    @cached_property
    def prompts(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        lengths = [self.mean_prompt - N_PROMPTS // 2 + i for i in range(N_PROMPTS)]
        return [torch.randint(self.n_stops, self.ours.config.vocab, (n,), generator=generator) for n in lengths]

    @property
    def n_stops(self) -> int:
        return self.ours.config.vocab // MEAN

    @cached_property
    def responses(self) -> list[Tensor]:
        """Random responses with the length distribution of sampling."""
        generator = torch.Generator().manual_seed(1)
        lengths = (1 + torch.empty(N_PROMPTS * N_RESPONSES).geometric_(1 / MEAN, generator=generator)).clamp(max=N_NEW)
        return [
            torch.randint(self.n_stops, self.ours.config.vocab, (n,), generator=generator)
            for n in lengths.long().tolist()
        ]


def model_pair(name: str, folder: Path, bf16: bool, shared_name: str = "") -> ModelPair:
    torch.manual_seed(0)
    mean_prompt, build = SIZES[name]
    model = build()
    model.save_pretrained(folder)
    spec = ModelSpec(str(folder), bf16=bf16, optimizer=OptimizerConfig(lr=1e-4))
    layout = Layout(DeviceMesh((0,)), ParallelStrategy())
    config = read_hf_config(folder, scalar_head=False)
    context = ParallelContext(layout, 0)
    engine = build_engine(config, RoleSpec(spec), context, True, True, 1, 100, (), None, shared_name)
    return ModelPair(name, model.to(torch.bfloat16 if bf16 else torch.float32), engine, mean_prompt)


def our_tokens(pair: ModelPair, seed: int) -> float:
    """Generate, and return the number of sampled tokens."""
    ids = tuple(RowId(i, PROMPT) for i in range(N_PROMPTS))
    prompts = SequenceBatch(ids, {"prompts": Column.of(pair.prompts)})
    sampling = GenerationConfig(max_new_tokens=N_NEW, stop_token_ids=list(range(pair.n_stops)))
    return float((pair.ours.generate(prompts, sampling, N_RESPONSES, seed)["prompt_mask"] == 0).sum())


def their_tokens(pair: ModelPair, seed: int) -> float:
    torch.manual_seed(seed)
    longest = max(map(len, pair.prompts))
    padded = torch.zeros(N_PROMPTS, longest, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(pair.prompts):
        padded[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    stops = list(range(pair.n_stops))
    with torch.no_grad():
        made = pair.theirs.generate(
            padded.repeat_interleave(N_RESPONSES, 0), attention_mask=mask.repeat_interleave(N_RESPONSES, 0),
            do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=N_NEW, eos_token_id=stops,
            pad_token_id=0,
        )[:, longest:]  # fmt: skip
    ends = (made < pair.n_stops).int()  # padding is a stop token as well
    before = ends.cumsum(1) - ends
    return float((before == 0).sum())


def our_step(pair: ModelPair) -> None:
    """Train on the responses once, with a policy-gradient loss."""
    rows = [torch.cat((pair.prompts[i // N_RESPONSES], tokens)) for i, tokens in enumerate(pair.responses)]
    ids = tuple(RowId(i // N_RESPONSES, i % N_RESPONSES) for i in range(len(rows)))
    masks = [torch.arange(len(row)) >= len(row) - len(a) for row, a in zip(rows, pair.responses, strict=True)]
    batch = SequenceBatch(ids, {"tokens": Column.of(rows)}).with_tokenwise("mask", torch.cat(masks).byte())

    def loss(outputs: Outputs, some: SequenceBatch) -> Loss:
        mask = some["mask"].bool()
        return Loss(-(outputs.logprobs(1.0, mask) * mask).sum(), {})

    pair.ours.train(batch, loss, float(batch["mask"].sum()))


def their_step(pair: ModelPair, optimizer: torch.optim.Optimizer) -> float:
    """Train on padded rows, and return the loss."""
    rows = [torch.cat((pair.prompts[i // N_RESPONSES], tokens)) for i, tokens in enumerate(pair.responses)]
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    attended, trained = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for i, (row, response) in enumerate(zip(rows, pair.responses, strict=True)):
        tokens[i, : len(row)] = row
        attended[i, : len(row)] = 1
        trained[i, len(row) - len(response) : len(row)] = 1
    passes = [
        (tokens[some : some + 32], {"attention_mask": attended[some : some + 32]}, trained[some : some + 32])
        for some in range(0, len(rows), 32)
    ]
    return train_theirs(pair, optimizer, passes, int(trained.sum()))


def train_theirs(
    pair: ModelPair, optimizer: torch.optim.Optimizer, passes: list[tuple[Tensor, dict[str, Tensor], Tensor]], n: int
) -> float:
    """Make one update with a policy-gradient loss, and return the loss.

    A pass has tokens [B, T], inputs besides them, and which tokens are trained [B, T]; ``n`` are trained in total.
    """
    optimizer.zero_grad()
    total = 0.0
    for tokens, inputs, trained in passes:
        # a cache would hide from transformers that rows are packed
        logits = pair.theirs(input_ids=tokens, use_cache=False, **inputs).logits[:, :-1]
        of_tokens = logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        loss = -(of_tokens * trained[:, 1:]).sum() / n
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(pair.theirs.parameters(), 1.0)
    optimizer.step()
    return total


def their_packed_step(pair: ModelPair, optimizer: torch.optim.Optimizer, size: int) -> float:
    """Train on rows that are packed into sequences of ``size`` tokens, and return the loss."""
    bins: list[list[tuple[Tensor, int]]] = []
    rows = [(pair.prompts[i // N_RESPONSES], tokens) for i, tokens in enumerate(pair.responses)]
    for prompt, response in sorted(rows, key=lambda row: -sum(map(len, row))):
        entry = torch.cat((prompt, response)), len(response)
        fits = (some for some in bins if sum(len(tokens) for tokens, _ in some) + len(entry[0]) <= size)
        if (found := next(fits, None)) is None:
            bins.append([entry])
        else:
            found.append(entry)
    tokens, positions, trained = (torch.zeros(len(bins), size, dtype=torch.int64) for _ in range(3))
    for i, some in enumerate(bins):
        at = 0
        for row, n in some:
            end = at + len(row)
            tokens[i, at:end], positions[i, at:end], trained[i, end - n : end] = row, torch.arange(len(row)), 1
            at = end
        positions[i, at:] = torch.arange(size - at)
    per_pass = max(1, 2048 // size)
    passes = [
        (tokens[i : i + per_pass], {"position_ids": positions[i : i + per_pass]}, trained[i : i + per_pass])
        for i in range(0, len(bins), per_pass)
    ]
    return train_theirs(pair, optimizer, passes, int(trained.sum()))


def in_turns(functions: dict[str, Callable[[int], float]], rounds: int) -> dict[str, float]:
    """Return the median rate (result per second) of each function, without the first round.

    A turn is as many calls as take ``TURN_S``.
    """
    rates: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, run in functions.items():
            begin, result, seconds = time.perf_counter(), 0.0, 0.0
            while seconds < TURN_S:
                result += run(number)
                seconds = time.perf_counter() - begin
            rates[name].append(result / seconds)
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def report(subject: str, rates: dict[str, float], unit: str) -> None:
    ours, theirs = rates["realhf"], max(rate for name, rate in rates.items() if name != "realhf")
    shown = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
    print(f"{subject:<24} {ours / theirs:5.2f} x   ({shown} {unit})", flush=True)


def decode(pair: ModelPair, rounds: int) -> None:
    rates = in_turns({"realhf": lambda i: our_tokens(pair, i), "generate": lambda i: their_tokens(pair, i)}, rounds)
    report(f"decode {pair.name}", rates, "tokens/s")


def train(pair: ModelPair, rounds: int) -> None:
    optimizer = torch.optim.AdamW(pair.theirs.parameters(), lr=1e-4, fused=True)

    def once(step: Callable[[], object]) -> Callable[[int], float]:
        def run(_: int) -> float:
            step()
            return 1.0

        return run

    ours, padded = once(lambda: our_step(pair)), once(lambda: their_step(pair, optimizer))
    packed = {
        f"packed {size}": once(lambda size=size: their_packed_step(pair, optimizer, size)) for size in PACKED_SIZES
    }
    rates = in_turns({"realhf": ours, "padded": padded, **packed}, rounds)
    report(f"training step {pair.name}", {name: rate for name, rate in rates.items() if name not in packed}, "steps/s")
    report("    against packing", {name: rate for name, rate in rates.items() if name != "padded"}, "steps/s")


SUBJECTS = {"decode": decode, "train": train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), help="decode train")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default="tiny,small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for subject in options.subjects:
        for name in options.models.split(","):
            with tempfile.TemporaryDirectory() as folder:
                SUBJECTS[subject](model_pair(name, Path(folder), options.bf16), options.rounds)


if __name__ == "__main__":
    main()
