"""Checks of an experiment before launch. All problems are reported together."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open

from realhf.api.config import Device, ExperimentConfig
from realhf.api.config.model import ModelSpec
from realhf.api.config.option import leaves, range_problems
from realhf.api.config.preference import KTO_KL_KEYS
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import Graph, GraphError
from realhf.api.model_config import ModelConfig
from realhf.apps.prepare.backends import (
    choose_dtype,
    decoding_type_problems,
    quantization_problems,
    resolve_dtypes,
    trainer_problems,
    vllm_problems,
)
from realhf.apps.prepare.cadence import cadence_problems, checkpoint_plan
from realhf.apps.prepare.curriculum import curriculum_problems, empty_sources
from realhf.apps.prepare.hub import with_snapshots
from realhf.apps.prepare.lengths import lengths_of
from realhf.apps.prepare.plan_report import PlanReport
from realhf.apps.prepare.planning import MachineModel, limits_of, machine_of, plan_for_mode, planner_of
from realhf.apps.prepare.publish import push_problems
from realhf.arch.peft_config import ADAPTER_CONFIG, check_adapter
from realhf.base.atomic_io import TMP_SUFFIX, is_locked
from realhf.base.errors import InfeasibleError, UserError, did_you_mean
from realhf.base.paths import RunDir
from realhf.data.encode import EncodedRows, encode_split
from realhf.data.rows import read_rows
from realhf.data.tokenizer import has_tokenizer, load_tokenizer, same_tokens
from realhf.launch import launch_problems, launches_elsewhere
from realhf.launch.cuda import device_problems, has_gpu
from realhf.plan.advice.goals import Goal
from realhf.plan.compile.allocate import allocate, division_problems, with_backends
from realhf.plan.compile.check import key_problems, model_problems, sync_problems
from realhf.plan.compile.program import with_evaluation
from realhf.plan.fingerprint import ACCEPTABLE
from realhf.plan.run_spec import ExpectedPerformance, RunSpec, model_config, tokenizer_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Models = dict[str, ModelConfig | None]  # the architecture of every role, None for an invalid model
FREQUENCIES = tuple(f"{what}_freq_{unit}" for what in ("eval", "save", "ckpt") for unit in ("steps", "epochs", "secs"))
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
DATASET_KEYS = {
    Task.prompt: {"prompts", "row"},
    Task.math: {"prompts", "row"},
    Task.code: {"prompts", "row"},
    Task.episode: {"prompts", "row"},
    Task.answer: {"tokens", "prompt_mask", "row"},
    Task.sft: {"tokens", "prompt_mask"},
    Task.pairs: {"tokens", "prompt_mask", *KTO_KL_KEYS},
    Task.ranked: {"tokens", "prompt_mask"},
    Task.outcome: {"tokens", "prompt_mask", "label", *KTO_KL_KEYS},
    Task.process: {"tokens", "prompt_mask", "step_labels"},
}


@dataclass
class Findings:
    """Problems of options and files (``invalid``), and of the graph (``infeasible``)."""

    invalid: list[str] = field(default_factory=list)
    infeasible: list[str] = field(default_factory=list)

    def attempt(self, check: Callable[[], T], prefix: str = "") -> T | None:
        """Return the result of a check; or record its problems, with ``prefix`` for a ValueError, and return None."""
        try:
            return check()
        except UserError as error:
            self.invalid += error.problems
        except ValueError as error:
            self.invalid.append(f"{prefix}{error}")
        return None

    def report(self) -> None:
        """Raise all problems: a ``UserError``, or an ``InfeasibleError`` if options and files are valid."""
        if self.invalid or self.infeasible:
            raise (UserError if self.invalid else InfeasibleError)(self.invalid + self.infeasible)


def preflight(name: str, experiment: Experiment, paths: RunDir, resuming: bool = False) -> RunSpec:
    """Return the run of an experiment; ``UserError`` lists all problems."""
    findings = Findings()
    if not resuming:
        findings.invalid += directory_problems(experiment, paths)
    findings.invalid += run_problems(experiment)
    report = _check(name, experiment, findings, launching=True)
    prediction, machine = report.prediction, report.machine
    if prediction.peak > machine.hardware.usable:
        raise InfeasibleError(report.too_large())
    calls = {mfc: compute for mfc, (compute, _) in prediction.call_seconds.items()}
    expected = ExpectedPerformance(machine.source, prediction.seconds, calls, prediction.peak, machine.is_measured,
                                   machine.hardware.peak_flops, machine.hardware.peak_bandwidth,
                                   checkpoint_plan(report), report.relative_error,
                                   machine.hardware.errors)  # fmt: skip
    plan = with_evaluation(report.graph, report.plan)
    experiment = report.experiment
    return RunSpec(name, experiment, experiment.task, report.graph, experiment.roles(), plan, paths, report.device,
                   report.n_rows, expected, report.n_held_out, source_rows=report.source_rows)  # fmt: skip


def plan_report(
    name: str, experiment: Experiment, goal: Goal = Goal.step, starts: Sequence[ExecutionPlan] = ()
) -> PlanReport:
    """Return the plan without a launch: weights, devices and data are not required.

    ``starts`` are plans that a search also considers; they may be for fewer workers.
    """
    return _check(name, experiment, Findings(), launching=False, goal=goal, starts=starts)


def _check(
    name: str, experiment: Experiment, findings: Findings, launching: bool, goal: Goal = Goal.step,
    starts: Sequence[ExecutionPlan] = (),
) -> PlanReport:  # fmt: skip
    if problems := range_problems(leaves(experiment)):
        raise UserError(problems)
    experiment = with_snapshots(experiment, weights=launching)
    device = findings.attempt(lambda: pick_device(experiment, launching))
    if device == Device.cuda.value and launching:
        findings.invalid += device_problems(experiment)
    resolve_dtypes(experiment, device == Device.cuda.value)
    roles = experiment.roles()
    findings.invalid += experiment.problems() + cadence_problems(experiment)
    graph = _graph(experiment, findings)
    models = check_models(roles, findings, launching)
    known = {role: model for role, model in models.items() if model is not None}
    if findings.attempt(lambda: choose_dtype(experiment, known.values(), device)):
        roles = experiment.roles()
    findings.invalid += experiment.model_problems(known)
    plan = machine = rows = held_out = None
    if graph:
        findings.invalid += sync_problems(graph.syncs, known)
        options = experiment.placements()
        plan = findings.attempt(lambda: allocate(graph, experiment, options, known, device or "cpu", roles))
    if launching or any(experiment.dataset.sources):
        rows, held_out = _rows(experiment, models, findings) or (None, None)
    if graph:
        findings.invalid += role_problems(graph, experiment) + curriculum_problems(experiment, graph)
        findings.invalid += trainer_problems(graph, roles, device, launching)
        findings.invalid += decoding_type_problems(experiment.sampling_options(), graph, known, roles, device)
        findings.invalid += evaluation_problems(graph, experiment)
        findings.invalid += push_problems(experiment, graph) + quantization_problems(roles) if launching else []
    if plan and graph and launching:
        findings.invalid += vllm_problems(experiment, plan, experiment.sampling_options(), graph, known)
    if rows is not None and held_out is not None:
        findings.invalid += size_problems(experiment, rows, held_out, models) + empty_sources(experiment, rows.sizes)
    if device:
        machine = findings.attempt(lambda: machine_of(experiment, device, known, roles))
    lengths = findings.attempt(lambda: lengths_of(experiment))
    findings.report()
    assert graph and plan and machine and device
    n_rows, n_held_out = (len(data) if data is not None else 0 for data in (rows, held_out))
    source_rows = rows.sizes if rows is not None else ()

    def report(machine: MachineModel) -> PlanReport:
        planner = planner_of(experiment, graph, known, rows, machine, device, lengths)
        final, outcome = plan_for_mode(planner, experiment, plan, goal, starts)
        final = with_backends(final, graph, experiment.placements())
        prediction = planner.predict(final)
        return PlanReport(name, experiment, graph, final, planner, machine, prediction, device, n_rows, n_held_out,
                          source_rows, outcome)  # fmt: skip

    try:
        return report(machine)
    except ValueError as error:  # the profile does not cover the plan
        limits = limits_of(experiment, device)
        return report(replace(limits, source=f"{limits.source} ({error})"))


def _graph(experiment: Experiment, findings: Findings) -> Graph | None:
    """Return the graph, or None if it or the inputs of its calls are invalid."""
    graph, task = None, experiment.task
    try:
        graph = experiment.graph()
        mfcs, evaluation, averages = graph.mfcs, graph.evaluation, [sync.target for sync in graph.syncs]
    except GraphError as error:
        mfcs, evaluation, averages = error.mfcs, (), []
        findings.infeasible += error.problems
    for calls in (mfcs, evaluation):
        findings.infeasible += key_problems(calls, DATASET_KEYS[task], f"{task.value} data")
    findings.infeasible += model_problems(mfcs, experiment.roles(), averages)
    options = experiment.placements() if graph else {}
    findings.infeasible += [f"MFC {m.name}: placements() has no options for it{did_you_mean(m.name, options)}"
                            for m in mfcs if graph and m.name not in options]  # fmt: skip
    findings.invalid += division_problems(mfcs, options)
    return None if findings.infeasible else experiment.divided_graph()


def _rows(experiment: Experiment, models: Models, findings: Findings) -> tuple[EncodedRows, EncodedRows] | None:
    roles = experiment.roles()
    broken = {Path(roles[role].spec.path or "") for role, model in models.items() if model is None}
    if tokenizer_dir(roles) not in broken:
        tokenizer = findings.attempt(lambda: check_tokenizer(roles, models))
        if tokenizer is not None:
            findings.invalid += experiment.tokenizer_problems(len(tokenizer))
            rows = findings.attempt(lambda: encode_split(experiment.dataset, experiment.task, tokenizer))
            if rows is not None and len(fields := rows[0][0].fields):
                findings.infeasible += experiment.row_problems(json.loads(fields.tobytes()))
            return rows
    for path in experiment.dataset.sources:
        findings.attempt(partial(read_rows, replace(experiment.dataset, path=path), experiment.task))
    return None


def running_message(paths: RunDir) -> str:
    return f"{paths.root} has a run in progress; realhf stop {paths.root} ends it after the current step"


def directory_problems(config: ExperimentConfig, paths: RunDir, is_owner: bool = False) -> list[str]:
    """Return reasons why a new run cannot use the directory; ``is_owner`` if this process holds its lock."""
    problems = []
    for option in ("experiment_name", "trial_name"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value := getattr(config, option)):
            problems.append(f"{option}='{value}': use letters, digits, '.', '_' and '-'")
    existing = next(p for p in (paths.root, *paths.root.parents) if os.path.exists(p))
    if not existing.is_dir():
        return [*problems, f"cannot create {paths.root}: {existing} is a file; set fileroot or trial_name"]
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return [*problems, f"no write permission in {existing}; set fileroot"]
    if not is_owner and is_locked(paths.lock):
        problems.append(running_message(paths))
    elif paths.root.exists() and any(not path.name.endswith(TMP_SUFFIX) for path in paths.root.iterdir()):
        if not paths.config.exists():
            problems.append(f"{paths.root} is not empty and contains no realhf run; choose another trial_name")
        elif not config.overwrite:
            problems.append(f"{paths.root} already contains a run; choose another trial_name, or set overwrite=True")
    return problems


def run_problems(config: ExperimentConfig) -> list[str]:
    """Return problems of the launch mode and of accepted differences."""
    unknown = sorted(set(config.resume.accept).difference(ACCEPTABLE))
    return launch_problems(config) + [
        f"resume.accept=[{part}]: known are {', '.join(ACCEPTABLE)}{did_you_mean(part, ACCEPTABLE)}" for part in unknown
    ]


def evaluation_problems(graph: Graph, config: ExperimentConfig) -> list[str]:
    """Return evaluation options that would have no effect."""
    if graph.evaluation:
        return []
    data, control = config.dataset, config.exp_ctrl
    values = {"dataset.eval_path": data.eval_path, "dataset.eval_fraction": data.eval_fraction}
    if problems := [f"{key}={value}: this experiment has no evaluation" for key, value in values.items() if value]:
        return problems
    options = ("async_eval", "keep_best", *(name for name in FREQUENCIES if name.startswith("eval_")))
    return [f"exp_ctrl.{key}={value}: there are no held-out rows" for key in options
            if (value := getattr(control, key)) not in (None, "", False)]  # fmt: skip


def role_problems(graph: Graph, config: ExperimentConfig) -> list[str]:
    trained = graph.results
    known = ", ".join(trained) or "none"
    return [f"save_roles: '{r}' is not trained (roles: {known})" for r in config.save_roles if r not in trained]


def pick_device(config: ExperimentConfig, launching: bool = True) -> str:
    """Return ``cpu`` or ``cuda``."""
    if not launching and (config.device is not Device.auto or config.planner.hardware):  # may be another machine
        return "cpu" if config.device is Device.cpu or config.planner.hardware == "cpu" else "cuda"
    if launching and launches_elsewhere(config):
        if config.device is Device.auto:
            raise UserError(f"mode={config.mode.value} runs workers on other machines; set device=cuda or device=cpu")
        return config.device.value
    if config.device is Device.cuda and not has_gpu():
        raise UserError("device=cuda, but CUDA shows no device: there is no NVIDIA driver, or CUDA_VISIBLE_DEVICES "
                        "hides all devices; set device=cpu")  # fmt: skip
    return "cuda" if config.device is not Device.cpu and has_gpu() else "cpu"


def check_models(roles: dict[str, RoleSpec], findings: Findings, launching: bool) -> Models:
    """Return the architecture of every role, None for an invalid model; shared models are reported once."""
    models: Models = {}
    broken: list[tuple[str | None, str | None]] = []
    for role, spec in roles.items():
        source = (spec.spec.path, spec.spec.config)
        is_reported = source in broken and (spec.starts_as is not None or spec.spec.init_critic_from_actor)
        check = partial(check_model, role, spec, launching)
        models[role] = None if is_reported else findings.attempt(check, f"{role}: ")
        if models[role] is None:
            broken.append(source)
    return models


def check_model(role: str, spec: RoleSpec, launching: bool) -> ModelConfig:
    """Return a role's architecture; a launch also requires its weights."""
    options = spec.spec
    check_source(role, options, launching)
    config = model_config(spec)
    if options.lora.init_from and config.lora and config.lora.rank:
        check_adapter(Path(options.lora.init_from), config)
    return config


