"""Everything that can be known to be wrong before a process starts, found in one go."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from realhf.api.config import Device, ExperimentConfig, MFCConfig
from realhf.api.config.preference import KTO_KL_KEYS
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import Graph, GraphError
from realhf.api.model_config import ModelConfig
from realhf.apps.prepare.backends import server_problems, settle_types, trainer_problems
from realhf.apps.prepare.options import options_of
from realhf.apps.prepare.planning import MachineModel, limits_of, machine_of, planned, planner_of, replanned
from realhf.apps.prepare.run_dir_checks import directory_problems
from realhf.base.errors import InfeasibleError, UserError, did_you_mean
from realhf.base.paths import RunDir
from realhf.data.encode import EncodedRows, encode_split
from realhf.data.rows import read_rows
from realhf.data.tokenizer import load_tokenizer
from realhf.launch import launch_problems, launches_elsewhere
from realhf.plan.compile.allocate import PLANNED, allocate, with_backends
from realhf.plan.compile.check import key_problems, model_problems
from realhf.plan.compile.program import with_evaluation
from realhf.plan.run_spec import ExpectedPerformance, RunSpec, model_config, tokenizer_dir
from realhf.plan.search.planner import Planner
from realhf.plan.search.prediction import Prediction
from realhf.plan.search.suggest_fix import out_of_memory_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
FREQUENCIES = tuple(f"{what}_freq_{unit}" for what in ("eval", "save", "ckpt") for unit in ("steps", "epochs", "secs"))
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
DATASET_KEYS = {
    Task.prompt: {"prompts", "row"},
    Task.math: {"prompts", "row"},
    Task.code: {"prompts", "row"},
    Task.answer: {"tokens", "prompt_mask", "row"},
    Task.sft: {"tokens", "prompt_mask"},
    Task.pairs: {"tokens", "prompt_mask", *KTO_KL_KEYS},
    Task.ranked: {"tokens", "prompt_mask"},
    Task.outcome: {"tokens", "prompt_mask", "label", *KTO_KL_KEYS},
    Task.process: {"tokens", "prompt_mask", "step_labels"},
}


@dataclass
class _Findings:
    """What is wrong so far: with options and files, and with the graph. ``attempt`` keeps the complaint of a check."""

    problems: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)

    def attempt(self, check: Callable[[], T]) -> T | None:
        try:
            return check()
        except UserError as error:
            self.problems += error.problems
        except ValueError as error:
            self.problems.append(str(error))
        return None

    def report(self) -> None:
        """Raise everything; ``Impossible`` where options and files are right."""
        if self.problems or self.impossible:
            raise (UserError if self.problems else InfeasibleError)(self.problems + self.impossible)


@dataclass(frozen=True)
class PlanReport:
    """What can be known of an experiment before it runs. Numbers of rows are 0 where no data set is named."""

    name: str
    experiment: Experiment
    graph: Graph
    plan: ExecutionPlan
    planner: Planner
    machine: MachineModel
    prediction: Prediction
    device: str
    n_rows: int
    n_held_out: int

    @property
    def n_rows_text(self) -> str:
        return f"{self.n_rows} rows" if self.n_rows else "rows of full length"

    def under(self, mode: str) -> ExecutionPlan:
        """Return the plan of another allocation mode, which passes over the meshes of ``manual``."""
        options = self.experiment.placements()
        if mode != "manual":
            options = {name: MFCConfig(mb_spec=option.mb_spec) for name, option in options.items()}
        config = replace(self.experiment.config, allocation_mode=mode)
        plan = allocate(self.graph, config, options, self.planner.calls.cost.models, self.device)
        return planned(self.planner, config) if mode in PLANNED else plan

    def too_large(self) -> str:
        """Say why the plan does not fit, and what to do about it."""
        config = self.experiment.config
        mode = config.allocation_mode
        slots = next((o.key for o in options_of(type(config)) if o.key.endswith("max_num_seqs")), "no slots")
        return out_of_memory_message(self.planner, self.prediction, lambda planner: replanned(planner, mode, self.plan),
                         "" if mode in PLANNED else slots)  # fmt: skip


def preflight(name: str, experiment: Experiment, paths: RunDir, resuming: bool = False) -> RunSpec:
    """Return the run that an experiment stands for, or raise one ``UserError`` with every problem found."""
    config, findings = experiment.config, _Findings()
    if not resuming:
        findings.problems += directory_problems(config, paths)
    findings.problems += run_problems(config)
    found = _look(name, experiment, findings, launching=True)
    prediction = found.prediction
    if prediction.peak > found.machine.hardware.usable:
        raise InfeasibleError(found.too_large())
    calls = {mfc: compute for mfc, (compute, _) in prediction.call_seconds.items()}
    machine, peaks = found.machine, (found.machine.hardware.peak_flops, found.machine.hardware.peak_bandwidth)
    expected = ExpectedPerformance(
        machine.source, prediction.seconds, calls, prediction.peak, machine.is_measured, *peaks
    )
    plan = with_evaluation(found.graph, found.plan)
    return RunSpec(name, config, experiment.task, found.graph, experiment.roles(), plan, paths, found.device,
                   found.n_rows, expected, found.n_held_out)  # fmt: skip


def survey(name: str, experiment: Experiment) -> PlanReport:
    """Return what ``realhf plan`` tells: as ``preflight``, but neither weights nor devices nor data need be there."""
    return _look(name, experiment, _Findings(), launching=False)


def _look(name: str, experiment: Experiment, findings: _Findings, launching: bool) -> PlanReport:
    config = experiment.config
    device = findings.attempt(lambda: pick_device(config, launching))
    settle_types(config, device == Device.cuda.value)
    roles = experiment.roles()
    findings.problems += experiment.problems() + planner_problems(config)
    graph = _graph(experiment, findings) if config.dataset.train_bs_n_seqs >= 1 else None
    models = check_models(roles, findings, launching)
    known = {role: model for role, model in models.items() if model is not None}
    has_workers = min(config.n_nodes, config.n_gpus_per_node) >= 1
    plan = None
    if graph and has_workers:
        plan = findings.attempt(lambda: allocate(graph, config, experiment.placements(), known, device or "cpu"))
    rows = held_out = None
    if launching or config.dataset.path:
        rows, held_out = _rows(experiment, models, findings) or (None, None)
    if graph:
        findings.problems += role_problems(graph, config)
        findings.problems += trainer_problems(graph, roles, device, launching)
        findings.problems += evaluation_options(graph, config)
    if plan and launching:
        findings.problems += server_problems(config, plan, experiment.sampling_options())
    if rows is not None and held_out is not None:
        findings.problems += size_problems(config, experiment, rows, held_out, models)
    machine = None
    if device and has_workers:
        machine = findings.attempt(lambda: machine_of(config, device, known, roles))
    findings.report()
    assert graph and plan and machine and device
    n_rows, n_held_out = (len(some) if some is not None else 0 for some in (rows, held_out))

    def on(machine: MachineModel) -> PlanReport:
        planner = planner_of(experiment, graph, known, rows, machine, device)
        chosen = planned(planner, config) if config.allocation_mode in PLANNED else plan
        chosen = with_backends(chosen, graph, experiment.placements())
        prediction = planner.predict(chosen)
        return PlanReport(name, experiment, graph, chosen, planner, machine, prediction, device, n_rows, n_held_out)

    try:
        return on(machine)
    except ValueError as error:  # the profile lacks something that the plan needs
        limits = limits_of(config, device)
        return on(replace(limits, source=f"{limits.source} ({error})"))


def _graph(experiment: Experiment, findings: _Findings) -> Graph | None:
    """Return the graph if it is one and every call has what it needs; otherwise all that is wrong with it is found."""
    graph = None
    try:
        graph = experiment.graph()
        mfcs = graph.mfcs
    except GraphError as error:
        mfcs = error.mfcs
        findings.impossible += error.problems
    task = experiment.task
    findings.impossible += key_problems(mfcs, DATASET_KEYS[task], f"{task.value} data")
    if graph:
        findings.impossible += key_problems(graph.evaluation, DATASET_KEYS[task], f"{task.value} data")
    findings.impossible += model_problems(mfcs, experiment.roles())
    if graph:
        options = experiment.placements()
        findings.impossible += [
            f"MFC {m.name}: placements() has no options for it{did_you_mean(m.name, options)}"
            for m in mfcs
            if m.name not in options
        ]
    return None if findings.impossible else graph


def _rows(
    experiment: Experiment, models: dict[str, ModelConfig | None], findings: _Findings
) -> tuple[EncodedRows, EncodedRows] | None:
    """Return the rows to train on and those that are held out."""
    config, roles = experiment.config, experiment.roles()
    broken = {Path(roles[role].spec.path or "") for role, model in models.items() if model is None}
    is_readable = tokenizer_dir(roles) not in broken
    tokenizer = findings.attempt(lambda: check_tokenizer(roles, models)) if is_readable else None
    if tokenizer is not None:
        return findings.attempt(lambda: encode_split(config.dataset, experiment.task, tokenizer))
    findings.attempt(lambda: read_rows(config.dataset, experiment.task))
    return None


def run_problems(config: ExperimentConfig) -> list[str]:
    """Say why this run cannot have its mode or its length."""
    problems = launch_problems(config)
    control = config.exp_ctrl
    if control.keep_last < 0:
        problems.append(f"exp_ctrl.keep_last must not be negative, got {control.keep_last}")
    if config.recover_retries < 0:
        problems.append(f"recover_retries must not be negative, got {config.recover_retries}")
    for option in ("total_train_epochs", "total_train_steps", *FREQUENCIES):
        if (value := getattr(control, option)) is not None and value < 1:
            problems.append(f"exp_ctrl.{option} must be positive, got {value}")
    return problems


def planner_problems(config: ExperimentConfig) -> list[str]:
    """Say what no plan can be made for."""
    options = config.planner
    values = {
        "n_nodes": config.n_nodes,
        "n_gpus_per_node": config.n_gpus_per_node,
        "dataset.train_bs_n_seqs": config.dataset.train_bs_n_seqs,
        "planner.budget_s": options.budget_s,
        "planner.memory_gb": options.memory_gb,
        "planner.new_tokens": options.new_tokens,
    }
    return [f"{key} must be positive, got {value}" for key, value in values.items() if value is not None and value <= 0]


def evaluation_options(graph: Graph, config: ExperimentConfig) -> list[str]:
    """Say which options of an evaluation would go unread."""
    if graph.evaluation:
        return []
    data, where = config.dataset, "held-out rows"
    unread = {"dataset.eval_path": data.eval_path, "dataset.eval_fraction": data.eval_fraction}
    problems = [f"{key}={value}: this experiment has no use for {where}" for key, value in unread.items() if value]
    if not problems:
        options = ("keep_best", *(name for name in FREQUENCIES if name.startswith("eval_")))
        given = {name: getattr(config.exp_ctrl, name) for name in options}
        problems += [f"exp_ctrl.{key}={value}: there are no {where}" for key, value in given.items()
                     if value not in (None, "")]  # fmt: skip
    return problems


def role_problems(graph: Graph, config: ExperimentConfig) -> list[str]:
    trained = [role for role in graph.roles if graph.trainer(role)]
    known = ", ".join(trained) or "none"
    return [f"save_roles: '{r}' is no trained role ({known})" for r in config.save_roles if r not in trained]


def pick_device(config: ExperimentConfig, launching: bool = True) -> str:
    """Return ``cpu`` or ``cuda``; the driver's control file tells, without loading torch.

    A plan may be for hardware that is elsewhere.
    """
    if not launching and (config.device is not Device.auto or config.planner.hardware):
        return "cpu" if config.device is Device.cpu or config.planner.hardware == "cpu" else "cuda"
    if launching and launches_elsewhere(config):
        if config.device is Device.auto:
            raise UserError(f"mode={config.mode.value}: workers run on other machines than this; set device=cuda or "
                            "device=cpu")  # fmt: skip
        return config.device.value
    has_gpu = Path("/dev/nvidiactl").exists()
    if config.device is Device.cuda and not has_gpu:
        raise UserError("device=cuda, but this machine shows no NVIDIA driver; set device=cpu")
    return "cuda" if config.device is Device.cuda or (config.device is Device.auto and has_gpu) else "cpu"


def check_models(
    roles: dict[str, RoleSpec], findings: _Findings, launching: bool = True
) -> dict[str, ModelConfig | None]:
    """Return every role's architecture; what is wrong with a model that several roles start from is said once."""
    models: dict[str, ModelConfig | None] = {}
    broken: list[tuple[str | None, str | None]] = []
    for role, spec in roles.items():
        source = (spec.spec.path, spec.spec.config)
        is_taken_over = spec.starts_as is not None or spec.spec.init_critic_from_actor
        models[role] = None
        if not (is_taken_over and source in broken):
            models[role] = findings.attempt(partial(check_model, role, spec, launching))
        if models[role] is None:
            broken.append(source)
    return models


