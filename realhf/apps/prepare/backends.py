"""Pre-launch checks of the vLLM and Megatron backends."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from realhf.api.config import ExperimentConfig, GenerationConfig, ModelSpec
from realhf.api.config.choices import Backend, Device, WeightType
from realhf.api.config.option import AUTO, leaves
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import RoleSpec
from realhf.api.graph import Graph, Kind
from realhf.api.model_config import ModelConfig
from realhf.arch.decode_kernel import fuses_some
from realhf.base.errors import UserError
from realhf.launch import launches_elsewhere
from realhf.plan.machines.processor import has_bf16_products
from realhf.plan.run_spec import RunSpec

IMPORT_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 120.0
BF16_GAIN = 0.8  # the rounding is worth this part of the time of products
NOT_RELOADED = ("gpt_oss",)
"""Families whose loader in vLLM 0.32 cannot be used a second time."""
MIN_TORCHAO = 0, 13


def vllm_problems(
    config: ExperimentConfig,
    plan: ExecutionPlan,
    sampling: GenerationConfig | None,
    graph: Graph,
    models: Mapping[str, ModelConfig],
) -> list[str]:
    """Return reasons why calls with ``backend=vllm`` cannot run on this machine."""
    served = [name for name, placement in plan.placements.items() if placement.backend is Backend.vllm]
    if not served:
        return []
    problems = []
    for name in served:
        model = models.get(graph[name].role or "")
        if model is not None and (reason := unserved_reason(model)):
            problems.append(f"{name}.backend=vllm: {reason}; set {name}.backend=native")
    python = config.vllm.python or sys.executable
    truncates = sampling and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_new_tokens > 0)
    if sampling and truncates and sampling.temperature not in (0.0, 1.0):
        problems.append("gen.top_p, gen.top_k and gen.min_new_tokens with backend=vllm need gen.temperature=1: vLLM "
                        "returns no log-probs before truncation at another temperature")  # fmt: skip
    if sampling and sampling.prompt_lookup_num_tokens:
        problems.append("gen.prompt_lookup_num_tokens needs backend=native")
    if sampling and sampling.is_rounded:
        problems.append("gen.weight_dtype and gen.kv_cache_dtype need backend=native")
    if error := _import_error(python):
        problems.append(f"backend=vllm: {python} cannot import vllm ({error}); install it there, or set vllm.python to "
                        "an interpreter that has it (make vllm creates one)")  # fmt: skip
    return problems


def unserved_reason(model: ModelConfig) -> str | None:
    """Return why vLLM cannot generate with a model; None if it can."""
    if model.family in NOT_RELOADED:
        return f"vLLM does not replace the weights of {model.family} models"
    if model.delta_layers:
        return f"{model.family} models have recurrent states, which are not supported with vLLM"
    return None


def resolve_dtypes(options: Any, bf16: bool, instead_of: str | None = None) -> None:
    """Set ``bf16`` in place for every model that has no value, or this one: the stored config states the precision."""
    if isinstance(options, ModelSpec):
        if options.bf16 == instead_of and (instead_of or options.path or options.config):
            options.bf16 = bf16
    elif is_dataclass(options):
        ensemble, rew, critic = (getattr(options, name, None) for name in ("ensemble", "rew", "critic"))
        for model in (critic, rew if ensemble is not None and ensemble.members else None):
            if model is not None and model.bf16 == instead_of:  # it has the path of the actor, or those of the members
                model.bf16 = bf16
        for field in fields(options):
            resolve_dtypes(getattr(options, field.name), bf16, instead_of)
    elif isinstance(options, list):
        for option in options:
            resolve_dtypes(option, bf16, instead_of)


def choose_dtype(experiment: ExperimentConfig, models: Collection[ModelConfig], device: str | None) -> bool:
    """Replace ``bf16=auto`` in place by the faster type for the widest model; return True if there was one."""
    names = [name for name, option, value in leaves(experiment) if option.name == "bf16" and value == AUTO]
    if not names or not models or device is None:
        return False
    is_faster = device == Device.cuda.value
    if not is_faster:
        if launches_elsewhere(experiment):
            raise UserError(f"{names[0]}=auto measures this machine, but the run is on others; set {names[0]}")
        widest = max(models, key=lambda model: model.hidden)
        width = max(widest.intermediate, widest.expert_intermediate)
        float32, bfloat16 = product_seconds(widest.hidden, width, experiment.threads_per_worker or 1)
        is_faster = bfloat16 < BF16_GAIN * float32
        chosen, ratio = "bfloat16" if is_faster else "float32", bfloat16 / float32
        print(f"type    {', '.join(names)}: {chosen}; products of {widest.hidden} x {width} take {ratio:.2f} times as "
              "long in bfloat16")  # fmt: skip
    resolve_dtypes(experiment, is_faster, AUTO)
    return True


def run_warnings(run: RunSpec) -> list[str]:
    """Return the warnings of an experiment, and of a type that this machine computes slowly."""
    warnings = run.config.warnings()
    names = [name for name, option, value in leaves(run.config) if option.name == "bf16" and value is True]
    if names and run.device == Device.cpu.value and not has_bf16_products() and not launches_elsewhere(run.config):
        warnings.append(f"{names[0]}=True: this CPU has no instructions for bfloat16, in which products take several "
                        f"times as long as in float32; {names[0]}=auto measures them")  # fmt: skip
    return warnings


@cache
def product_seconds(hidden: int, intermediate: int, threads: int) -> tuple[float, float]:
    """Return the seconds of a model's largest products in float32 and in bfloat16 on this machine."""
    command = [sys.executable, "-m", "realhf.system.profiler.type_probe", *map(str, (hidden, intermediate, threads))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if done.returncode:
        raise UserError(f"bf16=auto: the measurement failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    float32, bfloat16 = json.loads(done.stdout.splitlines()[-1])
    return float32, bfloat16


def trainer_problems(graph: Graph, roles: Mapping[str, RoleSpec], device: str | None, launching: bool) -> list[str]:
    """Return reasons why roles cannot be trained by their backends."""
    problems = []
    for role, spec in roles.items():
        backend = spec.spec.backend
        name = f"{role}.backend={backend.value}"
        if backend is Backend.vllm:
            problems.append(f"{name}: vLLM only generates; set it for a call, like {role}_gen.backend=vllm")
        stage = spec.spec.zero_stage
        if stage == 3 and spec.spec.lora.rank and spec.starts_as is None:
            problems.append(f"{role}.zero_stage=3: the frozen weights below adapters are not sharded; set "
                            f"{role}.zero_stage=2, or {role}.lora.rank=0")  # fmt: skip
        if backend is not Backend.megatron or spec.starts_as is not None:  # starts_as: has the options of its actor
            continue
        if graph.trainer(role) is None:
            problems.append(f"{name}: megatron-core only trains, and no call trains {role}; remove the option")
        elif device == Device.cpu.value:
            problems.append(f"{name}: megatron-core requires GPUs; the native backend trains on CPUs")
        elif launching and importlib.util.find_spec("megatron") is None:
            problems.append(f"{name}: megatron-core is not installed; pip install 'realhf[megatron]'")
        if spec.spec.lora.rank:
            problems.append(f"{role}.lora.rank={spec.spec.lora.rank} requires {role}.backend=native")
        if stage != 1:
            problems.append(f"{role}.zero_stage={stage} requires {role}.backend=native")
        if spec.spec.optimizer.offload is True:
            problems.append(f"{role}.optimizer.offload=True requires {role}.backend=native")
    return problems


def decoding_type_problems(
    sampling: GenerationConfig | None,
    graph: Graph,
    models: Mapping[str, ModelConfig],
    roles: Mapping[str, RoleSpec],
    device: str | None,
) -> list[str]:
    """Return reasons why no decoding step of a model reads weights or a cache of the types of the options."""
    if sampling is None or not sampling.is_rounded:
        return []
    if device == Device.cuda.value:
        return ["gen.weight_dtype and gen.kv_cache_dtype are for CPUs; on GPUs set both to auto"]
    if sampling.weight_dtype is WeightType.auto:
        return []
    option, problems = f"gen.weight_dtype={sampling.weight_dtype.value}", []
    for role in sorted({mfc.role or "" for mfc in graph.mfcs if mfc.kind is Kind.GENERATE} & {*models}):
        lora = models[role].lora
        if not fuses_some(models[role]):
            problems.append(f"{option}: the kernel of decoding computes no attention and no MLP of {role}; set "
                            "gen.weight_dtype=auto")  # fmt: skip
        if lora is not None and lora.bits:
            problems.append(f"{option}: the base of {role} is quantized already ({role}.lora.quantization)")
        elif lora is not None and roles[role].spec.bf16:
            problems.append(f"{option}: adapters of a base in bfloat16 are not merged; set {role}.bf16=False")
    return problems


def quantization_problems(
    roles: Mapping[str, RoleSpec], version_of: Callable[[str], str] = importlib.metadata.version
) -> list[str]:
    """Return an error for a role with a quantized base if torchao is missing or too old."""
    quantized = [name for name, role in roles.items() if role.spec.lora.rank and role.spec.lora.quantization.bits]
    if not quantized:
        return []
    option = f"{quantized[0]}.lora.quantization={roles[quantized[0]].spec.lora.quantization.value}"
    try:
        version = version_of("torchao")
    except importlib.metadata.PackageNotFoundError:
        return [f"{option}: torchao is not installed; pip install 'realhf[quantization]'"]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_TORCHAO:
        return [f"{option}: torchao {version} is too old; pip install --upgrade 'realhf[quantization]'"]
    return []


def _import_error(python: str) -> str:
    code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('vllm') and 'no such module')"
    command = [python, "-c", code]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if result.returncode == 0 else (result.stderr.strip().splitlines() or ["unknown error"])[-1]
