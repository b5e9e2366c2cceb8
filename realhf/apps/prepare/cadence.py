"""The cadence of checkpoints that ``exp_ctrl.ckpt_freq_steps=auto`` chooses."""

from typing import TYPE_CHECKING

from realhf.api.config import ExperimentConfig
from realhf.api.config.option import COUNT
from realhf.plan.cost.checkpoint import checkpoint_size, checkpoint_times, restore_seconds
from realhf.plan.goodput import CheckpointPlan, CheckpointTimes, FailureRate, choose_checkpoints
from realhf.plan.train_schedule import make_train_schedule

if TYPE_CHECKING:
    from realhf.apps.prepare.plan_report import PlanReport

AUTO = "auto"
HOUR_S = 3600.0


def cadence_problems(config: ExperimentConfig) -> list[str]:
    value = config.exp_ctrl.ckpt_freq_steps
    if value == AUTO or not isinstance(value, str):
        return []
    return [f"exp_ctrl.ckpt_freq_steps={value}: expected a number of steps, or {AUTO}"]


def checkpoint_plan(report: "PlanReport") -> CheckpointPlan | None:
    """Return the checkpoints of a run whose cadence is chosen; None if its options set the cadence.

    Detection takes as long as that of a lost node. Without data the length of the run is ``total_train_steps``.
    """
    config, planner, plan, n_rows = report.experiment, report.planner, report.plan, report.n_rows
    control, options = config.exp_ctrl, config.planner
    if control.ckpt_freq_steps != AUTO:
        return None
    size, disk = checkpoint_size(planner.calls.cost, plan), planner.calls.hardware.disk
    times = checkpoint_times(planner.calls.cost, size, disk)
    if options.checkpoint_s is not None:
        times = CheckpointTimes(times.copy_s, options.checkpoint_s)
    detect_s = config.heartbeat_timeout or config.call_timeout
    down_s = detect_s + options.startup_s + restore_seconds(size, disk)
    rate = FailureRate(options.mtbf_hours * HOUR_S / plan.n_workers, down_s)
    n_steps = control.total_train_steps or int(COUNT.high)
    if n_rows:
        batch = config.dataset.train_bs_n_seqs
        n_steps = make_train_schedule(batch, n_rows, control.total_train_epochs, control.total_train_steps).n_steps
    return choose_checkpoints(report.prediction.seconds, times, rate, n_steps)
