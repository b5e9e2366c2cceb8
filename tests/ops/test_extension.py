"""The packed_gae kernel against its reference implementation; building, loading and absence of the library."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.base import native
from realhf.ops import extension
from realhf.ops.gae import packed_gae, packed_gae_reference
from tests.scaling import examples

ROOT = Path(__file__).parents[2]
NOT_BUILT = "NATIVE KERNELS NOT BUILT, nothing tested: python setup.py build_ext --inplace"


@pytest.fixture(scope="module")
def gae():
    """The compiled packed_gae for CPUs."""
    kernel = extension.kernel("packed_gae", "cpu")
    if kernel is None:
        pytest.skip(NOT_BUILT)
    return kernel


def random_inputs(lengths, dtype=torch.float64, seed=0, device="cpu"):
    """Return random rewards and values, cu_seqlens, and truncation flags, set for every third row."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64).to(dtype).to(device)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return rewards, values, cu_seqlens, (torch.arange(len(lengths)) % 3 == 0).to(device)


def assert_near(result, expected, tolerance):
    """Compare advantages and returns, relative to the largest."""
    for a, b in zip(result, expected, strict=True):
        assert a.shape == b.shape
        scale = 1 + (float(b.abs().max()) if b.numel() else 0.0)
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * scale)


@settings(max_examples=examples(50))
@given(
    st.lists(st.integers(1, 300), max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**31),
    st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-6)]),
)
def test_kernel_matches_the_reference(gae, lengths, gamma, lam, seed, precision):
    dtype, tolerance = precision
    rewards, values, cu_seqlens, cut = random_inputs(lengths, dtype, seed)
    result = gae(rewards, values, cu_seqlens, cut, gamma, lam)
    assert {x.dtype for x in result} == {dtype}
    assert_near(result, packed_gae_reference(rewards.double(), values.double(), lengths, cut, gamma, lam), tolerance)
    assert_near(result, packed_gae_reference(rewards, values, lengths, cut, gamma, lam), tolerance)


def test_rows_are_bitwise_independent_of_threads_and_other_rows(gae):
    lengths = [1, 20_000, 3, 40_000, 1, 7, 9_000]
    rewards, values, cu_seqlens, cut = random_inputs(lengths, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(gae(rewards, values, cu_seqlens, cut, 0.999, 0.97))
    finally:
        torch.set_num_threads(threads)
    begin, end = cu_seqlens[3:5]
    alone = gae(rewards[begin:end], values[begin:end], torch.tensor([0, 40_000]), cut[3:4], 0.999, 0.97)
    for k in (0, 1):
        assert torch.equal(results[0][k], results[1][k]) and torch.equal(results[0][k], results[2][k])
        assert torch.equal(results[0][k][begin:end], alone[k])
    assert_near(results[0], packed_gae_reference(rewards.double(), values.double(), lengths, cut, 0.999, 0.97), 1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.999, 0.97)])
def test_small_advantages_of_large_values_are_exact(gae, gamma, lam):
    rewards, values, cu_seqlens, cut = random_inputs([5000], torch.float32)
    values += 1000
    expected = packed_gae_reference(rewards.double(), values.double(), [5000], cut, gamma, lam)
    assert_near(gae(rewards, values, cu_seqlens, cut, gamma, lam), expected, 1e-6)


def test_no_rows_and_rows_of_one_token(gae):
    assert [x.numel() for x in gae(*random_inputs([]), 1.0, 1.0)] == [0, 0]
    assert [x.tolist() for x in gae(*random_inputs([1, 1]), 1.0, 1.0)] == [[0, 0], [0, 0]]


def test_the_value_after_a_finished_row_is_not_read(gae):
    rewards, values = torch.ones(3), torch.tensor([1.0, 2.0, torch.inf])
    advantages, _ = gae(rewards, values, torch.tensor([0, 3]), torch.tensor([False]), 0.5, 0.5)
    assert advantages[2] == -1.0


