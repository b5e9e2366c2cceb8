"""Floor 5: backends. Each puts one role's model behind the ``Engine`` protocol."""

from realhf.models.engine.native import NativeEngine, build_engine
from realhf.models.engine.vllm import ServedEngine, Serving, VllmServer, served

__all__ = ["NativeEngine", "ServedEngine", "Serving", "VllmServer", "build_engine", "served"]