def check_model(role: str, spec: RoleSpec, launching: bool = True) -> ModelConfig:
    """Return a role's architecture; its files must be there, its weights for a launch only."""
    options = spec.spec
    if options.init_from_scratch:
        if not options.config:
            raise UserError(f"{role}.init_from_scratch=True needs {role}.config=FOLDER_OR_JSON")
        return _named(role, lambda: model_config(spec))
    if not options.path:
        raise UserError(f"{role}.path is not set (a Hugging Face folder), and {role}.init_from_scratch is not True")
    folder = Path(options.path)
    if not folder.is_dir():
        raise UserError(f"{role}.path={options.path}: there is no such folder")
    if launching and not any((folder / name).is_file() for name in WEIGHTS):
        raise UserError(f"{role}.path={options.path}: the folder has no weights ({' or '.join(WEIGHTS)})")
    return _named(role, lambda: model_config(spec))


def _named(role: str, read: Callable[[], ModelConfig]) -> ModelConfig:
    try:
        return read()
    except ValueError as error:
        raise UserError(f"{role}: {error}") from error


def _same(models: dict[str, ModelConfig | None], size: Callable[[ModelConfig], int]) -> dict[int, str]:
    """Return the names of the roles by the size of their models."""
    found: dict[int, list[str]] = {}
    for role, model in models.items():
        if model is not None:
            found.setdefault(size(model), []).append(role)
    return {value: ", ".join(names) for value, names in found.items()}