def test_strided_arguments_and_int32_offsets_are_accepted_and_unchanged(gae):
    lengths = [5, 17, 1]
    _, _, cu_seqlens, cut = random_inputs(lengths)
    wide = random_inputs([2 * sum(lengths)])[:2]
    rewards, values, cut = wide[0][::2], wide[1][1::2], cut.repeat_interleave(2)[::2]
    kept = wide[0].clone(), wide[1].clone(), cut.clone()
    result = gae(rewards, values, cu_seqlens.int().repeat_interleave(2)[::2], cut, 0.9, 0.8)
    assert_near(result, packed_gae_reference(rewards, values, lengths, cut, 0.9, 0.8), 1e-12)
    assert torch.equal(wide[0], kept[0]) and torch.equal(wide[1], kept[1]) and torch.equal(cut, kept[2])
    flat = torch.zeros(1, dtype=torch.float64).expand(23)
    assert_near(gae(flat, values, cu_seqlens, cut, 0.9, 0.8), gae(flat.clone(), values, cu_seqlens, cut, 0.9, 0.8), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(4)}, r"must both be \[T\]"),
        ({"rewards": torch.zeros(5, dtype=torch.float64)}, "rewards must have the dtype of values"),
        ({"values": torch.zeros(5, dtype=torch.float16)}, "values must be float32 or float64"),
        ({"rewards": torch.zeros(1, 5), "values": torch.zeros(1, 5)}, r"must both be \[T\]"),
        ({"bootstrap": torch.zeros(3, dtype=torch.bool)}, r"bootstrap must be \[B\], 2 rows"),
        ({"bootstrap": torch.zeros(2)}, "bootstrap must be bool"),
        ({"cu_seqlens": torch.tensor([0, 2, 4])}, "from 0 to 5, the number of values, but runs from 0 to 4"),
        ({"cu_seqlens": torch.tensor([1, 2, 5])}, "runs from 1 to 5"),
        ({"cu_seqlens": torch.tensor([0, 5, 5])}, "row 1 of cu_seqlens runs from 5 to 5; a row has at least one token"),
        ({"cu_seqlens": torch.tensor([0, 9, 5])}, "row 1 of cu_seqlens runs from 9 to 5"),
        ({"cu_seqlens": torch.tensor([0.0, 2, 5])}, "must be int32 or int64"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, r"cu_seqlens must be \[B\+1\]"),
    ],
)
def test_invalid_arguments_are_errors(gae, change, message):
    fitting = {
        "rewards": torch.zeros(5),
        "values": torch.zeros(5),
        "cu_seqlens": torch.tensor([0, 2, 5]),
        "bootstrap": torch.zeros(2, dtype=torch.bool),
    }
    gae(**fitting, gamma=1.0, lam=1.0)
    with pytest.raises(RuntimeError, match=message):
        gae(**{**fitting, **change}, gamma=1.0, lam=1.0)


def test_the_kernel_passes_opcheck_and_compiles_without_graph_breaks(gae):
    arguments = (*random_inputs([4, 9, 1]), 0.9, 0.8)
    torch.library.opcheck(gae, arguments)

    def doubled(*given):
        advantages, returns = gae(*given)
        return 2 * advantages, 2 * returns

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(*arguments), doubled(*arguments), strict=True):
        assert torch.equal(a, b)


def test_unsupported_inputs_use_the_reference():
    lengths = [3, 5]
    rewards, values, _, cut = random_inputs(lengths)
    values.requires_grad_()
    packed_gae(rewards, values, lengths, cut, 0.9, 0.8)[0].sum().backward()
    assert values.grad is not None
    assert packed_gae(rewards.bfloat16(), values.detach().bfloat16(), lengths, cut, 0.9, 0.8)[0].dtype == torch.bfloat16


