"""Probes of algorithms outside the model: their interfaces with a fake engine that does no work."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from realhf.algorithms import build_interface
from realhf.api.batch_meta import RowId
from realhf.api.graph import InterfaceSpec
from realhf.api.messages import Stats
from realhf.data.batch import SequenceBatch
from realhf.data.protocols import InterfaceContext, Limits, LossFn
from realhf.system.profiler.probes import Clock, Now, Probe
from realhf.system.row_store import RowStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCHES = ((4, 64), (16, 64), (64, 64), (16, 512), (128, 160))
VERIFIER_BATCHES = ((6, 0), (18, 0), (12, 400), (48, 100))
"""Rows and their length."""
TRAIN_COLUMNS = ("tokens", "prompt_mask", "logprobs", "ref_logprobs", "values", "truncated", "rewards")
METHODS: dict[str, tuple[str, ...]] = {
    "dpo/inference": ("tokens", "prompt_mask"),
    "dpo/train_step": ("tokens", "prompt_mask", "ref_logprob_sums"),
    "generation/generate": ("prompts",),
    "ppo_actor/generate": ("prompts",),
    "ppo_actor/inference": ("tokens", "prompt_mask"),
    "ppo_actor/train_step": TRAIN_COLUMNS,
    "ppo_critic/inference": ("tokens",),
    "ppo_critic/train_step": TRAIN_COLUMNS,
    "paired_rw/inference": ("tokens", "prompt_mask"),
    "reward_model/train_step": ("tokens",),
    "sft/train_step": ("tokens", "prompt_mask"),
    "verifier/inference": ("tokens", "prompt_mask", "row"),
}
"""Columns that each method of an interface reads."""
N_MINIBATCHES = 4
RESPONSES = (
    ("So we have 12 apples and 7 pears.\n#### 19", "#### 19"),
    (r"Therefore the answer is $\boxed{\frac{3}{4}}$.", r"\boxed{0.75}"),
    ("First add 27 and 58, that is 85. Then take 10 away.\nThe answer is 75.", "#### 72"),
    ("I do not know.", "#### 7"),
    (r"Hence $x = \boxed{x^2 + 1}$", r"\boxed{1 + x^2}"),
    ("#### 1,234", "#### 1234"),
    ("7.18 ?-29+ *262.2948*#\n0 #?4 + 5\n8 - 3 =?", "#### 72"),
    ("12-8*+2.36-86/25.*\n41+ 4", "#### 37"),
)
"""Maths responses and solutions: correct in the same or another form, wrong, or noise."""


@dataclass(frozen=True)
class FakeEngine:
    """An engine without a model: outputs are 0, and ``generate`` returns ``responses``."""

    responses: SequenceBatch
    version: int = 0

    @torch.no_grad()
    def forward(self, batch: SequenceBatch, fn: Callable[[Any, SequenceBatch], Tensor]) -> Tensor:
        return fn(ZeroOutputs(batch), batch)

    def train(
        self, batch: SequenceBatch, loss_fn: LossFn, count: float, limits: Limits | None = None, together: bool = False
    ) -> Stats:
        outputs: Any = ZeroOutputs(batch)
        loss = loss_fn(outputs, batch)
        loss.total.backward()
        return {name: (float(value), float(weight)) for name, (value, weight) in loss.stats.items()}

    def generate(
        self, prompts: SequenceBatch, config: object, n: int, seed: int, record_experts: bool = False
    ) -> SequenceBatch:
        return self.responses

    def reduce(self, sums: Tensor) -> Tensor:
        return sums


@dataclass(frozen=True)
class ZeroOutputs:
    batch: SequenceBatch

    @cached_property
    def zeros(self) -> Tensor:
        return torch.zeros_like(self.batch["tokens"], dtype=torch.float32, requires_grad=True)

    def logprobs(self, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return self.zeros * 1.0

    values = logprobs

    def last_values(self) -> Tensor:
        last = torch.tensor(self.batch.columns["tokens"].offsets[1:], device=self.zeros.device) - 1
        return self.zeros.index_select(0, last)


def algorithm_probes(clock: Clock, names: Sequence[str]) -> Iterator[Probe]:
    """Yield the probes of ``INTERFACE/METHOD`` names, including the worker's gathering and storing of rows."""
    tokenizer = byte_tokenizer()
    for name in names:
        kind, method = name.split("/")
        interface = build_interface(InterfaceSpec(kind), InterfaceContext(1, tokenizer, Path("."), 0))
        verifies = kind == "verifier"
        for rows, length in VERIFIER_BATCHES if verifies else BATCHES:
            store, ids = rows_to_verify(rows, length, tokenizer) if verifies else rows_of(rows, length, clock.device)
            engine = FakeEngine(_gathered(store, ids, ("tokens", "prompt_mask", "truncated")))
            tokens = sum(engine.responses.lengths("tokens"))  # equals the number of prompt tokens
            timer = time.perf_counter if verifies else clock  # verifiers run in other processes
            run = partial(_call, getattr(interface, method), engine, store, ids, name, timer)
            counts = {"call": 1.0, "row": float(rows), "token": float(tokens)}
            yield Probe(((f"interface/{name}", counts),), run, tokens + 1000.0)


