"""Runs that are killed, or whose processes kill themselves at moments that do not depend on time."""

from pathlib import Path

from tests.integration.conftest import Run, start
from tests.integration.test_resume import files, kill, resume


def changed_by_kill(
    whole: Run, root: Path, options: list[str], step: int, whom: str, experiment: str = "grpo"
) -> list[str]:
    """Kill the master or a worker of a run after a step, and resume it; return what differs from the whole run."""
    started = start(experiment, root, options)
    started.wait_for_checkpoint()
    kill(started, step, whom)
    found = resume(started.root)
    assert found.code == 0, found.output
    return differences(whole, found)


def changed_by_deaths(whole: Run, root: Path, options: list[str], option: str, at_least: int) -> list[str]:
    """Execute a run in which processes kill themselves; return what differs from the whole run but for retries.

    ``option`` gives them a folder by its end, ``=FOLDER``; each of them leaves a file there.
    """
    folder = root / "deaths"
    folder.mkdir(parents=True)
    found = start("grpo", root, [*options, option.format(folder=folder)]).finish()
    assert found.code == 0, found.output
    n_deaths = len(list(folder.iterdir()))
    assert n_deaths >= at_least, f"{n_deaths} processes have died"
    return differences(whole, found, but_for="actor_gen/retried")


def differences(whole: Run, found: Run, but_for: str = "") -> list[str]:
    """Return the steps whose metrics differ, and the files."""
    curves = [[{k: v for k, v in line.items() if k != but_for} for line in run.curve] for run in (whole, found)]
    steps = [f"step {i + 1}" for i, (one, other) in enumerate(zip(*curves, strict=True)) if one != other]
    before, after = files(whole), files(found)
    return steps + [name for name in {**before, **after} if before.get(name) != after.get(name)]
