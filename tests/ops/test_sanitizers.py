"""The libraries of csrc under address and undefined-behaviour sanitizers: hostile inputs, then the other tests."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scaling import examples

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")]
REPOSITORY = Path(__file__).parents[2]
DOT = "-DREALHF_EMULATE_BF16_DOT"
"""Products of bfloat16 pairs, which most machines have no instructions for."""
FLAGS = "-O1 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
KERNELS, PLANNER = "realhf/ops/_C.so", "realhf/plan/search/_planner.so"
SUITES = ["tests/ops", "tests/models/test_fused_decode.py", "tests/plan/search/test_cpp_evaluator.py"]
RUN_TESTS = """
import pathlib, sys, pytest
from realhf.base import native
native.PACKAGE = pathlib.Path(sys.argv[1])
assert native.found(native.KERNELS) and native.found(native.PLANNER)
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both libraries with sanitizers, without CUDA."""
    folder = tmp_path_factory.mktemp("sanitized")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", f"{folder}/o"]
    environment = {
        **os.environ,
        "CXX": "g++",
        "REALHF_CXXFLAGS": f"{FLAGS} {DOT}",
        "NVCC": "false",
        "REALHF_BUILD_CUDA": "0",
    }
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1500)
    assert built.returncode == 0 and (folder / KERNELS).exists() and (folder / PLANNER).exists(), built.stderr[-2000:]
    return folder


def sanitized(arguments: list[str], fill: int = 0xFF) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizers; new memory has the bytes ``fill``, so that results show if it is read."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    options = f"detect_leaks=0:allocator_may_return_null=1:max_malloc_fill_size=1000000000:malloc_fill_byte={fill}"
    environment = {**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options, "OMP_NUM_THREADS": "2",
                   "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONPATH": str(REPOSITORY),
                   "REALHF_EMULATES_PAIRS": "1"}  # fmt: skip
    return subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
                          timeout=1500)  # fmt: skip


def test_the_sanitizers_find_an_error(tmp_path: Path) -> None:
    """Otherwise the other tests would show nothing."""
    source, library = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text('extern "C" int past_end(int n) { int* a = new int[n]; int x = a[n]; delete[] a; return x; }')
    subprocess.run(["g++", *FLAGS.split(), "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
    run = sanitized(["-c", f"import ctypes; ctypes.CDLL('{library}').past_end(3)"])
    assert run.returncode != 0 and "heap-buffer-overflow" in run.stderr


def test_hostile_inputs_to_every_operator(libraries: Path) -> None:
    results = []
    for fill in (0xFF, 0x41):
        run = sanitized(["tests/ops/hostile_inputs.py", str(libraries / KERNELS), str(examples(200)), "0"], fill)
        assert run.returncode == 0, run.stderr[-3000:]
        results.append(json.loads(run.stdout))
    sources = "".join(path.read_text() for path in (REPOSITORY / "csrc").glob("*.cpp"))
    assert results[0].keys() == set(re.findall(r'library\.impl\("(\w+)"', sources))
    missing = [name for name, result in results[0].items() if result is None]
    assert not missing, f"operators without a case in hostile_inputs.py: {missing}"
    assert all(result["accepted"] >= examples(60) and result["refused"] for result in results[0].values())
    depends = [name for name, result in results[0].items() if result != results[1][name]]
    assert not depends, f"results depend on uninitialised memory: {depends}"


def test_tests_of_kernels_and_planner_pass_under_sanitizers(libraries: Path) -> None:
    deselected = [
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu and not dist",
        "--ignore",
        "tests/ops/test_extension.py",
    ]
    run = sanitized(["-c", RUN_TESTS, str(libraries / "realhf"), *deselected, *SUITES])
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]