def _call(
    call: Callable, engine: FakeEngine, store: RowStore, ids: Sequence[RowId], name: str, clock: Now
) -> list[float]:
    """Call a method of an interface as a worker does; return the seconds."""
    numbers = torch.tensor([i * N_MINIBATCHES // len(ids) for i in range(len(ids))])
    start = clock()
    batch = _gathered(store, ids, METHODS[name])
    if name.endswith("train_step"):
        call(engine, batch.with_scalars("minibatch", numbers), {})
    else:
        store.put(call(engine, batch, {})[0])
    return [clock() - start]


def _gathered(store: RowStore, ids: Sequence[RowId], keys: Sequence[str]) -> SequenceBatch:
    return SequenceBatch(tuple(ids), {key: store.gather(ids, key) for key in keys})


def rows_of(rows: int, length: int, device: torch.device) -> tuple[RowStore, list[RowId]]:
    """Return rows with all columns, whose first half is the prompt; every two rows are a pair of one prompt."""
    store, ids = RowStore(), [RowId(i // 2, i % 2) for i in range(rows)]
    tokens = torch.ones(length, dtype=torch.int64, device=device)
    mask = (torch.arange(length, device=device) < length // 2).byte()
    flag, number = torch.zeros(1, dtype=torch.uint8, device=device), torch.randn(1, device=device)
    shared = {"tokens": tokens, "prompts": tokens, "prompt_mask": mask, "truncated": flag, "rewards": number,
              "ref_logprob_sums": number}  # fmt: skip
    for row in ids:
        random = {key: torch.randn(length, device=device) for key in ("logprobs", "ref_logprobs", "values")}
        for key, value in (random | shared).items():
            store.put_value(row, key, value)
    return store, ids


def rows_to_verify(rows: int, length: int, tokenizer: "PreTrainedTokenizerFast") -> tuple[RowStore, list[RowId]]:
    store, ids = RowStore(), [RowId(i // 2, i % 2) for i in range(rows)]
    for i, row in enumerate(ids):
        response, solution = RESPONSES[i % len(RESPONSES)]
        reasoning = "Let us think about this step by step. " * (length // 38)
        tokens = torch.tensor(tokenizer.encode(f"How many of {i:<7}?\n{reasoning}{response}"))
        mask = (torch.arange(len(tokens)) < 20).byte()
        fields = torch.tensor(list(json.dumps({"solutions": [solution]}).encode()), dtype=torch.uint8)
        values = {"tokens": tokens, "prompt_mask": mask, "row": fields, "truncated": torch.zeros(1, dtype=torch.uint8)}
        for key, value in values.items():
            store.put_value(row, key, value)
    return store, ids


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast  # most workers do without its memory

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_, clean_up_tokenization_spaces=False)
