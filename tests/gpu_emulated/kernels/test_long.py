"""The long checks of the CUDA kernels: sanitizers, orders of threads, large vocabularies, planted errors."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_emulated.kernels.build import build, sources

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")]
REPOSITORY = Path(__file__).parents[3]
PRELOADED = {"plain": (), "address": ("libasan.so", "libubsan.so", "libstdc++.so"), "thread": ("libtsan.so",)}


def run_cases(library: Path, variant: str, sizes: str, seed: int, *names: str) -> subprocess.CompletedProcess[str]:
    """Check kernels of a library in a process that has the runtime of its sanitizer."""
    preloaded = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
                 for name in PRELOADED[variant]]  # fmt: skip
    environment = {**os.environ, "LD_PRELOAD": " ".join(preloaded), "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(REPOSITORY), "ASAN_OPTIONS": "detect_leaks=0",
                   "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1 exitcode=66"}  # fmt: skip
    command = [sys.executable, "-m", "tests.gpu_emulated.kernels.run", str(library), sizes, str(seed), *names]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1500)


@pytest.mark.parametrize(("variant", "sizes"), [("address", "quick"), ("thread", "tiny")])
def test_kernels_are_clean_under_sanitizers(variant: str, sizes: str) -> None:
    done = run_cases(build(sources(), variant), variant, sizes, 1)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_results_do_not_depend_on_the_order_of_threads(seed: int) -> None:
    done = run_cases(build(sources()), "plain", "quick", seed)
    assert done.returncode == 0, done.stderr[-5000:]


def test_large_vocabularies_and_all_dtypes() -> None:
    done = run_cases(build(sources()), "plain", "large", 1)
    assert done.returncode == 0, done.stderr[-5000:]


def test_sampling_from_a_large_vocabulary() -> None:
    done = run_cases(build(sources()), "plain", "vocabulary", 1, "sample_tokens")
    assert done.returncode == 0 and "'atomics': 0" in done.stdout, done.stderr[-5000:]


PLANTED = {
    "a missing barrier": ("block_reduce.h", "  __syncthreads();\n  return", "  return", "logit_stats"),
    "a row that ends at 1,024": (
        "logprobs.cu",
        "i < size; i += kThreads) {",
        "i < min(size, int64_t{1024}); i += kThreads) {",
        "logit_slopes_",
    ),
    "a mask of half a warp": ("gae.cu", "__shfl_sync(kWholeWarp, sum", "__shfl_sync(0xffffu, sum", "packed_gae"),
    "a scan in the wrong direction": (
        "gae_2d.cu",
        "__shfl_up_sync(kWholeWarp, sum",
        "__shfl_down_sync(kWholeWarp, sum",
        "gae_2d",
    ),
    "a swapped order of reduction": (
        "sampling.cu",
        "top = kDigits - 1 - lane * kPerLane",
        "top = kPerLane - 1 + lane * kPerLane",
        "sample_tokens",
    ),
    "a NaN of the next sequence": ("gae_2d.cu", "lane >= span && link != 0.0", "lane >= span", "gae_2d"),
    "the wrong device": ("device.h", "guard_(device_)", "guard_(0)", "counter_uniform"),
    "the stream of another device": ("device.h", "getCurrentStream(device_)", "getCurrentStream(0)", "set_intervals"),
    "a launch that is not checked": (
        "device.h",
        "cudaError_t error = cudaGetLastError()",
        "cudaError_t error = cudaSuccess",
        "counter_uniform",
    ),
    "a grid that is one block short": (
        "device.h",
        "(work + per_block - 1) / per_block",
        "work / per_block",
        "counter_uniform",
    ),
}
"""Errors as (file, text, replacement, an operator that they break)."""


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_errors_are_found(planted: str) -> None:
    file, text, replacement, name = PLANTED[planted]
    texts = sources()
    assert texts[file].count(text) == 1, f"{file} has changed: plant the error elsewhere"
    texts[file] = texts[file].replace(text, replacement)
    only = {key: value for key, value in texts.items() if key.endswith(".h") or name in value}
    done = run_cases(build(only), "plain", "tiny", 1, name)
    assert done.returncode == 1 and re.search(r"AssertionError|RuntimeError", done.stderr), done.stdout + done.stderr


RACES = {
    "a missing barrier before a search": (
        "sampling.cu",
        "    __syncthreads();\n    for (int64_t first",
        "    for (int64_t first",
        "sample_tokens",
    ),
    "a missing __syncwarp": ("sampling.cu", "  __syncwarp();  // before", "  // before", "sample_tokens"),
    "a missing barrier before a reduction": (
        "block_reduce.h",
        "  __syncthreads();  // wait for readers",
        "  // wait for readers",
        "sample_tokens",
    ),
    "two blocks that write one row": ("logprobs.cu", "largest[row] = most;", "largest[0] = most;", "logit_stats"),
}
"""Errors that change no result here: only ThreadSanitizer finds them."""


@pytest.mark.parametrize("planted", RACES)
def test_planted_races_are_found(planted: str) -> None:
    file, text, replacement, name = RACES[planted]
    texts = sources()
    assert texts[file].count(text) == 1, f"{file} has changed: plant the error elsewhere"
    texts[file] = texts[file].replace(text, replacement)
    only = {key: value for key, value in texts.items() if key.endswith(".h") or name in value}
    done = run_cases(build(only, "thread"), "thread", "tiny", 1, name)
    assert done.returncode == 66 and "data race" in done.stderr, done.stdout + done.stderr
