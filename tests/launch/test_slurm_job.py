"""Batch scripts and job states, without a cluster."""

import subprocess
from pathlib import Path

import pytest

from realhf.api.config import ExperimentConfig, Mode, RecoverMode, SlurmConfig
from realhf.launch.slurm_job import JobState, LogTail, parse_states, script

SHOWN = "JobId={} ArrayJobId=7 {}JobName=a JobState={} Reason={} Restarts={} ExitCode={} NodeList={} Command=/x y=z/s"
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=math-one
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:a100:4
#SBATCH --partition=dev
#SBATCH --time=1:00:00
#SBATCH --constraint='a&b'
#SBATCH --output={folder}/logs/slurm.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --mail-type=END
module load cuda
export PYTHONPATH="""


def config(**options: object) -> ExperimentConfig:
    return ExperimentConfig("math", "one", mode=Mode.slurm, n_nodes=2, n_gpus_per_node=4, slurm=SlurmConfig(**options))  # type: ignore[arg-type]


def test_script(tmp_path: Path) -> None:
    run = config(partition="dev", time="1:00:00", constraint="a&b", exclusive=True, cpus_per_worker=8, gpu="gpu:a100",
                 setup=["module load cuda"], extra=["--mail-type=END"])  # fmt: skip
    run.recover_mode = RecoverMode.auto
    text = script([tmp_path / "one"], run, "cuda", tmp_path, "1a2b")
    assert text.startswith(SCRIPT.format(folder=tmp_path))
    assert text.splitlines()[-3:-1] == [f"runs=({tmp_path}/one)", "trap '' USR1"]
    assert "-m realhf.apps.commands.master" in text.splitlines()[-1]


def test_every_task_of_an_array_finds_its_run(tmp_path: Path) -> None:
    """The shell prints the command that the script would run."""
    roots = [tmp_path / "a b", tmp_path / "c"]
    text = script(roots, config(), "cpu", tmp_path, "1a2b")
    assert "#SBATCH --array=0-1" in text and "--no-requeue" in text and "gres" not in text
    for task, root in enumerate(roots):
        output = subprocess.run(["bash", "-c", text.replace("exec ", "echo ")], env={"SLURM_ARRAY_TASK_ID": str(task)},
                              capture_output=True, text=True, check=True, timeout=10).stdout  # fmt: skip
        assert output.strip().endswith(f"-m realhf.apps.commands.master {root} 1a2b")


def test_parse_states() -> None:
    text = SHOWN.format(7, "", "RUNNING", "None", 1, "0:0", "n[0-1]")
    assert parse_states(text, 1) == {0: JobState("RUNNING", "None", 0, "n[0-1]", 1)}
    assert str(parse_states(text, 1)[0]) == "is running on n[0-1], started 2 times"
    killed = parse_states(SHOWN.format(7, "", "FAILED", "RaisedSignal:9(Killed)", 0, "0:9", ""), 1)[0]
    assert killed.is_over and killed.exit_code == 9 and str(killed) == "is failed"


def test_parse_states_of_an_array() -> None:
    lines = [SHOWN.format(9, "ArrayTaskId=0 ", "COMPLETED", "None", 0, "0:0", "n0"),
             SHOWN.format(7, "ArrayTaskId=1-3%2 ", "PENDING", "Resources", 0, "0:0", "")]  # fmt: skip
    states = parse_states("\n".join(lines), 4)
    assert list(states) == [0, 1, 2, 3]
    assert [str(state) for state in states.values()] == ["is completed", *["is pending (Resources)"] * 3]
    assert parse_states("slurm_load_jobs error: Invalid job id", 1) == {}


def test_complete_lines_are_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    tail = LogTail(file, "seed_1  ")
    tail.poll()
    file.write_text("one\ntw")
    tail.poll()
    tail.poll()
    assert capsys.readouterr().out == "seed_1  one\n"
    with file.open("a") as log:
        log.write("o\n")
    tail.poll()
    assert capsys.readouterr().out == "seed_1  two\n"
    LogTail(file, "").poll()
    assert capsys.readouterr().out == ""  # lines of an earlier launch
