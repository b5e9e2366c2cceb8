"""The compiled libraries of csrc: where they are, and how they are compiled. No torch.

They are compiled with the package (``setup.py``), or else at first use into a cache, where there is a C++ compiler.
``CXX`` and ``NVCC`` name the compilers. The CUDA kernels are compiled if nvcc is found and torch has CUDA.
``REALHF_BUILD_CUDA=1`` requires them, which makes every failure an error; ``REALHF_CUDA_ARCH`` is nvcc's ``-arch``.
``REALHF_CXXFLAGS`` adds flags for C++; the common ``CXXFLAGS`` is ignored, since conda's lowers the optimization.
``REALHF_NATIVE=0`` disables all libraries. The kernels use only torch's stable ABI: they need no ATen or Python headers
and run with the torch that compiled them and later ones. The planner needs only a C++ compiler.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
MIN_TORCH = {
    "native kernels": (2, 10),  # the first stable ABI with parallel_for, to and contiguous
    "CUDA kernels": (2, 10),
}
"""The oldest torch for each compiled feature; docs/reference/compatibility.md has the same table."""
NATIVE_STREAM = (2, 13)  # the stable ABI has the handle of a stream; before, libtorch_cuda has it
CUDA_REQUIRED = os.environ.get("REALHF_BUILD_CUDA") == "1"
CXX = os.environ.get("CXX", "g++").split()
FLAGS = ["-O3", "-std=c++17", "-DNDEBUG"]
CXX_FLAGS = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
CXX_FLAGS += ["-Wno-psabi"]  # vector arguments stay within one library
USER_FLAGS = os.environ.get("REALHF_CXXFLAGS", "").split()
NVCC_FLAGS = ["--threads=0", "-Xcompiler=-fPIC,-fvisibility=hidden"]
COMPILE_S = 1200.0  # limit of waiting for another process that compiles


class BuildError(Exception):
    """A library could not be compiled."""


class Library(NamedTuple):
    """A library, its place in the package, its folder of sources, and what its absence means."""

    path: str
    sources: str
    fallback: str


KERNELS = Library("ops/_C.so", "", "plain torch is used: steps take about twice as long")
PLANNER = Library("plan/search/_planner.so", "planner", "the plan search runs in Python, over a hundred times slower")


class Torch(NamedTuple):
    home: Path
    version: tuple[int, int]
    cuda: str | None
    """The version of CUDA that it was built for."""


def find_torch() -> Torch:
    """Locate torch without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("there is no torch")
    home = Path(spec.origin).parent
    facts = runpy.run_path(str(home / "version.py"))
    major, minor = facts["__version__"].split(".")[:2]
    return Torch(home, (int(major), int(minor)), facts["cuda"])


def find_nvcc() -> str:
    in_home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or (str(in_home) if in_home.exists() else "")
    if not nvcc:
        raise BuildError("no nvcc on PATH or in CUDA_HOME")
    return nvcc


def check_cuda_version(nvcc: str, torch: Torch) -> None:
    """Raise BuildError if a compiler's CUDA needs another driver than torch's: their major versions differ."""
    if torch.cuda is None:
        return
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{nvcc} --version: {error}") from error
    release = re.search(r"release (\d+)\.(\d+)", output)
    if release is None:
        raise BuildError(f"{nvcc} --version names no release of CUDA")
    if release[1] != torch.cuda.split(".")[0]:
        raise BuildError(f"{nvcc} is of CUDA {release[1]}.{release[2]} and torch of CUDA {torch.cuda}: set NVCC or"
                         f" CUDA_HOME to a compiler of CUDA {torch.cuda.split('.')[0]}")  # fmt: skip


def sources(library: Library) -> list[Path]:
    """Return all files of csrc that a library is compiled from: in the package, or in the repository."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if folder.is_dir():
            return sorted(path for path in (folder / library.sources).iterdir() if path.suffix in (".cpp", ".cu", ".h"))
    return []


def build(library: Library, target: Path, scratch: Path, cuda_arch: str = "all-major") -> None:
    """Compile a library to ``target``, with objects in ``scratch``; ``BuildError`` if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    files = sources(library)
    if library == PLANNER:
        _call([*CXX, *CXX_FLAGS, *FLAGS, *USER_FLAGS, "-shared", *_of_kind(files, ".cpp"), "-o", str(target)])
        return
    torch, linker = find_torch(), [*CXX, *USER_FLAGS]
    compiler = [*CXX, *CXX_FLAGS, *FLAGS, *USER_FLAGS]  # the last flag counts
    objects = _compile(compiler, _of_kind(files, ".cpp"), scratch, torch, "native kernels")
    libraries = ["-ltorch_cpu", "-lc10"]
    if torch.cuda or CUDA_REQUIRED:
        try:
            nvcc = find_nvcc()
            check_cuda_version(nvcc, torch)
            arch = f"-arch={os.environ.get('REALHF_CUDA_ARCH', cuda_arch)}"
            compiler = [nvcc, arch, *NVCC_FLAGS, *FLAGS]
            objects += _compile(compiler, _of_kind(files, ".cu"), scratch, torch, "CUDA kernels")
            linker = [nvcc]
            libraries += ["-ltorch_cuda"] if torch.version < NATIVE_STREAM else []
        except BuildError as error:
            if CUDA_REQUIRED:
                raise
            print(f"compiling native kernels without CUDA: {error}", file=sys.stderr)
    _call([*linker, "-shared", *objects, "-o", str(target), f"-L{torch.home / 'lib'}", *libraries])


