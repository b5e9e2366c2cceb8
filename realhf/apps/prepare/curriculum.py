"""Checks of the sources of training data and of the curriculum."""

from collections.abc import Sequence

from realhf.api.config import CurriculumConfig, DatasetConfig
from realhf.api.config.option import leaves
from realhf.api.experiment import Experiment, Task
from realhf.api.graph import Graph

HAVE_COLUMNS = (Task.prompt, Task.math, Task.code, Task.episode, Task.answer)
"""Tasks whose rows keep all columns of the file."""


def curriculum_problems(experiment: Experiment, graph: Graph) -> list[str]:
    """Return contradictions of the options ``dataset.paths``, ``dataset.weights`` and ``dataset.curriculum``."""
    data, options = experiment.dataset, experiment.dataset.curriculum
    problems = source_problems(data) + band_problems(options)
    if experiment.curriculum_rules().reads_rewards:
        changed = "dataset.curriculum with pass rates, and dataset_max_filter_percentage,"
        if "rewards" not in graph.producer:
            problems.append(f"{changed} need rewards, which this experiment does not have")
        if any(mfc.carried for mfc in graph.mfcs):
            problems.append(f"{changed} need the results of a step's own prompts: not with env.partial_tokens")
    if options.sort_by and experiment.task not in HAVE_COLUMNS:
        problems.append(f"dataset.curriculum.sort_by={options.sort_by}: rows of {experiment.task.value} data have no "
                        "further columns")  # fmt: skip
    return problems


def source_problems(data: DatasetConfig) -> list[str]:
    problems, final = [], data.curriculum.final_weights
    if data.paths and data.path:
        problems.append("dataset.path and dataset.paths are both set; use one of them")
    for key, weights in (("dataset.weights", data.weights), ("dataset.curriculum.final_weights", final)):
        if weights and len(weights) != len(data.paths):
            problems.append(f"{key} has {len(weights)} numbers, dataset.paths has {len(data.paths)} paths")
        elif weights and not sum(weights):
            problems.append(f"{key}={weights}: one weight must be positive")
    return problems


def empty_sources(experiment: Experiment, sizes: Sequence[int]) -> list[str]:
    """Return the sources of which all rows are held out."""
    empty = [path for path, size in zip(experiment.dataset.sources, sizes, strict=True) if not size]
    fraction = experiment.dataset.eval_fraction
    return [f"dataset.eval_fraction={fraction} holds out all rows of {path}; set dataset.eval_path" for path in empty]


def band_problems(options: CurriculumConfig) -> list[str]:
    """Return contradictions of pass rates and of the ramp."""
    section, values = "dataset.curriculum", {key: value for key, _, value in leaves(options)}
    low, high = (f"{end}_pass_rate" for end in ("min", "max"))
    ends = [values[f"final_{key}"] if values[f"final_{key}"] is not None else values[key] for key in (low, high)]
    problems = []
    if values[low] > values[high]:
        problems.append(f"{section}.{low}={values[low]} is larger than {section}.{high}={values[high]}")
    if ends[0] > ends[1]:
        problems.append(f"{section}: the final minimum {ends[0]} is larger than the final maximum {ends[1]}")
    finals = [key for key, value in values.items() if key.startswith("final_") and value not in (None, [])]
    if finals and not options.ramp_steps:
        problems.append(f"{section}.{finals[0]} needs {section}.ramp_steps")
    if options.ramp_steps and not finals:
        problems.append(f"{section}.ramp_steps={options.ramp_steps}: no final value is set")
    return problems
