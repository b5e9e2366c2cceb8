"""The releases that are compared, and what a reader of the package's calls must know besides the code."""

import ast
from dataclasses import replace
from functools import cache

from realhf.ops.varlen import CACHED, SOURCES
from tests.signatures.uses import ROOT, Arguments, Use, uses_in

RELEASES = {
    "torch": ("2.5.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.15.0"),
    "vllm": ("0.16.0", "0.20.0", "0.32.0", "0.33.0"),
    "megatron-core": ("0.16.0", "0.16.1", "0.19.2"),
    "flash-attn": ("2.6.0.post1", "2.8.3.post2"),
    "flash-attn-4": ("4.0.0b36",),
    "torchao": ("0.13.0", "0.18.0"),
}
"""The oldest supported and the newest version of each package, and versions between them that differ."""

DISTRIBUTIONS = {
    "torch": "torch",
    "vllm": "vllm",
    "megatron": "megatron-core",
    "flash_attn.cute": "flash-attn-4",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn",
    "torchao": "torchao",
}
"""Distributions by the start of a dotted name. The first match counts."""

TOP_LEVEL = frozenset(name.split(".")[0] for name in DISTRIBUTIONS)

SERVER = "realhf/models/engine/in_vllm/realhf_server.py"
MANAGER = "vllm.lora.model_manager.LRUCacheLoRAModelManager"
RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
OBJECTS = {
    SERVER: {
        "self.llm": "vllm.LLM",
        "engine": "vllm.v1.engine.llm_engine.LLMEngine",
        "self.model_runner": RUNNER,
        "manager": MANAGER,
        "self.lora_request": "vllm.lora.request.LoRARequest",
        "result": "vllm.outputs.RequestOutput",
        "response": "vllm.outputs.CompletionOutput",
    },
    "realhf/models/engine/megatron.py": {
        "self._ddp": "megatron.core.distributed.DistributedDataParallel",
        "self._outer": "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        "buffer": "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer",
    },
    "realhf/models/engine/decode/cuda_graphs.py": {
        "captured.graph": "torch.cuda.CUDAGraph",
        "stream": "torch.cuda.Stream",
    },
    "realhf/models/engine/optimizer_offload.py": dict.fromkeys(("current", "loads", "stores"), "torch.cuda.Stream"),
    "realhf/comm/process_groups.py": {"self._store": "torch.distributed.TCPStore"},
    "realhf/comm/p2p.py": {"send.work": "torch.distributed.Work"},
    "realhf/comm/exchange.py": {"bucket.work": "torch.distributed.Work"},
}
"""Classes of expressions, by file: their methods are checked, too."""

OTHER_RUNNERS = (
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
)
"""vLLM selects the class of a worker's ``model_runner`` by the device and the model."""

WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")
OWN = "torch.ops.realhf"
"""Operators of this package."""

ENGINE_ARGUMENTS = "vllm.engine.arg_utils.EngineArgs"
ADAPTER_PRODUCT = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU.add_lora_linear"
DISPATCH = "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm"
EXPECTED = [
    Use(SERVER, ENGINE_ARGUMENTS),
    Use(SERVER, "vllm.logprobs.Logprob.logprob"),
    # the server replaces this function by one with these parameters
    Use(SERVER, DISPATCH, Arguments(2)),
    Use(SERVER, DISPATCH, Arguments(1, ("remove_weight",))),
    Use(SERVER, ADAPTER_PRODUCT, Arguments(6, more_keywords=True)),
    Use(SERVER, "vllm.lora.lora_model.LoRAModel.loras"),
    Use(SERVER, "vllm.lora.worker_manager.WorkerLoRAManager._adapter_manager"),
    *[
        Use(SERVER, f"vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA.{name}")
        for name in ("base_layer", "lora_a_stacked", "lora_b_stacked")
    ],
    Use("realhf/models/engine/vllm_weights.py", "torch.UntypedStorage._share_cuda_", Arguments(0)),
    *[Use(SERVER, f"{worker}.{name}") for worker in WORKERS for name in ("model_runner", "rank")],
]
"""Uses that the syntax does not show."""

KERNELS = tuple(f"{module}.{name}" for module, name, *_ in SOURCES)
CACHED_KERNELS = tuple(f"{module}.{CACHED}" for module, *_ in SOURCES if module.startswith("flash_attn"))
"""Functions that ``ops/varlen.py`` imports by name."""

FOR_LATER = ("flash_attn.cute.flash_attn_varlen_func",)
"""FlashAttention 4, which is recorded, but not called yet."""


def distribution(name: str) -> str:
    return next(package for start, package in DISTRIBUTIONS.items() if f"{name}.".startswith(f"{start}."))


@cache
def uses() -> tuple[Use, ...]:
    """Return what the package uses of other packages."""
    found = list(EXPECTED)
    for file in sorted((ROOT / "realhf").rglob("*.py")):
        for use in uses_in(file, TOP_LEVEL, OBJECTS.get(file.relative_to(ROOT).as_posix(), {})):
            if use.name.startswith(OWN):
                continue
            found.append(use)
            if use.name.startswith(f"{RUNNER}."):
                found += [replace(use, name=use.name.replace(RUNNER, runner)) for runner in OTHER_RUNNERS]
    return tuple(found)


def forbidden_names() -> list[str]:
    """Return the attributes of vLLM's workers that must not exist: vLLM adds those of our class to its own class."""
    tree = ast.parse((ROOT / SERVER).read_text())
    receiver = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "WeightReceiver")
    bound = [one for node in receiver.body for one in bound_names(node)]
    return [f"{worker}.{name}" for worker in WORKERS for name in bound]


def bound_names(statement: ast.stmt) -> list[str]:
    """Return the attributes that a statement of a class body creates; an annotation alone creates none."""
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def returned_keys(file: str, function: str) -> tuple[str, list[str]]:
    """Return the location of a function of the package, and the keys of the dictionary that it returns."""
    tree = ast.parse((ROOT / file).read_text())
    (found,) = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == function]
    returned = [one.value for one in ast.walk(found) if isinstance(one, ast.Return)]
    keys = [key for value in returned if isinstance(value, ast.Dict) for key in value.keys]
    return f"{file}:{found.lineno}", [str(key.value) for key in keys if isinstance(key, ast.Constant)]
