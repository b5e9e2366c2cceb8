"""Engines for the vLLM tests; imported by gloo ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import ModelSpec, VllmConfig
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine import NativeEngine, VllmEngine, VllmLauncher, build_engine, with_vllm
from realhf.plan.run_spec import model_config

INTERPRETER = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
SINGLE = ParallelStrategy()
VOCAB = 24
OPTIONS = VllmConfig(python=str(INTERPRETER), timeout=180.0)


def engine_on(sums: Path, rank: int = 0, strategy: ParallelStrategy = SINGLE) -> NativeEngine:
    """Return an engine with a random model in shared memory."""
    return engine_of(ModelSpec(config=str(sums / "model"), init_from_scratch=True), rank, strategy)


def engine_of(spec: ModelSpec, rank: int = 0, strategy: ParallelStrategy = SINGLE) -> NativeEngine:
    """Return an engine in shared memory. Collective over the ranks of the strategy."""
    layout = Layout(DeviceMesh(tuple(range(strategy.world))), strategy)
    members = {layout.axis(axis, r) for axis in ("dp", "tp") for r in layout.mesh.ranks}
    groups = make_groups(sorted(m for m in members if len(m) > 1), rank)
    role = RoleSpec(spec)
    context = ParallelContext(layout, rank, groups=groups)
    return build_engine(model_config(role), role, context, trained=False, holds_weights=True, seed=3, total_steps=10,
                        stop_ids=(1,), tokenizer_folder=None, shared_name="actor")  # fmt: skip


def vllm_on(engine: NativeEngine, folder: Path, temperature: float = 1.0, pack: bool = True,
            **options: object) -> VllmEngine:  # fmt: skip
    launcher = VllmLauncher(replace(OPTIONS, pack=pack, **options), folder, folder.with_suffix(".log"), temperature)
    return with_vllm(engine, launcher)


def prompts_of(lengths: Sequence[int], first: int = 0) -> SequenceBatch:
    """Return prompts of these lengths, numbered from ``first``; their tokens depend on the number."""
    numbers = range(first, first + len(lengths))
    rows = [torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(100 + number))
            for number, length in zip(numbers, lengths, strict=True)]  # fmt: skip
    return SequenceBatch(tuple(RowId(n, PROMPT) for n in numbers), {"prompts": Column.of(rows)})