def check_source(role: str, options: ModelSpec, launching: bool) -> None:
    """Raise UserError unless a role has a folder of weights, or a configuration for random weights or a plan."""
    if options.init_from_scratch:
        if not options.config:
            raise UserError(f"{role}.init_from_scratch=True needs {role}.config=FOLDER_OR_JSON")
    elif not options.path:
        if launching or not options.config:
            raise UserError(f"{role}.path is not set (a Hugging Face folder), and {role}.init_from_scratch is not True")
    elif options.config:
        raise UserError(f"{role}.config={options.config} is not read: {role}.path has a configuration of its own")
    elif not Path(options.path).is_dir():
        raise UserError(f"{role}.path={options.path}: there is no such folder")
    elif (Path(options.path) / ADAPTER_CONFIG).is_file():
        raise UserError(f"{role}.path={options.path}: the folder has LoRA adapters; set {role}.path to their base "
                        f"model and {role}.lora.init_from to the folder")  # fmt: skip
    elif launching and not any((Path(options.path) / name).is_file() for name in WEIGHTS):
        raise UserError(f"{role}.path={options.path}: the folder has no weights ({' or '.join(WEIGHTS)})")
    elif launching and (problems := weight_problems(Path(options.path))):
        raise UserError([f"{role}.path={options.path}: {problem}" for problem in problems])


