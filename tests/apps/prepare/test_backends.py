"""Default types of models, and the library for quantized bases."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from realhf.api.config import GenerationConfig, LoraOptions, ModelSpec
from realhf.api.config.choices import CacheType, Quantization, WeightType
from realhf.api.config.preference import EnsembleConfig
from realhf.api.experiment import RoleSpec
from realhf.api.model_config import GatedDelta, Lora, ModelConfig
from realhf.apps.prepare.backends import decoding_type_problems, quantization_problems, resolve_dtypes, unserved_reason
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment


def test_models_that_vllm_does_not_serve() -> None:
    llama = ModelConfig("llama", 2, 8, 2, 2, 4, 8, 9, 16)
    hybrid = replace(llama, family="qwen3_next", delta=GatedDelta(1, 1, 4, 4, 4), delta_layers=(0,))
    assert unserved_reason(llama) is None
    assert "does not replace the weights of gpt_oss models" in str(unserved_reason(replace(llama, family="gpt_oss")))
    assert "qwen3_next models have recurrent states" in str(unserved_reason(hybrid))


@pytest.mark.parametrize("bf16", [False, True])
def test_every_role_has_a_dtype(bf16: bool) -> None:
    """Also a critic that starts as its actor, and the members of an ensemble, which have no options of their own."""
    for experiment in (
        PPOMathExperiment(actor=ModelSpec(path="m")),
        PPOExperiment(actor=ModelSpec(path="m"), rew=ModelSpec(path="r")),
        PPOExperiment(actor=ModelSpec(path="m"), ensemble=EnsembleConfig(members=["a", "b"])),
    ):
        resolve_dtypes(experiment, bf16)
        assert {spec.spec.bf16 for spec in experiment.roles().values()} == {bf16}


@pytest.mark.parametrize(
    "version, problem",
    [
        (None, "actor.lora.quantization=int4: torchao is not installed; pip install 'realhf[quantization]'"),
        (
            "0.9.0",
            "actor.lora.quantization=int4: torchao 0.9.0 is too old; pip install --upgrade 'realhf[quantization]'",
        ),
        ("0.12.1+cpu", "torchao 0.12.1+cpu is too old"),
        ("0.13.0", ""),
        ("0.18.0+git1234", ""),
        ("1.0.dev20270101", ""),
    ],
)
def test_a_quantized_base_needs_torchao(version: str | None, problem: str) -> None:
    def version_of(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    lora = LoraOptions(rank=4, quantization=Quantization.int4)
    roles = {"actor": RoleSpec(ModelSpec(lora=lora)), "critic": RoleSpec(ModelSpec(lora=LoraOptions(rank=4)))}
    assert problem in "".join(found := quantization_problems(roles, version_of)) and len(found) == bool(problem)
    assert quantization_problems({"critic": roles["critic"]}, version_of) == []


@pytest.mark.parametrize("dtype", [WeightType.bfloat16, WeightType.int8])
def test_types_that_no_decoding_step_reads(dtype: WeightType) -> None:
    sampling, llama = GenerationConfig(weight_dtype=dtype), ModelConfig("llama", 2, 32, 2, 2, 16, 64, 9, 16)
    graph = PPOMathExperiment(actor=ModelSpec(path="m")).graph()
    odd = replace(llama, hidden=24, head_dim=12, intermediate=50)
    option = f"gen.weight_dtype={dtype.value}"
    roles = {"actor": RoleSpec(ModelSpec(bf16=True))}
    assert decoding_type_problems(sampling, graph, {"actor": llama, "critic": odd}, roles, "cpu") == []
    for lora, reason in ((Lora(4), "adapters of a base in bfloat16"), (Lora(4, bits=8), "is quantized already")):
        (problem,) = decoding_type_problems(sampling, graph, {"actor": replace(llama, lora=lora)}, roles, "cpu")
        assert reason in problem
    (problem,) = decoding_type_problems(sampling, graph, {"actor": odd}, roles, "cpu")
    assert problem.startswith(f"{option}: the kernel of decoding computes no attention and no MLP of actor")
    (problem,) = decoding_type_problems(sampling, graph, {"actor": llama}, roles, "cuda")
    assert problem.endswith("are for CPUs; on GPUs set both to auto")
    cache = GenerationConfig(kv_cache_dtype=CacheType.bfloat16)
    assert decoding_type_problems(cache, graph, {"actor": odd}, roles, "cpu") == []
    assert decoding_type_problems(cache, graph, {"actor": odd}, roles, "cuda") == [problem]
    assert decoding_type_problems(GenerationConfig(), graph, {"actor": odd}, roles, "cuda") == []
