"""Libraries that are compiled at first use: once, also by several processes, and never again after a failure."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.base import native
from tests.conftest import TIMEOUT_S

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from realhf.base import native
native.PACKAGE = Path(sys.argv[1])
print(native.ensure(native.PLANNER))
print(native.missing(native.PLANNER))
"""
COMPILER = """#!/bin/sh
echo call >> "$CALLS"
sleep 0.5
for word; do :; done
if [ -n "$FAILS" ]; then echo "no such luck" >&2; exit 1; fi
echo compiled > "$word"
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with sources and without libraries."""
    (tmp_path / "package" / "csrc" / "planner").mkdir(parents=True)
    (tmp_path / "package" / "csrc" / "planner" / "api.cpp").write_text("int x;\n")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(stat.S_IRWXU)
    return tmp_path / "package"


def start(package: Path, **environment: str) -> subprocess.Popen[str]:
    folder = package.parent
    environment = {"CXX": str(folder / "compiler"), "CALLS": str(folder / "calls"), "FAILS": "",
                   "XDG_CACHE_HOME": str(folder / "cache"), **environment}  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(package)], cwd=REPOSITORY, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})  # fmt: skip


def outcome(process: subprocess.Popen[str]) -> tuple[str, str, str]:
    """Return the path, the reason why there is none, and what was printed to the user."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return *out.splitlines(), err  # type: ignore[return-value]


def calls(package: Path) -> int:
    file = package.parent / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_several_processes_compile_once_and_changed_sources_again(package: Path) -> None:
    first = [outcome(process) for process in [start(package) for _ in range(4)]]
    assert len({path for path, *_ in first}) == 1 and Path(first[0][0]).read_text() == "compiled\n"
    assert calls(package) == 1
    assert sorted(bool(err) for *_, err in first) == [False, False, False, True]
    (package / "csrc" / "planner" / "api.cpp").write_text("int y;\n")
    assert outcome(start(package))[0] != first[0][0] and calls(package) == 2


def test_a_compiler_that_fails_is_not_tried_again(package: Path) -> None:
    results = [outcome(process) for process in [start(package, FAILS="1") for _ in range(3)]]
    results.append(outcome(start(package, FAILS="1")))
    assert calls(package) == 1
    for path, reason, _ in results:
        assert path == "None" and "could not be compiled, see " in reason
        failure = reason.partition("see ")[2].partition(";")[0]
        assert "no such luck" in Path(failure).read_text()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "there is no compiler no-such-compiler"),
        ({"REALHF_NATIVE": "0"}, "REALHF_NATIVE=0"),
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "cannot be written"),
    ],
)
def test_without_a_library_the_reason_is_one_line(package: Path, environment: dict[str, str], reason: str) -> None:
    path, text, _ = outcome(start(package, **environment))
    assert path == "None" and reason in text and "over a hundred times slower" in text and calls(package) == 0


def test_a_library_of_the_package_is_used(package: Path) -> None:
    library = package / "plan" / "search" / "_planner.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert outcome(start(package))[0] == str(library) and calls(package) == 0


@pytest.mark.parametrize("feature", native.MIN_TORCH)
@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_features_are_compiled_for_the_abi_of_the_torch_that_is_found(feature: str, minor: int) -> None:
    target, *others = native.abi_flags(feature, (2, minor))
    is_cuda = feature == "CUDA kernels"
    expected = min(minor, 13) if is_cuda else 10
    assert target == f"-DTORCH_TARGET_VERSION=0x02{expected:02x}000000000000"
    assert others == (["-DUSE_CUDA"] if is_cuda and minor < 13 else [])


@pytest.mark.parametrize("feature", native.MIN_TORCH)
def test_an_older_torch_is_refused_with_the_feature_and_the_version_it_needs(feature: str) -> None:
    with pytest.raises(native.BuildError, match=f"^{feature} need torch 2.10 or newer, this is torch 2.9$"):
        native.abi_flags(feature, (2, 9))


def test_the_documented_versions_of_torch_are_those_of_the_build() -> None:
    page = (REPOSITORY / "docs" / "reference" / "compatibility.md").read_text()
    for feature, version in native.MIN_TORCH.items():
        assert f"| {feature} | {'.'.join(map(str, version))} |" in page


def compiler(folder: Path, output: str, status: int = 0) -> str:
    """Write a program that prints its version as nvcc does."""
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


RELEASE = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {}, V{}.48"


def refused(nvcc: str, torch: native.Torch) -> bool:
    try:
        native.check_cuda_version(nvcc, torch)
    except native.BuildError:
        return True
    return False


@pytest.mark.parametrize("release, cuda", [("13.0", "13.0"), ("12.9", "12.6"), ("12.4", "12.8"), ("13.2", None)])
def test_a_compiler_of_the_same_major_version_is_accepted(release: str, cuda: str | None, tmp_path: Path) -> None:
    nvcc = compiler(tmp_path, RELEASE.format(release, release))
    assert not refused(nvcc, native.Torch(tmp_path, (2, 11), cuda))
    assert refused(nvcc, native.Torch(tmp_path, (2, 11), "11.8")), "the version is compared"


@pytest.mark.parametrize("release, cuda", [("13.0", "12.8"), ("12.8", "13.0"), ("11.8", "12.1")])
def test_a_compiler_of_another_major_version_is_refused(release: str, cuda: str, tmp_path: Path) -> None:
    nvcc = compiler(tmp_path, RELEASE.format(release, release))
    with pytest.raises(native.BuildError, match=f"CUDA {release} and torch of CUDA {cuda}: set NVCC or CUDA_HOME"):
        native.check_cuda_version(nvcc, native.Torch(tmp_path, (2, 11), cuda))


@pytest.mark.parametrize("output, status", [("", 0), ("release of nothing", 0), ("no device", 3)])
def test_a_compiler_without_a_version_is_refused(output: str, status: int, tmp_path: Path) -> None:
    with pytest.raises(native.BuildError, match="nvcc"):
        native.check_cuda_version(compiler(tmp_path, output, status), native.Torch(tmp_path, (2, 11), "13.0"))
