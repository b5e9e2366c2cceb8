"""The same work by realhf and by Hugging Face on one machine, in turns: generation and a training step, on CPU.

    python benchmarks/bench_peer.py [decode] [train] [--rounds N] [--models tiny,small] [--threads N] [--bf16]

Peers are ``generate`` and a padded training step. 16 prompts with 8 answers each; an answer ends by a stop token (1 in
32) or after 64 tokens. Ratios hold on a shared machine, seconds do not: each figure is a median, and both take turns.
TRL's whole steps are in bench_trl.py.
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

N_PROMPTS, N_ANSWERS, N_NEW, MEAN = 16, 8, 64, 32
SIZES = {
    "tiny": (31, lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=352,
        vocab_size=512, max_position_embeddings=256, initializer_range=0.05,
    ))),
    "small": (42, lambda: LlamaForCausalLM(LlamaConfig(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1408,
        vocab_size=2048, max_position_embeddings=256, initializer_range=0.05,
    ))),
}  # fmt: skip
"""Mean length of a prompt, and the model; ``small`` has the sizes of a Qwen2, whose tokenizer would want more words."""


@dataclass(frozen=True)
class Contest:
    """A model twice: as Hugging Face computes it, and as we do."""

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
    def answers(self) -> list[Tensor]:
        """Answers of a step, of the lengths that sampling gives."""
        generator = torch.Generator().manual_seed(1)
        lengths = (1 + torch.empty(N_PROMPTS * N_ANSWERS).geometric_(1 / MEAN, generator=generator)).clamp(max=N_NEW)
        return [
            torch.randint(self.n_stops, self.ours.config.vocab, (n,), generator=generator)
            for n in lengths.long().tolist()
        ]


def contest(name: str, folder: Path, bf16: bool, share_as: str = "") -> Contest:
    torch.manual_seed(0)
    mean_prompt, build = SIZES[name]
    model = build()
    model.save_pretrained(folder)
    spec = ModelSpec(str(folder), bf16=bf16, optimizer=OptimizerConfig(lr=1e-4))
    layout = Layout(DeviceMesh((0,)), ParallelStrategy())
    config = read_hf_config(folder, scalar_head=False)
    context = ParallelContext(layout, 0)
    engine = build_engine(config, RoleSpec(spec), context, True, True, 1, 100, (), None, share_as)
    return Contest(name, model.to(torch.bfloat16 if bf16 else torch.float32), engine, mean_prompt)


def our_tokens(duel: Contest, seed: int) -> float:
    """Generate, and return how many tokens were drawn."""
    ids = tuple(RowId(i, PROMPT) for i in range(N_PROMPTS))
    prompts = SequenceBatch(ids, {"prompts": Column.of(duel.prompts)})
    sampling = GenerationConfig(max_new_tokens=N_NEW, stop_token_ids=list(range(duel.n_stops)))
    return float((duel.ours.generate(prompts, sampling, N_ANSWERS, seed)["prompt_mask"] == 0).sum())


def their_tokens(duel: Contest, seed: int) -> float:
    torch.manual_seed(seed)
    longest = max(map(len, duel.prompts))
    padded = torch.zeros(N_PROMPTS, longest, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(duel.prompts):
        padded[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    stops = list(range(duel.n_stops))
    with torch.no_grad():
        made = duel.theirs.generate(
            padded.repeat_interleave(N_ANSWERS, 0), attention_mask=mask.repeat_interleave(N_ANSWERS, 0), do_sample=True,
            top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=N_NEW, eos_token_id=stops, pad_token_id=0,
        )[:, longest:]  # fmt: skip
    ends = (made < duel.n_stops).int()  # padding is a stop token, too
    before = ends.cumsum(1) - ends
    return float((before == 0).sum())


def our_step(duel: Contest) -> None:
    """Train on the answers once: a policy gradient with a clipped ratio's shape."""
    rows = [torch.cat((duel.prompts[i // N_ANSWERS], answer)) for i, answer in enumerate(duel.answers)]
    ids = tuple(RowId(i // N_ANSWERS, i % N_ANSWERS) for i in range(len(rows)))
    masks = [torch.arange(len(row)) >= len(row) - len(a) for row, a in zip(rows, duel.answers, strict=True)]
    batch = SequenceBatch(ids, {"tokens": Column.of(rows)}).with_tokenwise("mask", torch.cat(masks).byte())

    def loss(outputs: Outputs, some: SequenceBatch) -> Loss:
        mask = some["mask"].bool()
        return Loss(-(outputs.logprobs() * mask).sum(), {})

    duel.ours.train(batch, loss, float(batch["mask"].sum()))


def their_step(duel: Contest, optimizer: torch.optim.Optimizer) -> None:
    rows = [torch.cat((duel.prompts[i // N_ANSWERS], answer)) for i, answer in enumerate(duel.answers)]
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    seen, counts = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for i, (row, answer) in enumerate(zip(rows, duel.answers, strict=True)):
        tokens[i, : len(row)] = row
        seen[i, : len(row)] = 1
        counts[i, len(row) - len(answer) : len(row)] = 1
    optimizer.zero_grad()
    for some in range(0, len(rows), 32):
        part = slice(some, some + 32)
        logits = duel.theirs(input_ids=tokens[part], attention_mask=seen[part]).logits[:, :-1]
        of_tokens = logits.float().log_softmax(-1).gather(2, tokens[part, 1:, None])[..., 0]
        (-(of_tokens * counts[part, 1:]).sum() / counts.sum()).backward()
    torch.nn.utils.clip_grad_norm_(duel.theirs.parameters(), 1.0)
    optimizer.step()


def in_turns(contestants: dict[str, Callable[[int], float]], rounds: int) -> dict[str, float]:
    """Return each one's median of what a second brings; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            begin = time.perf_counter()
            brought = run(number)
            found[name].append(brought / (time.perf_counter() - begin))
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}


def report(what: str, rates: dict[str, float], unit: str) -> None:
    ours, theirs = rates["realhf"], max(rate for name, rate in rates.items() if name != "realhf")
    shown = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
    print(f"{what:<24} {ours / theirs:5.2f} x   ({shown} {unit})", flush=True)


def decode(duel: Contest, rounds: int) -> None:
    rates = in_turns({"realhf": lambda i: our_tokens(duel, i), "generate": lambda i: their_tokens(duel, i)}, rounds)
    report(f"decode {duel.name}", rates, "tokens/s")


def train(duel: Contest, rounds: int) -> None:
    optimizer = torch.optim.AdamW(duel.theirs.parameters(), lr=1e-4, fused=True)

    def once(step: Callable[[], None]) -> Callable[[int], float]:
        def run(_: int) -> float:
            step()
            return 1.0

        return run

    rates = in_turns({"realhf": once(lambda: our_step(duel)), "padded": once(lambda: their_step(duel, optimizer))},
                     rounds)  # fmt: skip
    report(f"training step {duel.name}", rates, "steps/s")


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
                SUBJECTS[subject](contest(name, Path(folder), options.bf16), options.rounds)


if __name__ == "__main__":
    main()
