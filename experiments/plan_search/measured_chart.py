"""Predicted against measured seconds of plans, as SVG."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.plan_search.measurements import SEARCHED, PlanResult, WorkloadResult

STYLES = {"random plans": ("o", "#9d9d9d"), "rules": ("s", "#4c78a8"), "searched plan": ("*", "#e45756")}
MARGIN = 0.08  # of the axes, beyond the largest value


def kind(plan: PlanResult) -> str:
    if SEARCHED in plan.names:
        return "searched plan"
    return "random plans" if plan.names[0].startswith("random") else "rules"


def chart(results: Sequence[WorkloadResult], file: Path) -> None:
    """Write one panel per workload; error bars are one standard error over runs."""
    figure = Figure(figsize=(4.2 * len(results), 4.2), layout="tight")
    panels = figure.subplots(1, len(results), squeeze=False)
    for result, panel in zip(results, panels[0], strict=True):
        largest = max(max(plan.predicted_s, plan.measured_s + plan.error) for plan in result.plans) * (1 + MARGIN)
        panel.plot([0, largest], [0, largest], color="#bbb", linewidth=1, label="predicted = measured")
        for label, (marker, colour) in STYLES.items():
            some = [plan for plan in result.plans if kind(plan) == label]
            panel.errorbar([plan.predicted_s for plan in some], [plan.measured_s for plan in some],
                           yerr=[plan.error for plan in some], fmt=marker, color=colour, label=label, capsize=3,
                           markersize=10 if marker == "*" else 5)  # fmt: skip
        panel.set(title=f"{result.workload}: searched / best {result.ratio:.2f}", xlabel="predicted step (s)",
                  ylabel="measured step (s)", xlim=(0, largest), ylim=(0, largest))  # fmt: skip
    panels[0][0].legend(loc="upper left", fontsize=8)
    with rc_context({"svg.hashsalt": "plan_search"}):  # the same results make the same file
        figure.savefig(file, metadata={"Date": None})
