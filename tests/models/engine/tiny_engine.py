"""Engines on tiny random models, and batches for them. Imported by gloo ranks: does not import transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import LRSchedule, ModelSpec, OptimizerConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Loss, Outputs
from realhf.models.engine.native import NativeEngine, build_engine
from realhf.plan.run_spec import model_config

VOCAB, STOP = 37, 1
FAMILIES = ("llama", "qwen2", "gpt2", "qwen3_5_text")
SGD_LIKE = {"lr": 1e-3, "gradient_clipping": 0.0, "lr_scheduler_type": LRSchedule.constant}


def engine_on(
    folder: Path,
    rank: int = 0,
    mesh: tuple[int, ...] = (0,),
    trained: bool = True,
    scalar: bool = False,
    optimizer: dict | None = None,
    device: str = "cpu",
    **options: Any,
) -> NativeEngine:
    """Return an engine with a folder's weights. Collective over the mesh."""
    spec = ModelSpec(str(folder), str(folder), init_critic_from_actor=scalar, **options)
    spec.optimizer = OptimizerConfig(**{**SGD_LIKE, **(optimizer or {})})
    layout = Layout(DeviceMesh(mesh), ParallelStrategy(dp=len(mesh)))
    groups = make_groups([mesh], rank) if len(mesh) > 1 and trained else {}
    role = RoleSpec(spec, scalar_head=scalar)
    return build_engine(
        model_config(role),
        role,
        ParallelContext(layout, rank, torch.device(device), groups),
        trained=trained,
        holds_weights=True,
        seed=3,
        total_steps=10,
        stop_ids=(STOP,),
        tokenizer_folder=None,
    )


def prompts_of(lengths: Sequence[int], numbers: Sequence[int] | None = None) -> SequenceBatch:
    """Return prompts of these lengths; their tokens depend on the number."""
    numbers = list(numbers or range(len(lengths)))
    rows = []
    for number, length in zip(numbers, lengths, strict=True):
        generator = torch.Generator().manual_seed(100 + number)
        rows.append(torch.randint(2, VOCAB, (length,), generator=generator))
    return SequenceBatch(tuple(RowId(n, PROMPT) for n in numbers), {"prompts": Column.of(rows)})


def rows_of(lengths: Sequence[int], per_prompt: int = 1, seed: int = 0, vocab: int = VOCAB) -> SequenceBatch:
    """Return training rows: tokens, and a mask of the tokens in the loss."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = tuple(RowId(i // per_prompt, i % per_prompt) for i in range(len(lengths)))
    batch = SequenceBatch(
        ids, {"tokens": Column(torch.randint(0, vocab, (total,), generator=generator), tuple(lengths))}
    )
    return batch.with_tokenwise("mask", torch.randint(0, 2, (total,), generator=generator).byte())


def nll(outputs: Outputs, batch: SequenceBatch) -> Loss:
    """Negative log-likelihood of the masked tokens."""
    mask = batch["mask"].bool()
    total = -outputs.logprobs(mask=mask).sum()
    return Loss(total, {"nll": (total.detach(), mask.sum())})


def counted(batch: SequenceBatch) -> float:
    return float(batch["mask"].sum()) if len(batch) else 0.0


def by_row(batch: SequenceBatch, key: str) -> dict[RowId, Tensor]:
    return dict(zip(batch.ids, batch.columns[key].rows(), strict=True))
