"""Chunks of layers per pipeline stage: which calls can have several, and which numbers the planner considers."""

from dataclasses import replace

from realhf.api.graph import MFC, Kind
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig

N_CHUNKS = 2
"""Number of chunks that the planner considers: more need more messages and save less."""


def chunk_problem(mfc: MFC, strategy: ParallelStrategy) -> str:
    """Return why a call cannot have several chunks of layers per stage, or an empty string."""
    if strategy.vpp == 1 or mfc.kind is not Kind.GENERATE:
        return ""
    return (f"{strategy}: a token of generation passes through every stage once, so stages have one chunk of layers; "
            f"nearest legal: {replace(strategy, vpp=1)}")  # fmt: skip


def common_chunks(mfc: MFC, strategy: ParallelStrategy) -> ParallelStrategy:
    """Return what a strategy for several calls means for one of them: generation has one chunk per stage."""
    return replace(strategy, vpp=1) if mfc.role is None or chunk_problem(mfc, strategy) else strategy


def chunk_layouts(mfc: MFC, layout: Layout, model: ModelConfig | None) -> list[Layout]:
    """Return a layout and, if a call trains a model in pipeline stages, its copy with several chunks in each."""
    strategy = layout.strategy
    if model is None or not mfc.is_train or strategy.pp == 1 or strategy.pp * N_CHUNKS > model.n_layers:
        return [layout]
    return [layout, Layout(layout.mesh, replace(strategy, vpp=N_CHUNKS))]
