"""What backends other than the native one cannot do, told before a launch."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from realhf.api.config import ExperimentConfig, GenerationConfig, ModelSpec
from realhf.api.config.choices import Backend, Device
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import RoleSpec
from realhf.api.graph import Graph

LOOK_S = 60.0


def server_problems(config: ExperimentConfig, plan: ExecutionPlan, sampling: GenerationConfig | None) -> list[str]:
    """Say why calls with ``backend=vllm`` would not run here."""
    if all(placement.backend is Backend.native for placement in plan.placements.values()):
        return []
    problems, python = [], config.vllm.python or sys.executable
    for option in ("kv_cache_gb", "slots", "timeout"):
        if (value := getattr(config.vllm, option)) <= 0:
            problems.append(f"vllm.{option} must be positive, got {value}")
    if sampling and truncates_distribution(sampling) and sampling.temperature not in (0.0, 1.0):
        problems.append("gen.top_p, gen.top_k and gen.min_new_tokens with backend=vllm need gen.temperature=1: of a "
                        "tempered distribution that is cut vLLM gives no log-probability before the cut")  # fmt: skip
    if why := _lacks_vllm(python):
        problems.append(f"backend=vllm: {python} cannot import vllm ({why}); install it there, or set vllm.python to "
                        "an interpreter that has it (make vllm makes one)")  # fmt: skip
    return problems


def resolve_dtypes(options: object, is_short: bool) -> None:
    """Decide ``bf16`` of every model that is named and leaves it open, in place: a run is told what it computes in."""
    if isinstance(options, ModelSpec):
        if options.bf16 is None and (options.path or options.config):
            options.bf16 = is_short
    elif is_dataclass(options):
        for field in fields(options):
            resolve_dtypes(getattr(options, field.name), is_short)
    elif isinstance(options, list):
        for option in options:
            resolve_dtypes(option, is_short)


def trainer_problems(graph: Graph, roles: Mapping[str, RoleSpec], device: str | None, launching: bool) -> list[str]:
    """Say why roles with a backend of their own cannot be trained by it."""
    problems = []
    for role, spec in roles.items():
        backend = spec.spec.backend
        name = f"{role}.backend={backend.value}"
        if backend is Backend.vllm:
            problems.append(f"{name}: it does nothing but generate; set it for a call, like {role}_gen.backend=vllm")
        if backend is not Backend.megatron or spec.starts_as is not None:  # that has its actor's options
            continue
        if graph.trainer(role) is None:
            problems.append(f"{name}: it does nothing but train, and no call trains {role}; leave it out")
        elif device == Device.cpu.value:
            problems.append(f"{name}: megatron-core trains on GPUs alone; the native backend trains on CPUs")
        elif launching and importlib.util.find_spec("megatron") is None:
            problems.append(f"{name}: megatron-core is not installed here; pip install 'realhf[megatron]'")
    return problems


def truncates_distribution(sampling: GenerationConfig) -> bool:
    """Tell whether tokens are drawn from less than the whole distribution."""
    return sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_new_tokens > 0


def _lacks_vllm(python: str) -> str:
    """Return why an interpreter has no vLLM; empty when it has."""
    look = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('vllm') and 'no such module')"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, text=True, timeout=LOOK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if found.returncode == 0 else (found.stderr.strip().splitlines() or ["it fails"])[-1]