def _of_kind(files: Sequence[Path], suffix: str) -> list[str]:
    return [str(path) for path in files if path.suffix == suffix]


def abi_flags(feature: str, version: tuple[int, int]) -> list[str]:
    """Return the flags that select the stable ABI of a feature for a torch; ``BuildError`` if that is too old."""
    minimum = MIN_TORCH[feature]
    if version < minimum:
        needed, actual = (".".join(map(str, x)) for x in (minimum, version))
        raise BuildError(f"{feature} need torch {needed} or newer, this is torch {actual}")
    is_cuda = feature == "CUDA kernels"
    target = min(version, NATIVE_STREAM) if is_cuda else minimum
    flags = [f"-DTORCH_TARGET_VERSION=0x{target[0]:02x}{target[1]:02x}000000000000"]
    return [*flags, "-DUSE_CUDA"] if is_cuda and target < NATIVE_STREAM else flags  # declares what libtorch_cuda has


def _compile(compiler: list[str], files: list[str], scratch: Path, torch: Torch, feature: str) -> list[str]:
    """Compile files against torch's stable ABI; return the objects."""
    flags = abi_flags(feature, torch.version)
    include = ["-isystem", str(torch.home / "include")]
    objects = [str(scratch / f"{Path(file).name}.o") for file in files]
    commands = [[*compiler, *flags, *include, "-c", file, "-o", output]
                for file, output in zip(files, objects, strict=True)]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_call, commands))
    return objects


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def found(library: Library) -> Path | None:
    """Return the path of a compiled library, or None."""
    if os.environ.get("REALHF_NATIVE") == "0":
        return None
    return next((path for path in _places(library) if path.exists()), None)


def _places(library: Library) -> Iterator[Path]:
    yield PACKAGE / library.path
    if cache := _cache(library):
        yield cache / Path(library.path).name


@functools.cache
def ensure(library: Library) -> Path | None:
    """Return the path of a library, compiled now if there is none but a compiler; None if that is impossible."""
    path, cache = found(library), _cache(library)
    if path or cache is None or os.environ.get("REALHF_NATIVE") == "0" or shutil.which(CXX[0]) is None:
        return path
    with contextlib.suppress(OSError):  # the cache may not be writable
        _compile_once(library, cache)
    return found(library)


def _compile_once(library: Library, cache: Path) -> None:
    """Compile a library into the cache, unless another process does it or it has failed before."""
    from realhf.base.atomic_io import try_lock  # not at the top: setup.py runs this file without the package

    failure, name = cache / "failed.txt", Path(library.path).name
    with try_lock(cache.with_suffix(".lock"), COMPILE_S) as is_acquired:
        if not is_acquired or found(library) or failure.exists():
            return
        print(f"realhf: compiling {name} into {cache}, once, for about a minute", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            try:
                build(library, Path(scratch, name), Path(scratch, "objects"), cuda_arch="native")
            except BuildError as error:
                failure.write_text(f"{error}\n")
                return
            os.replace(Path(scratch, name), cache / name)


def missing(library: Library) -> str:
    """Return why there is no library and what that means, in one line."""
    cache = _cache(library)
    if os.environ.get("REALHF_NATIVE") == "0":
        reason = "REALHF_NATIVE=0"
    elif cache is None:
        reason = "there is no compiled library and no source of it"
    elif (cache / "failed.txt").exists():
        reason = f"they could not be compiled, see {cache / 'failed.txt'}"
    else:
        reason = f"there is no compiler {CXX[0]}" if shutil.which(CXX[0]) is None else f"{cache} cannot be written"
    return f"no native kernels: {reason}; {library.fallback}"


@functools.cache
def _cache(library: Library) -> Path | None:
    """Return the folder for a library that is compiled at first use, by the content of all that it depends on."""
    files = sources(library)
    if not files:
        return None
    digest = hashlib.sha256(repr((CXX, FLAGS, CXX_FLAGS, USER_FLAGS, platform.machine(), sys.platform)).encode())
    if library == KERNELS:
        digest.update(repr(find_torch()).encode())
    for path in files:
        digest.update(path.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "realhf" / f"{library.sources or 'kernels'}-{digest.hexdigest()[:16]}"