def test_the_library_is_available_if_it_has_kernels():
    assert extension.available() == bool(extension.kernels())
    assert extension.kernel("no_such_kernel", "cpu") is None
    assert (extension.kernel("packed_gae", "cpu") is None) == ("packed_gae:cpu" not in extension.kernels())


def load_copy(library, monkeypatch):
    """Import a copy of the loader that finds ``library``."""
    monkeypatch.setattr(native, "ensure", lambda _: library)
    spec = importlib.util.spec_from_file_location("extension_copy", extension.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_library_is_not_an_error(monkeypatch):
    module = load_copy(None, monkeypatch)
    assert not module.available() and module.kernels() == () and module.kernel("packed_gae", "cpu") is None


def test_a_broken_library_warns_once(tmp_path, monkeypatch):
    (tmp_path / "_C.so").write_bytes(b"not a library")
    module = load_copy(tmp_path / "_C.so", monkeypatch)
    with pytest.warns(UserWarning, match="_C.so does not load") as reports:
        assert not module.available() and not module.available() and module.kernels() == ()
    assert len(reports) == 1


def build(folder, **environment):
    """Build into ``folder``; return the completed process and the path of the library."""
    pytest.importorskip("setuptools")
    lib, temp = folder / "lib", folder / "temp"
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(lib), "--build-temp", str(temp)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    return done, lib / "realhf" / "ops" / "_C.so"


def test_a_build_without_a_compiler_warns_and_succeeds(tmp_path):
    done, library = build(tmp_path, CXX="no-such-compiler", REALHF_BUILD_CUDA="0")
    assert done.returncode == 0 and not library.exists()
    output = [line for line in (done.stdout + done.stderr).splitlines() if native.KERNELS.fallback in line]
    assert len(output) == 1 and "no-such-compiler: No such file" in output[0]


# Elsewhere torch's kernels are used.
CPU_ONLY = ("copy_box_", "packed_attention", "packed_attention_backward", "adamw_", "decode_blocks", "decode_steps",
                "tiled_linear", "delta_step", "delta_rule", "delta_rule_backward", "causal_conv_silu",
                "causal_conv_silu_backward", "rms_norm", "rms_norm_backward")  # fmt: skip
CUDA_ONLY = ("rotate",)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_cpu_and_cuda_kernels_compile_into_one_library(tmp_path):
    done, library = build(tmp_path, REALHF_BUILD_CUDA="1", REALHF_CUDA_ARCH="sm_90", REALHF_CXXFLAGS="-O0")
    assert done.returncode == 0, done.stderr
    program = f"""
from pathlib import Path
from realhf.base import native
from realhf.ops import extension
native.PACKAGE = Path({str(library.parents[1])!r})
print(*extension.kernels())
"""
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    missing = {f"{name}:cuda" for name in CPU_ONLY} | {f"{name}:cpu" for name in CUDA_ONLY}
    both = [f"{name}:{device}" for name in extension.SHAPES for device in ("cpu", "cuda")]
    assert output.stdout.split() == [kernel for kernel in both if kernel not in missing], output.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_cuda_matches_the_cpu_reference(dtype, tolerance):
    kernel = extension.kernel("packed_gae", "cuda")
    if kernel is None:
        pytest.skip(NOT_BUILT)
    lengths = [1, 2, 31, 32, 33, 64, 65, 1000, 5, 40_000]
    on_device = random_inputs(lengths, dtype, device="cuda")
    result = [x.cpu() for x in kernel(*on_device, 0.99, 0.95)]
    rewards, values, _, cut = random_inputs(lengths, dtype)
    assert_near(result, packed_gae_reference(rewards.double(), values.double(), lengths, cut, 0.99, 0.95), tolerance)
    assert [x.numel() for x in kernel(*random_inputs([], dtype, device="cuda"), 1.0, 1.0)] == [0, 0]
    with pytest.raises(RuntimeError, match="cu_seqlens must be on the CPU"):
        kernel(*on_device[:2], on_device[2].cuda(), on_device[3], 0.99, 0.95)
