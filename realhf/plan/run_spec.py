"""The specification of a run, which master and workers rebuild from config.yaml and plan.json."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from realhf.api.config.option import changed_options
from realhf.api.curriculum import CurriculumRules
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import Graph
from realhf.api.machine import ExpectedErrors
from realhf.api.model_config import Lora, ModelConfig
from realhf.api.program import Program
from realhf.arch.hf_config import read_hf_config
from realhf.arch.lora import lora_modules
from realhf.arch.quantization import check_quantization
from realhf.base.paths import RunDir
from realhf.plan.compile.program import compile_program
from realhf.plan.fingerprint import Fingerprint, take_fingerprint
from realhf.plan.goodput import CheckpointPlan
from realhf.plan.train_schedule import TrainSchedule, make_train_schedule

LARGEST_SCALING = 3.4e38  # of adapters, a float32


@dataclass(frozen=True)
class ExpectedPerformance:
    """Prediction before the launch: seconds per step and per call, peak bytes of a worker.

    ``is_measured`` is True if it is based on a profile of this machine. Peak rates are from a data sheet; 0 if unknown.
    ``checkpoints`` are those of ``exp_ctrl.ckpt_freq_steps=auto``. ``step_error`` is the expected relative error of
    ``step_s``, ``errors`` are those of its parts; 0 and None in plans of earlier versions.
    """

    source: str
    step_s: float
    calls: dict[str, float]
    peak_bytes: float
    is_measured: bool = True
    peak_flops: float = 0.0
    peak_bandwidth: float = 0.0
    checkpoints: CheckpointPlan | None = None
    step_error: float = 0.0
    errors: ExpectedErrors | None = None

    @property
    def memory_error(self) -> float:
        """Expected relative error of ``peak_bytes``; 0 if it is unknown."""
        return self.errors.memory if self.errors else 0.0


@dataclass(frozen=True)
class RunSpec:
    """A run. ``experiment`` is its name on the command line, ``n_rows`` the number of rows per epoch.

    ``source_rows`` are those of each source of training data. ``digest`` identifies the files that it was read from.
    """

    experiment: str
    config: Experiment
    task: Task
    graph: Graph
    roles: dict[str, RoleSpec]
    plan: ExecutionPlan
    paths: RunDir
    device: str
    n_rows: int
    expected: ExpectedPerformance | None = None
    n_held_out: int = 0
    digest: str = ""
    source_rows: tuple[int, ...] = ()

    @cached_property
    def schedule(self) -> TrainSchedule:
        control = self.config.exp_ctrl
        resamples = self.graph.filter_mfc.resamples if self.graph.filter_mfc else 0
        return make_train_schedule(self.config.dataset.train_bs_n_seqs, self.n_rows, control.total_train_epochs,
                          control.total_train_steps, resamples)  # fmt: skip

    @cached_property
    def curriculum(self) -> CurriculumRules | None:
        """The rules by which rows are chosen; None if only seed and position determine them."""
        rules = self.config.curriculum_rules()
        return rules if rules.has_effect else None

    @property
    def result_mfc(self) -> str:
        """The call whose results the curriculum remembers; empty for none."""
        reads = self.curriculum is not None and self.curriculum.reads_rewards
        return self.graph.producer["rewards"].name if reads else ""

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Digests of code and files as of the first access."""
        return take_fingerprint(self.experiment, self.config, self.graph, self.roles)

    @property
    def updated_roles(self) -> tuple[str, ...]:
        """Roles whose weights change during training."""
        return tuple(role for role in self.graph.roles if self.graph.updater(role) is not None)

    @property
    def saved_roles(self) -> list[str]:
        """Roles whose models are saved: the configured ones, or all results of training."""
        return self.config.save_roles or self.graph.results

    @property
    def temperature(self) -> float:
        """Sampling temperature; 1 without generation."""
        sampling = self.config.sampling_options()
        return sampling.temperature if sampling else 1.0

    @property
    def evaluates_beside_training(self) -> bool:
        """True if an evaluation runs during the next step, and training waits until its calls have the weights."""
        return bool(self.graph.evaluation) and self.config.exp_ctrl.async_eval

    @property
    def writes_checkpoints(self) -> bool:
        control = self.config.exp_ctrl
        return any((control.ckpt_freq_steps, control.ckpt_freq_epochs, control.ckpt_freq_secs))

    @property
    def checkpoint_steps(self) -> int | None:
        """Steps between checkpoints, as given or as chosen before the launch; None if steps do not trigger them."""
        steps = self.config.exp_ctrl.ckpt_freq_steps
        if not isinstance(steps, str):
            return steps
        assert self.expected is not None and self.expected.checkpoints is not None, "no cadence has been chosen"
        return self.expected.checkpoints.cadence

    @cached_property
    def eval_schedule(self) -> TrainSchedule:
        """Steps over the held-out rows, whose positions in the data stream follow those of the training prompts."""
        batch = self.schedule.batch_size
        first, n_steps = -(-self.schedule.n_prompts // batch), -(-self.n_held_out // batch)
        return TrainSchedule(batch, first * batch + self.n_held_out, first + n_steps, first, self.schedule.resamples)

    @cached_property
    def program(self) -> Program:
        return compile_program(self.graph, self.plan)

    @cached_property
    def models(self) -> dict[str, ModelConfig]:
        """Model architectures by role."""
        return {name: model_config(role) for name, role in self.roles.items()}

    def engine_role(self, role: str) -> RoleSpec:
        """Return a role as its engine needs it: with the plan's choices in place of options that are ``auto``."""
        trainer = self.graph.trainer(role)
        return self.roles[role].with_choices(self.plan[trainer.name].saving if trainer else None)

    @property
    def fetch_ranks(self) -> tuple[int, ...]:
        """Workers that read the data set: the data-parallel heads of the first MFC that needs it."""
        return self.plan[self.graph.fetcher.name].layout.dp_heads()

    @property
    def tokenizer_dir(self) -> Path:
        return tokenizer_dir(self.roles)


def model_config(role: RoleSpec) -> ModelConfig:
    """Read a role's architecture from its model directory or config file; ValueError if it is invalid."""
    source = role.spec.path if role.spec.path and not role.spec.init_from_scratch else role.spec.config
    config = read_hf_config(Path(source or ""), scalar_head=role.scalar_head, text_only=role.spec.text_only)
    if length := role.spec.rotary_length:
        config = with_rotary_length(config, length)
    options, quantization = role.spec.lora, role.spec.lora.quantization
    if not options.rank:
        if changed := [f"lora.{name}" for name in changed_options(options)]:
            raise ValueError(f"{', '.join(changed)} without lora.rank, which is 0: all weights are trained")
        return config
    if options.alpha / options.rank > LARGEST_SCALING:
        raise ValueError(f"lora.alpha={options.alpha:g} / lora.rank={options.rank} is larger than a float32")
    lora = Lora(options.rank, options.alpha, tuple(options.targets), dropout=options.dropout)
    if quantization.bits:
        lora = replace(lora, bits=quantization.bits, group_size=options.quantization_group_size)
    config = replace(config, lora=replace(lora, rank=0, targets=(), dropout=0.0) if role.is_base else lora)
    lora_modules(config)  # all targets are modules of the model
    check_quantization(config)
    return config


def with_rotary_length(config: ModelConfig, length: int) -> ModelConfig:
    """Return the model with the rotary embeddings of rows of ``length`` tokens; ValueError if it has no such rows."""
    if not config.has_length_scaling:
        raise ValueError("rotary_length is for LongRoPE and dynamic rotary scaling, which this model does not have")
    scaling = dict(config.rotary_scaling)
    if scaling["rope_type"] == "longrope" and length > config.max_positions:
        raise ValueError(f"rotary_length={length} exceeds the {config.max_positions} positions of the model")
    return replace(config, rotary_length=length)


def tokenizer_dir(roles: dict[str, RoleSpec]) -> Path:
    """Return the directory of the tokenizer, which all roles share: the first one that is configured."""
    folders = (role.spec.tokenizer or role.spec.path for role in roles.values())
    return Path(next(filter(None, folders), ""))
