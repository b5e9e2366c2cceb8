"""Environments for multi-turn rollouts. A user's class imports ``Turn`` and ``Reply`` from here. Imports no torch."""
# ruff: noqa: F401  (re-exports)

from realhf.environments.types import Environment, Reply, ToolCall, Turn
