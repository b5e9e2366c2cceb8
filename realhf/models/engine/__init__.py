"""Engines: each implements the ``Engine`` protocol for one role's model."""

from realhf.models.engine.frozen_base import FrozenBases
from realhf.models.engine.native import NativeEngine, build_engine, own_dtype
from realhf.models.engine.vllm import VllmEngine, VllmLauncher, VllmServer, with_vllm

__all__ = [
    "FrozenBases", "NativeEngine", "VllmEngine", "VllmLauncher", "VllmServer", "build_engine", "own_dtype", "with_vllm"
]  # fmt: skip
