"""A run with a curriculum: prompts leave the data by their results, sources are mixed, and a resume is exact."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Task
from tests.integration.conftest import Run, start
from tests.integration.test_resume import files, kill, resume

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def words(task: Task, ppo_words: list[str], reward_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """GRPO, a step ahead of training, on 12 and 5 prompts of two files, whose rows are not sorted."""
    folder = tmp_path_factory.mktemp("sources")
    rows = [json.loads(line) | {"level": i} for i, line in enumerate(task.train.read_text().splitlines())]
    paths = [folder / "large.jsonl", folder / "small.jsonl"]
    for path, part in zip(paths, (rows[:12], rows[12:]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in reversed(part)))
    return [
        *ppo_words,
        "dataset.path=",
        f"dataset.paths=[{paths[0]},{paths[1]}]",
        "dataset.weights=[3,1]",
        "dataset.train_bs_n_seqs=8",
        "dataset.curriculum.sort_by=level",
        "dataset.curriculum.min_pass_rate=0.1",
        "dataset_filter_threshold=0.6",
        "dataset_max_filter_percentage=0.25",
        f"reward.fn={reward_file}:rare",
        "ppo.group_size=3",
        "ppo.dynamic_sampling=True",
        "ppo.max_resamples=1",
        "max_staleness=1",
        "exp_ctrl.total_train_epochs=4",
        "exp_ctrl.total_train_steps=5",
        "exp_ctrl.ckpt_freq_steps=1",
        "n_logged_generations=-1",
    ]


def test_prompts_leave_the_data_and_a_kill_does_not_matter(
    realhf: Callable[..., Run], words: list[str], tmp_path: Path
) -> None:
    straight = realhf("grpo", tmp_path / "straight", words)
    first, last = straight.metrics[0], straight.metrics[-1]
    assert [line["prompts/source_large"] for line in straight.metrics] == [0.75] * 5
    levels = {row["fields"]["level"] for row in straight.generations(1) if row["prompt_id"] < 8}
    assert levels <= {*range(6), 12, 13}, "the first epoch is sorted"
    filtered = [line["prompts/filtered"] for line in straight.metrics]
    assert filtered[0] == 0 and filtered == sorted(filtered) and 1 < filtered[-1] <= 4
    assert last["prompts/active"] < first["prompts/active"] == 17
    started = start("grpo", tmp_path / "killed", words)
    kill(started, 4, "master")
    found = resume(started.root)
    assert found.code == 0, found.output
    assert found.curve == straight.curve and files(found) == files(straight)
