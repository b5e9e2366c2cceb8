"""The phases of a first session on a GPU machine: python -m benchmarks.gpu.phases 1..5 (make gpu-1 ... gpu-5).

Each phase runs alone, from a bare machine with Python and its own CUDA build of torch, and ends within nine minutes.
The folder GPU_WHEELS has wheels of the other dependencies. With REALHF_GPU_REHEARSAL=1 the same commands run on the
CPU, with tiny sizes and without compute-sanitizer. Uses the standard library only.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / "build" / "gpu"
PACKAGES = SCRATCH / "packages"
LIMIT_S = 540.0
TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis")
PYTHON = sys.executable
GPU_FACTS = (
    "import torch; p = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None; "
    "print(torch.__version__, p and f'{p.major}{p.minor} {p.name}', sep='|')"
)


class PhaseError(Exception):
    """A phase cannot run on this machine."""


@dataclass(frozen=True)
class Step:
    """A command of a phase, run in the repository's root."""

    title: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The device of a phase: its compute capability, such as 90; empty in a rehearsal."""

    capability: str

    @property
    def is_rehearsal(self) -> bool:
        return not self.capability

    @property
    def device(self) -> str:
        return "cpu" if self.is_rehearsal else "cuda"


def build_and_ops(target: Target) -> list[Step]:
    """Phase 1: build the kernels for this device alone, and test each against its reference."""
    build = [PYTHON, "setup.py", "-q", "build_ext", "--inplace"]
    cuda = {"REALHF_BUILD_CUDA": "1", "REALHF_CUDA_ARCH": f"sm_{target.capability}"}
    if target.is_rehearsal:  # not in place: the libraries in use stay
        build, cuda = [*build[:-1], f"--build-lib={SCRATCH / 'lib'}", f"--build-temp={SCRATCH / 'objects'}"], {}
    return [
        Step("build", build, cuda),
        Step("kernels", [PYTHON, "-m", "pytest", "-q", "-rs", "tests/ops", "-m", "gpu"]),
    ]


def sanitizers(target: Target) -> list[Step]:
    """Phase 2: run small cases of every kernel under memcheck and racecheck of compute-sanitizer."""
    cases = [PYTHON, "-m", "benchmarks.gpu.kernel_cases", "--device", target.device]
    if target.is_rehearsal:
        return [Step("cases", cases)]
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")
    if program is None:
        raise PhaseError("compute-sanitizer is not on PATH or in CUDA_HOME/bin; it is part of the CUDA toolkit")
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # torch's cache hides reads beyond a tensor
    return [
        Step(tool, [program, f"--tool={tool}", "--error-exitcode=9", "--print-limit=20", *cases], uncached)
        for tool in ("memcheck", "racecheck")
    ]


def engine(target: Target) -> list[Step]:
    """Phase 3: the engine on one GPU against the CPU: graphs, bfloat16, and PPO from end to end."""
    return [Step("engine", [PYTHON, "-m", "pytest", "-q", "-rs", "tests/gpu", "tests/models/engine", "-m", "gpu"])]


def utilisation(target: Target) -> list[Step]:
    """Phase 4: MFU of training and bandwidth of decoding at 1.5B, beside Hugging Face and plain torch, with traces."""
    size = ["--tiny"] if target.is_rehearsal else []
    script = [PYTHON, "-m", "benchmarks.gpu.utilisation", "--device", target.device, *size]
    return [Step("utilisation", [*script, "--traces", str(SCRATCH / "traces")])]


def kernels(target: Target) -> list[Step]:
    """Phase 5: kernels against the copy bandwidth of the device."""
    on, small = ["--device", target.device], ["--tokens", "4096"] if target.is_rehearsal else []
    tiny = ["--tiny"] if target.is_rehearsal else []
    return [
        Step("sampling", [PYTHON, "-m", "benchmarks.gpu.sampling", *on, *tiny]),
        Step("GAE", [PYTHON, "benchmarks/bench_gae.py", *on, *small]),
        *([] if tiny else [Step("other kernels", [PYTHON, "benchmarks/bench_kernels.py", *on])]),
    ]


PHASES: dict[int, Callable[[Target], list[Step]]] = {
    1: build_and_ops,
    2: sanitizers,
    3: engine,
    4: utilisation,
    5: kernels,
}


def find_target() -> Target:
    """Return the device of this machine; ``PhaseError`` if torch has none."""
    if os.environ.get("REALHF_GPU_REHEARSAL") == "1":
        return Target("")
    if importlib.util.find_spec("torch") is None:
        raise PhaseError(f"{PYTHON} has no torch; set PYTHON to an interpreter with a CUDA build of torch")
    facts = subprocess.run([PYTHON, "-c", GPU_FACTS], capture_output=True, text=True)
    version, _, device = facts.stdout.strip().rpartition("|")
    if facts.returncode or device in ("", "None"):
        detail = facts.stderr.strip().rpartition("\n")[2] if facts.returncode else f"torch {version}"
        raise PhaseError(f"no GPU: torch shows no CUDA device ({detail})")
    capability, _, name = device.partition(" ")
    print(f"{name}, sm_{capability}, torch {version}, Python {sys.version.split()[0]}", flush=True)
    return Target(capability)


def dependencies() -> list[str]:
    """Return the dependencies in pyproject.toml except torch, and those of the tests."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = re.findall(r'^\s*"([^"]+)"', listed[1], re.MULTILINE)
    return [name for name in names if re.match(r"[\w-]+", name)[0] != "torch"] + list(TEST_PACKAGES)  # type: ignore[index]


def install_step(wheels: str) -> Step:
    """Return the installation into a folder beside the environment, which may belong to the system."""
    options = ["--no-index", f"--find-links={wheels}", f"--target={PACKAGES}", "--upgrade"]
    return Step("install", [PYTHON, "-m", "pip", "install", "-q", *options, *dependencies()])


def run(step: Step, seconds: float) -> int:
    """Return the exit code of a step; 124 after ``seconds``, when its processes are killed."""
    path = os.pathsep.join(map(str, [ROOT, PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **step.environment}
    with subprocess.Popen(step.command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run_phase(number: int, limit_s: float = LIMIT_S) -> int:
    """Run the steps of a phase up to the first failure; return the exit code, 3 if it cannot run here."""
    began, name = time.monotonic(), f"gpu-{number}"
    try:
        target = find_target()
        steps = PHASES[number](target)
    except PhaseError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 3
    wheels, marker = os.environ.get("GPU_WHEELS", ""), PACKAGES / ".installed"
    if wheels and not marker.exists():
        steps.insert(0, install_step(wheels))
    for step in steps:
        print(f"{name}: {step.title}", flush=True)
        code = run(step, limit_s - (time.monotonic() - began))
        if code:
            how = f"exceeded the {limit_s:.0f} s of the phase" if code == 124 else f"exited with code {code}"
            print(f"{name}: {step.title} {how}: {' '.join(step.command)}", file=sys.stderr)
            return code
        if step.title == "install":
            marker.touch()
    rehearsed = " (rehearsal on the CPU)" if target.is_rehearsal else ""
    print(f"{name}: passed in {time.monotonic() - began:.0f} s{rehearsed}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in [[str(number)] for number in PHASES]:
        raise SystemExit(f"usage: python -m benchmarks.gpu.phases {'|'.join(map(str, PHASES))}")
    raise SystemExit(run_phase(int(sys.argv[1])))
