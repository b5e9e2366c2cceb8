"""Reports of finished runs, of runs in progress, and of folders without a run."""

import re
import shutil
from pathlib import Path

import pytest

from realhf.apps.commands.report import main, report
from realhf.apps.prepare.launching import read_run
from realhf.apps.view.report.run_set import RunSet
from realhf.apps.view.report.trace import measured
from realhf.base.atomic_io import try_lock
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
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


def page_of(root: Path) -> str:
    runs = RunSet([root])
    assert runs.update()
    return report(runs)


def test_the_report_shows_every_section_of_a_run(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(trained.root)])
    page = (trained.root / "report.html").read_text()
    assert str(trained.root / "report.html") in capsys.readouterr().out.replace("\n", "")
    for words in (
        '<span class="pill done"',
        "Reward</h4>",
        "At least: ",
        "% per step, from the limits of cpu",
        " times this limit",
        "Measured: step 3, ",
        "actor_gen",
        "d2t1p1@0-1",
        "<small>of 3</small>",
        "group_size: 2",
        "<code>ppo.group_size</code>",
        "optimizer state",
        "measured peak of the largest worker",
    ):
        assert words in page, words
    assert "Missing on this page" not in page
    answer = trained.generations(3)[0]
    assert f'dir="auto">{answer["prompt"]}</div>' in page
    (mean,) = re.findall(r"last values: Reward (-?[\d.e-]+)\"", page)
    assert float(mean) == pytest.approx(trained.metrics[-1]["reward/mean"], rel=1e-3)


def test_the_report_of_a_run_in_progress(trained: Run, tmp_path: Path) -> None:
    folder = tmp_path / "t" / "copy"
    shutil.copytree(trained.root, folder)
    for name, kept in (("metrics.jsonl", 0.5), ("trace.json", 0.6)):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: int(len(text) * kept)])
    with try_lock(RunDir(folder).lock):
        page = page_of(folder)
    assert '<span class="pill running"' in page and "of 3" in page and "Measured: step" in page
    (folder / "metrics.jsonl").unlink()
    (folder / "trace.json").unlink()
    shutil.rmtree(folder / "generations")
    page = page_of(folder)
    assert "metrics.jsonl has no steps yet" in page and "Measured: step" not in page
    assert "trace.json has no complete step" in page and "There are no responses" in page


def test_several_runs_are_compared(trained: Run, tmp_path: Path) -> None:
    folder = tmp_path / "t" / "copy"
    shutil.copytree(trained.root, folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("\nseed: 1\n", "\nseed: 2\n"))
    main([str(trained.root), str(folder), "--out", str(tmp_path / "both.html")])
    page = (tmp_path / "both.html").read_text()
    assert "Comparison of 2 runs" in page and page.count('<svg class="cells"') == 2 * 4
    row = next(part for part in page.split("<tr")[1:] if "<code>seed</code>" in part)
    assert "differs" in row and row.index("<code>1</code>") < row.index("<code>2</code>")


def test_timings_are_measured_per_worker(trained: Run) -> None:
    found = measured(read_run(trained.root))
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


def test_without_its_model_folder_a_run_loses_only_the_prediction(trained: Run, tmp_path: Path) -> None:
    folder = tmp_path / "t" / "copy"
    shutil.copytree(trained.root, folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"(?m)^(actor:\n(?:  .*\n)*?  path: ).*$", r"\1/nowhere/model", config))
    page = page_of(folder)
    assert "No prediction: " in page and "/nowhere/model" in page and "Measured: step 3" in page
    assert "predicted peak of a worker" in page


def test_a_run_without_its_plan_keeps_its_curves(trained: Run, tmp_path: Path) -> None:
    folder = tmp_path / "t" / "copy"
    shutil.copytree(trained.root, folder)
    (folder / "plan.json").write_text((folder / "plan.json").read_text()[:100])
    page = page_of(folder)
    assert "plan.json is damaged" in page and "Reward</h4>" in page and "group_size: 2" in page


def test_a_report_of_a_folder_without_a_run_is_an_error(tmp_path: Path, trained: Run) -> None:
    with pytest.raises(UserError, match="has no run"):
        main([str(tmp_path)])
    (tmp_path / "stages.json").write_text("{}")
    with pytest.raises(UserError, match="several runs, but none has started"):
        main([str(tmp_path)])
    with pytest.raises(UserError, match="--out /proc/none/x.html"):
        main([str(trained.root), "--out=/proc/none/x.html"])
