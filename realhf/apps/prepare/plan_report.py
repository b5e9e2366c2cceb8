"""The plan of an experiment with its prediction, as ``realhf plan`` shows it."""

from dataclasses import dataclass, replace
from functools import cached_property

from realhf.api.config import MFCConfig
from realhf.api.execution_plan import ExecutionPlan
from realhf.api.experiment import Experiment
from realhf.api.graph import Graph
from realhf.apps.prepare.option_help import options_of
from realhf.apps.prepare.planning import MachineModel, SearchOutcome, plan_for_mode, replan
from realhf.plan.advice.expected_error import difference_error, seconds_by_kind, seconds_error
from realhf.plan.advice.suggest_fix import out_of_memory_message
from realhf.plan.advice.throughput import Economy, economy, step_work
from realhf.plan.compile.allocate import PLANNED, allocate, micro_batching
from realhf.plan.compile.plan_text import plan_text
from realhf.plan.search.planner import Planner
from realhf.plan.search.timeline import Prediction


@dataclass(frozen=True)
class PlanReport:
    """The plan of an experiment and its prediction. The numbers of rows are 0 without a dataset."""

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
    source_rows: tuple[int, ...]
    search: SearchOutcome | None = None

    @property
    def allocation_text(self) -> str:
        """The ``allocation_mode`` that makes this plan, with the same options otherwise."""
        options = self.experiment.placements().items()
        return plan_text(self.plan, {name: micro_batching(option, self.device) for name, option in options})

    @property
    def relative_error(self) -> float:
        """Expected relative error of the step's seconds, as a standard deviation."""
        return self.relative_error_of(self.prediction)

    def relative_error_of(self, prediction: Prediction) -> float:
        """Return the expected relative error of the seconds of a predicted step of this run."""
        kinds = seconds_by_kind(prediction.timeline, self.graph)
        return seconds_error(kinds, self.machine.hardware.errors) / max(prediction.seconds, 1e-12)

    def is_equal(self, first: Prediction, second: Prediction) -> bool:
        """Return whether two predicted steps are closer than the expected error of their difference."""
        a, b = (seconds_by_kind(prediction.timeline, self.graph) for prediction in (first, second))
        return abs(first.seconds - second.seconds) <= difference_error(a, b, self.machine.hardware.errors)

    @cached_property
    def economy(self) -> Economy:
        """Tokens per second, utilisation and price of a step."""
        return self.economy_of(self.prediction.seconds)

    def economy_of(self, seconds: float) -> Economy:
        """Return the rates and the price of a step of this run that takes ``seconds``."""
        peak, price = self.machine.hardware.peak_flops, self.experiment.planner.dollars_per_gpu_hour
        work = step_work(self.planner.calls, self.graph.mfcs)
        return economy(work, seconds, self.plan.n_workers, peak, price)

    @property
    def n_rows_text(self) -> str:
        return f"{self.n_rows} rows" if self.n_rows else "maximum-length sequences"

    def under(self, mode: str) -> tuple[ExecutionPlan, Prediction]:
        """Return plan and prediction of another allocation mode; the meshes of ``manual`` apply only to that mode."""
        options = self.experiment.placements()
        if mode != "manual":
            options = {name: MFCConfig(mb_spec=option.mb_spec) for name, option in options.items()}
        config = replace(self.experiment, allocation_mode=mode)
        models, roles = self.planner.calls.cost.models, self.experiment.roles()
        plan = allocate(self.graph, config, options, models, self.device, roles)
        plan, _ = plan_for_mode(self.planner, config, plan)
        return plan, self.planner.predict(plan)

    @property
    def fits(self) -> bool:
        return self.prediction.peak <= self.machine.hardware.usable

    def too_large(self) -> str:
        """Return why the plan does not fit, with a suggested fix."""
        mode = self.experiment.allocation_mode
        option = next((o.key for o in options_of(type(self.experiment)) if o.key.endswith("max_num_seqs")), "no slots")
        return out_of_memory_message(self.planner, self.plan, self.prediction,
                                     lambda planner: replan(planner, mode, self.plan),
                                     "" if mode in PLANNED else option)  # fmt: skip
