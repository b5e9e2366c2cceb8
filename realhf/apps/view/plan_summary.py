"""The summary of a planned step: time, throughput, price, and the assumptions of the prediction."""

from statistics import fmean

from realhf.api.machine import Workload
from realhf.apps.prepare.cadence import checkpoint_plan
from realhf.apps.prepare.plan_report import PlanReport
from realhf.apps.view.error_text import with_error
from realhf.apps.view.tables import Listing, size_text
from realhf.plan.advice.expected_error import margin_text
from realhf.plan.advice.throughput import Economy


def step_table(report: PlanReport) -> Listing:
    prediction, found = report.prediction, report.economy
    shares = prediction.critical_shares.items()
    path = ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares if share >= 0.005)
    low, high = ("", "") if report.machine.is_measured else ("at least ", "at most ")
    rows = [
        (f"{low}" if low else "predicted", with_error(f"{prediction.seconds:.4g} s", report.relative_error)),
        ("throughput", f"{high}{rate_text(found.tokens_per_s)} {found.word} tokens/s, "
                       f"{rate_text(found.tokens_per_s_per_worker)} per {_device(report)}"),
        ("MFU", f"{high}{100 * found.mfu:.3g}%" if found.mfu else "unknown: the hardware has no peak_flops"),
        ("cost", low + cost_text(found, _device(report))),
        ("assumed", assumptions(report.planner.calls.cost.workload, report.planner.calls.batch_size)),
    ]  # fmt: skip
    if report.search:
        rows.append(("search", str(report.search)))
    if checkpoints := checkpoint_plan(report):
        rows.append(("checkpoints", str(checkpoints)))
    hardware = report.machine.hardware
    peak = with_error(size_text(prediction.peak), hardware.errors.memory)
    memory = f"peak {peak}; a worker has {size_text(hardware.memory)}, of which plans leave {margin_text(hardware)}"
    busy = f"{100 * (1 - prediction.timeline.idle):.0f}%"
    rows += [("memory", memory), ("workers busy", busy), ("critical path", path)]
    return Listing("step", "ll", (), tuple((name.strip(), text) for name, text in rows))


def _device(report: PlanReport) -> str:
    return "worker" if report.device == "cpu" else "GPU"


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def cost_text(found: Economy, device: str) -> str:
    hours = f"{found.worker_hours:.3g} {device}-hours per step, {1000 * found.worker_hours:,.4g} per 1,000 steps"
    if not found.dollars_per_hour:
        return f"{hours} (planner.dollars_per_gpu_hour gives dollars)"
    dollars = f"${found.dollars:.3g} per step, ${1000 * found.dollars:,.2f} per 1,000 steps"
    return f"{dollars} ({1000 * found.worker_hours:,.4g} {device}-hours at ${found.dollars_per_hour:g})"


def assumptions(workload: Workload, batch_size: int) -> str:
    """Return the rows of a step in words: how many, and how long."""
    if not workload.is_generated:
        rows = f"{batch_size} rows" if all(len(some) == 1 for some in workload.prompts) else f"{batch_size} prompts"
        return f"{rows} per step; sequences of {lengths_text([n for some in workload.prompts for n in some])}"
    prompts = lengths_text([lengths[0] for lengths in workload.prompts])
    samples = f" x {workload.samples} responses" if workload.samples > 1 else ""
    return (f"{batch_size} prompts{samples} per step; prompts of {prompts}; "
            f"responses of {lengths_text(workload.response_lengths)}")  # fmt: skip


def lengths_text(lengths: list[int] | tuple[int, ...]) -> str:
    low, high = min(lengths), max(lengths)
    if low == high:
        return f"{low:,} tokens"
    return f"{low:,} to {high:,} tokens, {fmean(lengths):,.4g} on average"
