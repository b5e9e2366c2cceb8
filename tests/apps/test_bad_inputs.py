"""Every mistake is answered with an exit code and a few lines, never with a traceback."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.apps.bad_inputs import COMMANDS, OPTIONS, Screen, commands, screen, write_files
from tests.conftest import Task

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def screens(task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Screen]:
    folder = tmp_path_factory.mktemp("bad_inputs")
    write_files(folder, task)
    words = commands(task)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(words, pool.map(partial(screen, folder=folder), words.values()), strict=True))
    assert not (folder / "runs").exists(), "nothing is left of a command that launched nothing"
    assert len(list((folder / "launched").glob("*/*/error.txt"))) == 2, "two mistakes are found by the first judgement"
    return found


@pytest.mark.parametrize("case", [*OPTIONS, *COMMANDS])
def test_a_mistake_is_answered_briefly(screens: dict[str, Screen], case: str) -> None:
    assert screens[case].problems == [], screens[case].output