def check_tokenizer(roles: dict[str, RoleSpec], models: dict[str, ModelConfig | None]) -> "PreTrainedTokenizerBase":
    """Return the tokenizer that all roles share; tokens are never re-tokenised from one role to another."""
    folder = tokenizer_dir(roles)
    if not str(folder) or str(folder) == ".":
        first = next(iter(roles))
        raise UserError(f"no tokenizer: set {first}.tokenizer=FOLDER (models from scratch bring none)")
    tokenizer = load_tokenizer(folder)
    problems = [
        f"{names}: the tokenizer in {folder} has {len(tokenizer)} tokens, the model's vocab_size is {vocab}"
        for vocab, names in _same(models, lambda model: model.vocab).items()
        if len(tokenizer) > vocab
    ]
    reference = folder / "tokenizer.json"
    for role, spec in roles.items():
        own = Path(spec.spec.tokenizer or spec.spec.path or folder) / "tokenizer.json"
        if own.is_file() and reference.is_file() and own.read_bytes() != reference.read_bytes():
            problems.append(f"{role}: its tokenizer {own} differs from {reference}; all roles must read alike")
    if problems:
        raise UserError(problems)
    return tokenizer


def size_problems(
    config: ExperimentConfig,
    experiment: Experiment,
    rows: EncodedRows,
    held_out: EncodedRows,
    models: dict[str, ModelConfig | None],
) -> list[str]:
    """Compare the data with the batch and with the models' positions."""
    problems = []
    batch = config.dataset.train_bs_n_seqs
    if batch > len(rows):
        problems.append(f"dataset.train_bs_n_seqs={batch} is larger than the {len(rows)} rows of {config.dataset.path}")
    sampling = experiment.sampling_options()
    answer = sampling.max_new_tokens if sampling else 0
    longest = answer + max(max(row.sequence_lengths, default=len(row.prompt)) for row in (*rows, *held_out))
    what = f"the longest prompt and {answer} new tokens need" if answer else "the longest row needs"
    for vocabulary in {model.vocab for model in models.values() if model}:
        for token in sampling.stop_token_ids if sampling else ():
            if not 0 <= token < vocabulary:
                problems.append(f"stop_token_ids: there is no token {token}, the vocabulary has {vocabulary}")
    problems += [
        f"{names}: the model has {positions} positions, {what} {longest}; "
        f"lower {'max_new_tokens or dataset.max_prompt_len' if answer else 'dataset.max_seqlen'}"
        for positions, names in _same(models, lambda model: model.max_positions).items()
        if longest > positions
    ]
    return problems
