"""Uploads the final model of a run to the hub, with a model card that states data, algorithm, curve and command."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from realhf.api.config.option import leaves
from realhf.api.experiment import Experiment
from realhf.api.graph import Graph
from realhf.apps.prepare.hub import NAME, requested
from realhf.base.data_files import CARD
from realhf.base.errors import RunFailed
from realhf.experiments import experiment_class
from realhf.plan.run_spec import RunSpec

CURVE = ("reward/mean", "reward/accuracy", "loss", "kl/ref", "length/response", "eval/reward", "eval/loss")
MAX_POINTS = 10
NOT_SHOWN = ("experiment_name", "trial_name", "fileroot", "push_to_hub", "wandb.", "slurm.", "ray.")
"""Options that the command of a card leaves out."""


def push_problems(experiment: Experiment, graph: Graph) -> list[str]:
    """Return why the final model cannot be uploaded: the name, several models, or no write access."""
    repo = experiment.push_to_hub
    if not repo:
        return []
    match = NAME.fullmatch(repo)
    if not match or match["repo"] != repo:
        return [f"push_to_hub={repo}: give ORG/NAME"]
    roles = experiment.save_roles or graph.results
    if len(roles) != 1:
        return [f"push_to_hub={repo}: save_roles must select one of the trained models {', '.join(roles)}"]
    from huggingface_hub import whoami

    try:
        user: dict[str, Any] = requested(whoami, "model", repo, "main")
    except ValueError as problem:
        return [f"push_to_hub={repo}: {problem}"]
    owners = [user["name"], *(org["name"] for org in user.get("orgs", []))]
    if repo.partition("/")[0] not in owners:
        return [f"push_to_hub={repo}: the token is of {owners[0]}, which can write to {', '.join(owners)}"]
    return []


def publish(run: RunSpec) -> None:
    """Write the model card of a finished run and upload its model; RunFailed if the hub does not accept it."""
    if not (repo := run.config.push_to_hub):
        return
    from huggingface_hub import create_repo, upload_folder

    folder = run.paths.model(run.saved_roles[0], run.schedule.n_steps)
    (folder / CARD).write_text(model_card(run), encoding="utf-8")

    def upload() -> str:
        create_repo(repo, private=True, exist_ok=True)
        message = f"{run.experiment}, trained by realhf"
        return upload_folder(repo_id=repo, folder_path=folder, commit_message=message).oid

    try:
        commit = requested(upload, "model", repo, "main")
    except ValueError as problem:
        remedy = f"repeat the upload with: hf upload {repo} {folder}"
        raise RunFailed(f"the model is saved but not on the hub: {problem}\n{remedy}") from problem
    print(f"pushed  {repo}: commit {commit}", flush=True)


def model_card(run: RunSpec) -> str:
    """Return the card of a run: a YAML header, data, algorithm, curve and command. Local folders are not named."""
    from huggingface_hub import ModelCardData

    config, role = run.config, run.saved_roles[0]
    base, data = run.roles[role].spec.path, config.dataset.sources
    names = {path: name.removeprefix("datasets/") for name, path in config.snapshots.items()}
    shown = ", ".join(config.portable(path) if path in names else os.path.basename(path) for path in data)
    on_hub = [names[path].partition(":")[0].partition("@")[0] for path in data if path in names]
    header = ModelCardData(
        base_model=names[base].partition("@")[0] if base in names else None,
        datasets=on_hub or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["realhf", run.experiment],
    )
    algorithm = (experiment_class(run.experiment).__doc__ or "").strip()
    return "\n".join([
        "---", header.to_yaml(), "---", "", f"# {config.push_to_hub.partition('/')[2]}", "",
        f"The model `{role}` after {run.schedule.n_steps} steps of training with realhf.", "",
        "## Algorithm", "", f"`{run.experiment}`: {algorithm}", "",
        "## Data", "", f"`{shown}`: {run.n_rows} rows, {run.n_held_out} held out, "
        f"{run.schedule.batch_size} per step.", "",
        "## Curve", "", *curve(run.paths.metrics), "",
        "## Command", "", "```", shlex.join(command(run)), "```", "",
    ])  # fmt: skip


def curve(metrics: Path) -> list[str]:
    """Return at most ``MAX_POINTS`` steps of the metrics as a table in Markdown."""
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    names = [name for name in CURVE if any(name in step for step in steps)]
    shown = [steps[round(i * (len(steps) - 1) / max(1, MAX_POINTS - 1))] for i in range(MAX_POINTS)]
    rows = {step["step"]: [f"{step[name]:.4g}" if name in step else "" for name in names] for step in shown}
    lines = [["step", *names], ["---"] * (1 + len(names)), *([str(step), *row] for step, row in rows.items())]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def command(run: RunSpec) -> list[str]:
    """Return the command line with the options that differ from their defaults."""
    texts = run.config.unresolved()
    defaults = {key: value for key, _, value in leaves(experiment_class(run.experiment)())}
    words = ["realhf", "quickstart", os.path.basename(run.experiment)]
    for key, _, value in leaves(run.config):
        if value != defaults[key] and not key.startswith(NOT_SHOWN):
            text = texts.get(key, value)
            text = [_shown(v) for v in text] if isinstance(text, list) else _shown(text)
            words.append(f"{key}={text}".replace("'", ""))
    return words


def _shown(value: Any) -> Any:
    """Return a value without local folders and passwords."""
    if not isinstance(value, str):
        return getattr(value, "name", "null" if value is None else value)
    return os.path.basename(value) if os.path.isabs(value) else re.sub(r"//[^/@]*@", "//", value)
