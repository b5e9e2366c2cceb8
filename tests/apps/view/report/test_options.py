"""Options that differ from the defaults."""

from dataclasses import replace
from pathlib import Path

import pytest

from realhf.apps.prepare.options import load_experiment, save_experiment, updated
from realhf.apps.view.report.options import NO_OPTION, changed_options
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.sft import SFTExperiment


def test_defaults_and_names_are_left_out() -> None:
    config = PPOExperiment()
    assert changed_options([config]) == [] == changed_options([])
    config = replace(config, seed=7, trial_name="t")
    (row,) = changed_options([config])
    assert (row.key, row.default, row.values, row.differs) == ("seed", "1", ("7",), False) and row.help


def test_runs_are_compared() -> None:
    rows = {row.key: row for row in changed_options([updated(PPOExperiment(), ["seed=2", "ppo.kl_ctl=0.5"]),
                                                     updated(SFTExperiment(), ["model.path=/m"])])}  # fmt: skip
    assert rows["seed"].values == ("2", "1") and rows["seed"].differs
    assert rows["ppo.kl_ctl"].values == ("0.5", NO_OPTION)
    assert rows["model.path"].values == (NO_OPTION, "/m") and rows["model.path"].default == "none"


def test_values_of_the_environment_stay_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    config = updated(PPOExperiment(), ["wandb.project=${oc.env:SECRET}"])
    save_experiment(config, tmp_path / "config.yaml")
    (row,) = changed_options([load_experiment(PPOExperiment, tmp_path / "config.yaml")])
    assert row.values == ("${oc.env:SECRET}",)
