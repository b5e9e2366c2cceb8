"""Runs the stages of a campaign, each as a run of its own below the campaign's directory."""

from dataclasses import replace

from realhf.api.campaign import Campaign
from realhf.apps.launching import as_experiment, launch, write_run
from realhf.apps.options import save_experiment
from realhf.apps.preflight import directory_problems, preflight, run_problems
from realhf.base.errors import UserError
from realhf.base.paths import RunDir


def run_campaign(campaign: Campaign, paths: RunDir) -> None:
    """Run everything; ``UserError`` before the first run for what can be known by then."""
    if problems := directory_problems(campaign, paths) + run_problems(campaign) + campaign.problems():
        raise UserError(problems)
    paths.root.mkdir(parents=True, exist_ok=True)
    save_experiment(campaign, paths.config)
    for stage in campaign.stages(paths.root):
        config = replace(stage.config, fileroot=str(paths.root.parent), experiment_name=paths.root.name,
                         trial_name=stage.name, overwrite=True)  # fmt: skip
        print(f"stage   {stage.name}: {stage.experiment}")
        run = preflight(stage.experiment, as_experiment(config), RunDir(paths.root / stage.name))
        write_run(run)
        launch(run)
