"""Runs that are killed, or whose processes kill themselves at moments that do not depend on time."""

from pathlib import Path

from tests.integration.conftest import Run, start
from tests.integration.test_resume import files, kill, resume


def check_kill(whole: Run, root: Path, options: list[str], step: int, whom: str, experiment: str = "grpo") -> None:
    """Kill the master or a worker of a run after a step, and resume it."""
    started = start(experiment, root, options)
    started.wait_for_checkpoint()
    kill(started, step, whom)
    found = resume(started.root)
    assert found.code == 0, found.output
    assert found.curve == whole.curve, whom
    before, after = files(whole), files(found)
    assert [name for name in {**before, **after} if before.get(name) != after.get(name)] == [], whom


def check_deaths(whole: Run, root: Path, options: list[str], option: str, at_least: int) -> None:
    """Execute a run in which processes kill themselves; ``option`` gives them a folder by its end, ``=FOLDER``."""
    folder = root / "deaths"
    folder.mkdir(parents=True)
    found = start("grpo", root, [*options, option.format(folder=folder)]).finish()
    assert found.code == 0, found.output
    n_deaths = len(list(folder.iterdir()))
    assert n_deaths >= at_least, f"{n_deaths} processes have died"
    curves = [[{**line, "actor_gen/retried": 0.0} for line in run.curve] for run in (found, whole)]
    assert curves[0] == curves[1] and files(found) == files(whole), option
