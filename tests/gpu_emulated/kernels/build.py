"""Compiles csrc/*.cu with g++ against the emulation of CUDA, as operators of ``torch.ops.realhf_emulated`` on the CPU.

The sources are changed in five ways only: launches, shared arrays, the dispatch key, the device of a tensor,
and copies to it.
"""

import hashlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from realhf.base.atomic_io import try_lock
from tests.conftest import TIMEOUT_S

CSRC = Path(__file__).parents[3] / "csrc"
EMULATION = Path(__file__).parent / "emulation"
RULES = EMULATION / "rules.cu"
NAMESPACE = "realhf_emulated"
FLAGS = ["-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unknown-pragmas", "-DTORCH_TARGET_VERSION=0x020d000000000000"]
VARIANTS: Mapping[str, Sequence[str]] = {
    "plain": ["-O1"],
    "address": ["-O1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=vptr",
                "-fno-sanitize-recover=all", "-DEMULATED_ASAN"],
    "thread": ["-O1", "-fsanitize=thread", "-DEMULATED_TSAN"],
}  # fmt: skip
UNSEEN_BY_TSAN = ("runtime.cpp", "device.cpp")
"""The scheduler orders nothing: it is not compiled with ThreadSanitizer, which sees only the kernels."""

LAUNCH = re.compile(r"(\w+(?:<\w+>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
SHARED = re.compile(r"__shared__\s+(\w+)\s+(\w+)\[([^\[\]]+)\];")
DYNAMIC = re.compile(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\];")
TO_DEVICE = re.compile(r"torch::stable::to\(([\w.]+),[^;]*\.device\(\)[^;]*\);")
KERNEL = re.compile(r"library\.impl\(\"(\w+)\"")
SCHEMA = re.compile(r"library\.def\(\s*((?:\"[^\"]*\"\s*)+)\)")


def emulated_source(text: str, name: str) -> str:
    """Return a CUDA source as C++ for the emulation; ValueError for what it does not support."""
    text = LAUNCH.sub(r'emulated::Launcher("\1", \2)([&](auto... given) { \1(given...); }, ', text)
    text = DYNAMIC.sub(r"static emulated::DynamicShared<\1> \2;", text)
    text = SHARED.sub(r"static emulated::SharedArray<\1, \3> \2;", text)
    text = TO_DEVICE.sub(r"torch::stable::clone(\1);", text)
    text = text.replace("STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA,", f"STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CPU,")
    text = text.replace("tensor.get_device_index()", "emulated::device_of_tensors()")
    for left in ("<<<", "__shared__", "get_device_index", "CUDA, library"):
        if left in text:
            raise ValueError(f"{name}: the emulation does not support this form of {left!r}")
    return f'#line 1 "{name}"\n{text}'


def sources(folder: Path = CSRC) -> dict[str, str]:
    """Return the texts of the CUDA sources and of all headers by name."""
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in (".cu", ".h")}


def kernel_names(texts: Mapping[str, str]) -> list[str]:
    """Return the operators that have a CUDA kernel."""
    return [name for file, text in texts.items() if file.endswith(".cu") for name in KERNEL.findall(text)]


def schemas(folder: Path = CSRC) -> dict[str, str]:
    """Return the schemas of all operators of csrc by name."""
    found = {}
    for path in folder.glob("*.cpp"):
        for words in SCHEMA.findall(path.read_text()):
            schema = "".join(re.findall(r'"([^"]*)"', words))
            found[schema.partition("(")[0]] = schema
    return found


def registration(names: Sequence[str]) -> str:
    """Return the source that declares the operators."""
    known = schemas()
    lines = "\n".join(f'  library.def("{known[name]}");' for name in names)
    header = "#include <torch/csrc/stable/library.h>"
    return f"{header}\nSTABLE_TORCH_LIBRARY_FRAGMENT({NAMESPACE}, library) {{\n{lines}\n}}\n"


def build(texts: Mapping[str, str], variant: str = "plain") -> Path:
    """Compile CUDA sources into a cached library, once for each content; return its path."""
    torch = Path(str(importlib.util.find_spec("torch").origin)).parent
    parts = [variant, FLAGS, VARIANTS[variant], Path(__file__).read_text(), sorted(texts.items()), schemas()]
    parts += [path.read_text() for path in sorted(EMULATION.iterdir())] + [(torch / "version.py").read_text()]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "realhf" / f"emulated-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
    library = folder / f"kernels_{variant}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with try_lock(folder / "lock", TIMEOUT_S) as is_acquired:
        assert is_acquired, f"another process holds {folder / 'lock'}"
        if not library.exists():
            _compile(texts, variant, torch, folder)
    return library


def _compile(texts: Mapping[str, str], variant: str, torch: Path, folder: Path) -> None:
    """Compile all files of the emulation and the changed sources, and link them."""
    units = [path for path in EMULATION.iterdir() if path.suffix == ".cpp"]
    for name, text in {**texts, RULES.name: RULES.read_text()}.items():
        path = folder / (f"{name}.cpp" if name.endswith(".cu") else name)
        path.write_text(emulated_source(text, name))
        units += [path] if name.endswith(".cu") else []
    units.append(folder / "schemas.cpp")
    units[-1].write_text(registration(kernel_names(texts)))
    include = [f"-I{folder}", f"-I{EMULATION}", "-isystem", str(torch / "include")]

    def compiled(unit: Path) -> str:
        flags = [*FLAGS, *VARIANTS[variant]]
        flags = [flag for flag in flags if flag != "-fsanitize=thread" or unit.name not in UNSEEN_BY_TSAN]
        _call(["g++", *flags, *include, "-c", str(unit), "-o", str(folder / f"{unit.name}.o")])
        return str(folder / f"{unit.name}.o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, units))
    output, link = folder / "linked.so", ["-Wl,-Bsymbolic", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    _call(["g++", "-shared", *VARIANTS[variant], *objects, "-o", str(output), *link])
    output.rename(folder / f"kernels_{variant}.so")


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:5000]}")
