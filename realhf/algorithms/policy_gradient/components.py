"""Entries of ``POLICY_LOSSES`` and ``ADVANTAGES``, and what the options of PPO derive from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from realhf.api.config import opt

if TYPE_CHECKING:
    from realhf.algorithms.policy_gradient.config import PPOConfig

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Component(Generic[Inputs, Result]):
    """A policy loss or an advantage estimator.

    ``fn`` takes the inputs and the component's section of options, an instance of ``options`` (None without options).
    ``doc`` is one line with the source; ``check`` returns one line per invalid option.
    """

    fn: Callable[[Inputs, Any], Result]
    doc: str
    options: type | None = None
    check: Callable[[PPOConfig], list[str]] = lambda ppo: []


def options_class(name: str, components: Mapping[str, Component]) -> type:
    """Return a dataclass with one section of options per component that has options."""
    return make_dataclass(name, [(key, c.options, opt(c.options, c.doc)) for key, c in components.items() if c.options])


def help_text(components: Mapping[str, Component]) -> str:
    return "; ".join(f"{name}: {component.doc}" for name, component in components.items())