def weight_problems(folder: Path) -> list[str]:
    """Return a problem for every file of weights that is missing, truncated or damaged, by its header and size."""
    try:
        index = json.loads((folder / WEIGHTS[1]).read_text()) if (folder / WEIGHTS[1]).is_file() else {}
        files = sorted(set(index["weight_map"].values())) if index else [WEIGHTS[0]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{WEIGHTS[1]} is damaged ({type(error).__name__}: {error})"]
    problems = []
    for file in files:
        try:
            with safe_open(folder / file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} is missing or damaged ({error}); copy or download it again")
    return problems


def _roles_by(models: Models, size: Callable[[ModelConfig], Any]) -> dict[Any, str]:
    sizes = {role: size(model) for role, model in models.items() if model is not None}
    return {value: ", ".join(role for role in sizes if sizes[role] == value) for value in sizes.values()}


def check_tokenizer(roles: dict[str, RoleSpec], models: Models) -> "PreTrainedTokenizerBase":
    folder = tokenizer_dir(roles)
    if not str(folder) or str(folder) == ".":
        raise UserError(f"no tokenizer: set {next(iter(roles))}.tokenizer=FOLDER (models from scratch have none)")
    tokenizer = load_tokenizer(folder)
    problems = [
        f"{names}: the tokenizer in {folder} has {len(tokenizer)} tokens, the model's vocab_size is {vocab}"
        for vocab, names in _roles_by(models, lambda model: model.vocab).items()
        if len(tokenizer) > vocab
    ]
    for role, spec in roles.items():
        own = Path(spec.spec.tokenizer or spec.spec.path or folder)
        if has_tokenizer(own) and not same_tokens(own, folder):
            problems.append(f"{role}: its tokenizer {own} differs from {folder}; all roles must share one tokenizer")
    if problems:
        raise UserError(problems)
    return tokenizer


def size_problems(experiment: Experiment, rows: EncodedRows, held_out: EncodedRows, models: Models) -> list[str]:
    """Compare the data with the batch size and with the models' vocabularies and positions."""
    dataset, problems = experiment.dataset, []
    if (batch := dataset.train_bs_n_seqs) > len(rows):
        problems.append(f"dataset.train_bs_n_seqs={batch} is larger than the {len(rows)} rows of "
                        f"{', '.join(dataset.sources)}")  # fmt: skip
    sampling = experiment.sampling_options()
    n_new = sampling.max_new_tokens if sampling else 0
    longest = n_new + max(max(row.sequence_lengths, default=len(row.prompt)) for row in (*rows, *held_out))
    for vocab in _roles_by(models, lambda model: model.vocab):
        problems += [f"stop_token_ids: token {token} is outside the vocabulary of {vocab} tokens"
                     for token in (sampling.stop_token_ids if sampling else ()) if not 0 <= token < vocab]  # fmt: skip
    what = f"the longest prompt and {n_new} new tokens need" if n_new else "the longest row needs"
    option = "max_new_tokens or dataset.max_prompt_len" if n_new else "dataset.max_seqlen"
    for (positions, is_scaled), names in _roles_by(models, lambda m: (m.max_row_len, m.has_length_scaling)).items():
        if longest > positions:
            wider = f" or set rotary_length={longest} or more: all rows get the rotary embeddings of such rows"
            problems.append(f"{names}: the model has {positions} positions, {what} {longest}; lower {option}"
                            f"{wider if is_scaled else ''}")  # fmt: skip
    return problems
