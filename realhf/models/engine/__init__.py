"""Engines: each implements the ``Engine`` protocol for one role's model."""

from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.vllm import VllmEngine, VllmLauncher, VllmServer, with_vllm

__all__ = ["NativeEngine", "VllmEngine", "VllmLauncher", "VllmServer", "build_engine", "with_vllm"]
