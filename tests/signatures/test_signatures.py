"""The package's calls of torch, vLLM and megatron-core, compared with the signatures of the supported releases."""

from collections import defaultdict
from functools import cache

import pytest
from packaging.version import Version

from realhf.models.engine.in_vllm.realhf_server import engine_arguments
from tests.signatures.matching import mismatch
from tests.signatures.parameters import parsed
from tests.signatures.record import RECORD, read_records
from tests.signatures.targets import (
    ENGINE_ARGUMENTS,
    OTHER_RUNNERS,
    RELEASES,
    ROOT,
    SERVER,
    distribution,
    forbidden_names,
    returned_keys,
    uses,
)
from tests.signatures.uses import Arguments, Use

VLLM = "realhf/models/engine/vllm.py"
FIRST_VERSIONS = {
    # torch has it since 2.3, its stubs since 2.8
    "torch.distributed.TCPStore.check": "2.8",
    # ``has_grouped_kernel``
    "torch.nn.functional.grouped_mm": "2.10",
    # ``reads_spans``
    "torch.nn.attention.varlen.AuxRequest": "2.10",
    # only called for matrices that CPU kernels have packed, and this runner is for GPUs
    f"{OTHER_RUNNERS[0]}.reload_weights": "0.32",
}
"""Versions from which on a name is used. The comment names the guard."""

FIRST_WITH_ADAPTERS = Version("0.20")
"""The first vLLM that can restrict adapters to modules (``check_adapters_are_supported``)."""

VLLM_TURNS = "realhf/models/engine/vllm_turns.py"
MAX_BYTES = 300_000
CASES = [(package, version) for package, versions in RELEASES.items() for version in versions]
SERVER_OPTIONS = {"folder": "model", "dtype": "bfloat16", "tp": 2, "max_length": 4096, "slots": 64, "logprobs": "raw"}
RECORDS = read_records()


@cache
def uses_by_package() -> dict[str, list[Use]]:
    found = defaultdict(list)
    for use in uses():
        found[distribution(use.name)].append(use)
    return found


@pytest.mark.parametrize("package, version", CASES)
def test_names_and_arguments_exist(package: str, version: str) -> None:
    record, release = RECORDS[package][version], f"{package}=={version}"
    found = uses_by_package().get(package, [])
    applied = [use for use in found if Version(version) >= Version(FIRST_VERSIONS.get(use.name, "0"))]
    problems = sorted({reason for use in applied if (reason := mismatch(use, release, record))})
    assert not problems, "\n".join(["", *problems])


def test_calls_are_found() -> None:
    calls = {package: sum(use.arguments is not None for use in found) for package, found in uses_by_package().items()}
    assert calls["torch"] >= 500 and calls["vllm"] >= 10 and calls["megatron-core"] >= 10


@pytest.mark.parametrize("name, first", FIRST_VERSIONS.items())
def test_a_guard_is_for_a_name_that_an_older_version_lacks(name: str, first: str) -> None:
    package = distribution(name)
    assert any(use.name == name for use in uses_by_package()[package])
    older = [version for version in RELEASES[package] if Version(version) < Version(first)]
    assert older and all(RECORDS[package][version][name] is None for version in older)


@pytest.mark.parametrize("version", RELEASES["vllm"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_arguments_of_vllm(version: str, device: str) -> None:
    """``LLM`` passes the arguments that it does not have itself to ``EngineArgs``."""
    where, _ = returned_keys(SERVER, "engine_arguments")
    _, gpu = returned_keys(VLLM, "gpu_options") if device == "cuda" else ("", [])
    assert (len(gpu) >= 4) == (device == "cuda")
    adapter = {"max_rank": 16, "modules": ["q_proj"]} if Version(version) >= FIRST_WITH_ADAPTERS else None
    arguments = engine_arguments({**SERVER_OPTIONS, "device": device, "adapter": adapter, "gpu": dict.fromkeys(gpu)})
    assert ("lora_target_modules" in arguments) == (adapter is not None)
    record = RECORDS["vllm"][version]
    own = parsed((record["vllm.LLM"] or [])[0])
    passed_on = set(arguments) - {one.arg for one in (*own.args, *own.kwonlyargs)}
    call = Arguments(0, tuple(sorted(passed_on)), more_keywords=True)
    reason = mismatch(Use(where, ENGINE_ARGUMENTS, call), f"vllm=={version}", record)
    assert reason is None, reason


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_sampling_parameters_of_vllm(version: str) -> None:
    where, keywords = returned_keys(VLLM_TURNS, "sampling_options")
    assert "min_tokens" in keywords
    use = Use(where, "vllm.SamplingParams", Arguments(0, tuple(keywords)))
    reason = mismatch(use, f"vllm=={version}", RECORDS["vllm"][version])
    assert reason is None, reason


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_workers_of_vllm_have_no_attribute_of_our_extension(version: str) -> None:
    """vLLM refuses a worker extension with an attribute that its worker class has."""
    names = forbidden_names()
    assert len(names) >= 8
    assert not [name for name in names if RECORDS["vllm"][version][name] is not None]


def test_the_oldest_releases_are_the_lower_bounds() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    for package in ("torch", "megatron-core", "flash-attn", "torchao"):
        major, minor, *_ = Version(RELEASES[package][0]).release
        assert f'"{package}>={major}.{minor}"' in metadata, package


def test_the_documents_name_the_range_of_releases() -> None:
    backends = " ".join((ROOT / "docs/backends.md").read_text().split())
    compatibility = " ".join((ROOT / "docs/reference/compatibility.md").read_text().split())
    for package, versions in RELEASES.items():
        if len(versions) > 1:
            title = package.replace("vllm", "vLLM")
            assert f"{title} {versions[0]} to {versions[-1]}" in (backends if package == "vllm" else compatibility)


def test_the_record_is_small_and_has_exactly_these_releases() -> None:
    assert RECORD.stat().st_size < MAX_BYTES
    assert {package: tuple(versions) for package, versions in RECORDS.items()} == RELEASES
