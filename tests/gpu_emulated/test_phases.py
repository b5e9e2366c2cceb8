"""The phases of a first session on a GPU machine, rehearsed on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import phases
from benchmarks.gpu.phases import LIMIT_S, PHASES, PhaseError, Step, Target, dependencies, install_step, run
from tests.conftest import TIMEOUT_S

ROOT = Path(__file__).parents[2]
H100 = Target("90")


def phase(number: int, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.gpu.phases", str(number)]
    whole = {name: value for name, value in os.environ.items() if name != "TEST_PART"}  # a phase runs all its files
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**whole, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S + TIMEOUT_S,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused_in_one_line() -> None:
    done = phase(4)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr == f"gpu-4: no GPU: torch shows no CUDA device (torch {torch.__version__})\n"


def test_make_runs_the_phases() -> None:
    for number in PHASES:
        done = subprocess.run(
            ["make", "-n", "--no-print-directory", f"gpu-{number}", "PYTHON=py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"py -m benchmarks.gpu.phases {number}\n"


def test_kernels_are_built_for_the_device_alone() -> None:
    build, tests = PHASES[1](H100)
    assert build.environment == {"REALHF_BUILD_CUDA": "1", "REALHF_CUDA_ARCH": "sm_90"}
    assert "--inplace" in build.command and "tests/ops" in tests.command
    assert "--inplace" not in PHASES[1](Target(""))[0].command  # the libraries in use stay


def test_sanitizers_need_their_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(PhaseError, match="compute-sanitizer is not on PATH"):
        PHASES[2](H100)
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    steps = PHASES[2](H100)
    assert [step.title for step in steps] == ["memcheck", "racecheck"]
    for step in steps:
        assert step.command[:3] == [str(program), f"--tool={step.title}", "--error-exitcode=9"]
        assert step.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_wheels_are_installed_offline_and_without_torch() -> None:
    names = dependencies()
    assert {"msgspec>=0.19", "hydra-core==1.3.8", "pytest"} <= set(names)
    assert not [name for name in names if name.startswith("torch")]
    command = install_step("/wheels").command
    assert "--no-index" in command and "--find-links=/wheels" in command and command[-len(names) :] == names


def test_a_step_is_killed_at_its_deadline(tmp_path: Path) -> None:
    sleep = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    step = Step("sleep", [sys.executable, "-S", "-c", sleep])
    assert run(step, 3.0) == 124
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert run(step, -1.0) == 124  # the time of the phase is used up


def test_a_phase_ends_at_its_first_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("REALHF_GPU_REHEARSAL", "1")
    monkeypatch.delenv("GPU_WHEELS", raising=False)
    codes = {"first": "pass", "second": "raise SystemExit(7)", "third": f"open({str(tmp_path / 'third')!r}, 'w')"}
    steps = [Step(title, [sys.executable, "-S", "-c", code]) for title, code in codes.items()]
    monkeypatch.setitem(phases.PHASES, 1, lambda target: list(steps))
    assert phases.run_phase(1) == 7 and not (tmp_path / "third").exists()
    output, errors = capfd.readouterr()
    assert output == "gpu-1: first\ngpu-1: second\n" and errors.startswith("gpu-1: second exited with code 7: ")
    steps.pop(1)
    assert phases.run_phase(1) == 0 and (tmp_path / "third").exists()
    assert "rehearsal on the CPU" in capfd.readouterr().out


EXPECTED = {
    1: "gpu-1: kernels",
    2: "139 cases of 10 kernels on cpu",
    3: "no CUDA device",
    4: "transformers",
    5: "top-k 50, top-p 0.9",
}


@pytest.mark.slow
@pytest.mark.parametrize("number", PHASES)
def test_rehearsals_run_every_script(number: int) -> None:
    done = phase(number, REALHF_GPU_REHEARSAL="1", GPU_WHEELS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert EXPECTED[number] in done.stdout and done.stdout.splitlines()[-1].startswith(f"gpu-{number}: passed in ")
