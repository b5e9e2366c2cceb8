"""Reports of finished runs, of runs in progress, and of folders without a run."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from realhf.apps.commands.report import main, measured, report
from realhf.base.errors import UserError
from realhf.plan.run_spec import RunSpec
from realhf.plan.search.timeline import Timeline
from tests.conftest import Task
from tests.integration.conftest import Run, run


@pytest.fixture(scope="module")
def trained(task: Task, actor_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    words = [
        f"actor.path={actor_folder}", f"dataset.path={task.train}", "dataset.train_bs_n_seqs=4", "ppo.group_size=2",
        "ppo.gen.max_new_tokens=8", "exp_ctrl.total_train_steps=3", "n_gpus_per_node=2", "ppo.disable_value=True",
    ]  # fmt: skip
    return run("ppo-math", tmp_path_factory.mktemp("reported"), words)


@pytest.fixture
def read(trained: Run) -> Callable[[Path], RunSpec]:
    from realhf.apps.prepare.launching import read_run

    return read_run


def test_the_report_shows_every_section_of_a_run(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(trained.root)])
    page = (trained.root / "report.html").read_text()
    assert str(trained.root / "report.html") in capsys.readouterr().out.replace("\n", "")
    assert "http://" not in page.replace("http://www.w3.org", "") and "src=" not in page, "it needs nothing else"
    for words in (
        "reward/mean",
        "by limits: ",
        "measured: step 3, ",
        "actor_gen",
        "d2t1p1@0-1",
        "3 of 3",
        "group_size: 2",
    ):
        assert words in page, words
    answer = trained.generations(3)[0]
    assert f"<b>{answer['prompt']}</b>" in page
    (mean,) = re.findall(r">reward/mean (-?[\d.e-]+)<", page)
    assert float(mean) == pytest.approx(trained.metrics[-1]["reward/mean"], rel=1e-3)


def test_the_report_of_a_run_in_progress(trained: Run, tmp_path: Path, read: Callable[[Path], RunSpec]) -> None:
    folder = tmp_path / "t" / "copy"
    shutil.copytree(trained.root, folder)
    for name, kept in (("metrics.jsonl", 0.5), ("trace.json", 0.6)):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: int(len(text) * kept)])
    page = report(read(folder))
    assert "1 of 3" in page and "measured: step" in page
    (folder / "metrics.jsonl").unlink()
    (folder / "trace.json").unlink()
    shutil.rmtree(folder / "generations")
    page = report(read(folder))
    assert "none yet" in page and "measured" not in page


def test_timings_are_measured_per_worker(trained: Run, read: Callable[[Path], RunSpec]) -> None:
    found = measured(read(trained.root))
    assert found is not None
    step, timeline = found
    assert step == 3 and isinstance(timeline, Timeline) and timeline.n_workers == 2
    spent = dict.fromkeys((0, 1), 0.0)
    for activity in timeline.activities:
        (rank,) = activity.ranks
        spent[rank] += activity.end - activity.start
        if activity.after is not None:
            assert timeline.activities[activity.after].end <= activity.start + 2e-3
    assert all(0 < seconds <= timeline.steady_state[1] * 1.01 for seconds in spent.values())
    path = [timeline.activities[i] for i in timeline.critical_path]
    assert len(path) > 3 and [a.end for a in path] == sorted(a.end for a in path)
    assert path[-1].mfc == "actor_train"


def test_without_its_model_folder_a_run_loses_only_the_prediction(
    trained: Run, tmp_path: Path, read: Callable[[Path], RunSpec]
) -> None:
    folder = tmp_path / "t" / "copy"
    shutil.copytree(trained.root, folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"(?m)^(actor:\n(?:  .*\n)*?  path: ).*$", r"\1/nowhere/model", config))
    page = report(read(folder))
    assert "No prediction: " in page and "/nowhere/model" in page and "measured: step 3" in page


@pytest.mark.parametrize("words", [["{}", "--ot", "x.html"], ["{}", "x.html"], ["{}", "--out"]])
def test_invalid_arguments(words: list[str], trained: Run) -> None:
    with pytest.raises(UserError, match="invalid arguments"):
        main([word.format(trained.root) for word in words])


def test_a_report_of_a_folder_without_a_run_is_an_error(tmp_path: Path, trained: Run) -> None:
    with pytest.raises(UserError, match="has no run"):
        main([str(tmp_path)])
    (tmp_path / "stages.json").write_text("{}")
    with pytest.raises(UserError, match="several runs; report one of them: none has started"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match="--out /proc/none/x.html"):
        main([str(trained.root), "--out=/proc/none/x.html"])
