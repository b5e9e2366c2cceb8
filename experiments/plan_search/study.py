"""Predicted step times of heuristic and searched plans for ReaL's workloads, with two engines and four variants.

    python -m experiments.plan_search.study [--report]

Writes results.json, table.md, bars.svg and timelines.svg to this folder; README.md has question, design and verdict.
Continues an interrupted run: remove results.json to start again; ``--report`` writes tables and figures of the rows so
far. Results do not depend on the clock.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import mean

from experiments.plan_search.decoding import decoding_step
from experiments.plan_search.engines import ENGINES, VARIANTS, StudyEngine
from experiments.plan_search.workloads import DEVICES, SIZES, WEAK_SCALING, WORKLOADS, llama, planner_for
from realhf.api.layout import ParallelStrategy
from realhf.apps.view.timeline_svg import stack_svgs, timeline_svg
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.search.timeline import Prediction

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
RULES = tuple(HEURISTICS)
SEARCHED = "searched"
FILLS = {"short": "#4c78a8", "long": "#f58518"}
Case = tuple[str, str, str, int]  # engine, workload, actor, devices


@dataclass(frozen=True)
class Row:
    """Predictions of one case: of every rule and of the searched plan.

    ``seconds`` are those of a step, 0 for a plan that does not fit in memory. ``calls`` are the seconds of computation
    of every call in a step, ``critical`` the seconds of a step in which it is on the critical path.
    """

    engine: str
    workload: str
    actor: str
    devices: int
    seconds: dict[str, float]
    calls: dict[str, dict[str, float]]
    critical: dict[str, dict[str, float]]
    layouts: dict[str, dict[str, str]]
    stop: str

    @property
    def case(self) -> Case:
        return self.engine, self.workload, self.actor, self.devices

    @property
    def best_rule(self) -> str:
        """The fastest rule whose plan fits, or an empty string."""
        fitting = [rule for rule in RULES if self.seconds[rule]]
        return min(fitting, key=lambda rule: self.seconds[rule], default="")

    def gain(self, rule: str) -> float | None:
        """Return how much longer a step takes with a rule, relative to the searched plan; None if one does not fit."""
        if not rule or not self.seconds[rule] or not self.seconds[SEARCHED]:
            return None
        return self.seconds[rule] / self.seconds[SEARCHED] - 1


def engine_named(name: str) -> StudyEngine:
    return ENGINES.get(name) or VARIANTS[name]


def cases() -> list[Case]:
    """Return weak scaling with all engines, long contexts first, then the other workloads with the two engines."""
    weak = list(WEAK_SCALING.items())
    first = [(engine, workload, *size) for workload in ("long", "short") for engine in ENGINES for size in weak]
    variants = [(engine, "long", *size) for engine in VARIANTS for size in weak]
    rest = [(engine, workload, actor, n) for workload in ("long", "short") for actor in SIZES for n in DEVICES
            for engine in ENGINES]  # fmt: skip
    return list(dict.fromkeys([*first, *variants, *rest]))


def predict(case: Case) -> tuple[Row, dict[str, Prediction]]:
    """Predict the plan of every rule and of the search."""
    engine, workload, actor, devices = case
    planner = planner_for(actor, devices, workload, engine_named(engine))
    plans = {rule: planner.by_heuristic(rule) for rule in RULES}
    found = planner.search(budget_s=inf)
    predictions = {rule: planner.predict(plan) for rule, plan in plans.items()} | {SEARCHED: found.prediction}
    plans[SEARCHED] = found.plan
    capacity = planner.calls.hardware.usable
    seconds = {name: p.seconds if p.peak <= capacity else 0.0 for name, p in predictions.items()}
    calls = {name: {mfc: both[0] for mfc, both in p.call_seconds.items()} for name, p in predictions.items()}
    critical = {name: {mfc: share * p.seconds for mfc, share in p.critical_shares.items()}
                for name, p in predictions.items()}  # fmt: skip
    layouts = {name: {mfc: str(placed.layout) for mfc, placed in plan.placements.items()}
               for name, plan in plans.items()}  # fmt: skip
    row = Row(engine, workload, actor, devices, seconds, calls, critical, layouts, found.result.stop.value)
    return row, predictions


def mean_gain(rows: Sequence[Row], rule: str = "megatron") -> float:
    """Return the mean gain over a rule, or over the best one (``best``), of rows in which both plans fit."""
    gains = [row.gain(row.best_rule if rule == "best" else rule) for row in rows]
    return mean(gain for gain in gains if gain is not None)


def order(row: Row) -> tuple[int, int, int]:
    return list(WORKLOADS).index(row.workload), list(SIZES).index(row.actor), row.devices


def of(rows: Sequence[Row], engine: str, workload: str = "", weak: bool = False) -> list[Row]:
    """Return the rows of an engine by workload and size, perhaps only of a workload or of weak scaling."""
    chosen = [row for row in rows if row.engine == engine and row.workload in (workload or row.workload)]
    return sorted((row for row in chosen if not weak or WEAK_SCALING[row.actor] == row.devices), key=order)


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.0f}%"


def table(rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for name, engine in ENGINES.items():
        head = ("workload", "actor", "H100", *(f"{rule}, s" for rule in RULES), "searched, s", "gain over megatron",
                "best rule", "gain over it")  # fmt: skip
        lines += [f"## Engine {engine.label}\n", line(*head), "|---" * len(head) + "|"]
        for row in of(rows, name):
            steps = [f"{row.seconds[p]:.1f}" if row.seconds[p] else "does not fit" for p in (*RULES, SEARCHED)]
            gains = percent(row.gain("megatron")), row.best_rule or "-", percent(row.gain(row.best_rule))
            lines.append(line(row.workload, row.actor, str(row.devices), *steps, *gains))
        lines.append("")
    return (
        "\n".join(
            [*lines, *gains_table(rows), "", *variants_table(rows), "", *calls_table(rows), "", *decoding_table(rows)]
        )
        + "\n"
    )


def gains_table(rows: Sequence[Row]) -> list[str]:
    """Return the mean gains of the two engines."""
    lines = ["## Mean gain of the searched plan\n",
             "Last column: gain over megatron if only generation took time in the searched plan.\n",
             line("engine", "workload", "rows", "over megatron", "over the best rule", "bound by generation"),
             "|---" * 6 + "|"]  # fmt: skip
    for name, engine in ENGINES.items():
        for workload in (*WORKLOADS, ""):
            chosen = of(rows, name, workload)
            fitting = [row for row in chosen if row.gain("megatron") is not None]
            bound = mean(row.seconds["megatron"] / row.calls[SEARCHED]["actor_gen"] - 1 for row in fitting)
            gains = percent(mean_gain(chosen)), percent(mean_gain(chosen, "best")), percent(bound)
            lines.append(line(engine.label, workload or "all", str(len(fitting)), *gains))
    return lines


def variants_table(rows: Sequence[Row]) -> list[str]:
    """Return the gains over ``megatron`` of all engines with long contexts on the rows of weak scaling."""
    lines = ["## Gain over megatron, long contexts, weak scaling\n"]
    lines += [line("engine", *(f"{actor} on {n}" for actor, n in WEAK_SCALING.items()), "mean"), "|---" * 6 + "|"]
    for name, engine in {**ENGINES, **VARIANTS}.items():
        chosen = of(rows, name, "long", weak=True)
        lines.append(line(engine.label, *(percent(row.gain("megatron")) for row in chosen), percent(mean_gain(chosen))))
    return lines


def calls_table(rows: Sequence[Row]) -> list[str]:
    """Return the mean seconds of a step that calls are on the critical path, with ``megatron`` and searched."""
    names = list(rows[0].calls[SEARCHED])
    lines = ["## Seconds of a step on the critical path, means of rows that fit: megatron / searched\n",
             line("engine", "workload", *names), "|---" * (2 + len(names)) + "|"]  # fmt: skip
    for name, engine in ENGINES.items():
        for workload in WORKLOADS:
            fitting = [row for row in of(rows, name, workload) if row.gain("megatron") is not None]
            pairs = [" / ".join(f"{mean(row.critical[plan].get(mfc, 0.0) for row in fitting):.1f}"
                                for plan in ("megatron", SEARCHED)) for mfc in names]  # fmt: skip
            lines.append(line(engine.label, workload, *pairs))
    return lines


def decoding_table(rows: Sequence[Row]) -> list[str]:
    """Return the costs of a decoding step at half of a long response, with ``megatron`` and the searched plan."""
    lines = ["## A decoding step with long contexts, weak scaling, at half of the response\n",
             "How much shorter it would be without a cost. Costs overlap.\n",
             line("engine", "actor", "plan", "layout", "step, ms", "KV cache", "all-reduces", "launches"),
             "|---" * 8 + "|"]  # fmt: skip
    prompts, prompt, response = WORKLOADS["long"]
    for name, engine in ENGINES.items():
        for row in of(rows, name, "long", weak=True):
            for plan in ("megatron", SEARCHED):
                layout = row.layouts[plan]["actor_gen"].partition("@")[0]
                step = decoding_step(engine, llama(row.actor), ParallelStrategy.parse(layout), prompts,
                                     prompt + response // 2)  # fmt: skip
                shares = (f"{100 * share:.0f}%" for share in (step.cache, step.all_reduces, step.launches))
                lines.append(line(engine.label, row.actor, plan, layout, f"{1e3 * step.seconds:.1f}", *shares))
    return lines


def bars(rows: Sequence[Row], title: str) -> str:
    """Draw the step time of the searched plan relative to ``megatron`` for every row."""
    width, height = 46 * len(rows) + 90, 280
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
             'font-size="11">', f'<text x="40" y="16">{title}: predicted step, searched / megatron</text>']  # fmt: skip
    for tick in range(0, 101, 25):
        y = 200 - 1.7 * tick
        parts.append(f'<text x="36" y="{y + 4:g}" text-anchor="end">{tick / 100:.2f}</text>')
        parts.append(f'<line x1="40" y1="{y:g}" x2="{width - 30}" y2="{y:g}" stroke="#bbb"/>')
    for i, row in enumerate(rows):
        gain = row.gain("megatron")
        share = 1 / (1 + gain) if gain is not None else 0.0
        x, top = 50 + 46 * i, 200 - 170 * share
        parts.append(f'<rect x="{x}" y="{top:.0f}" width="30" height="{200 - top:.0f}" fill="{FILLS[row.workload]}"/>')
        for number, text in enumerate((f"{share:.2f}" if share else "-", row.actor, str(row.devices), row.workload)):
            parts.append(f'<text x="{x + 15}" y="{214 + 13 * number}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="40" y="{214 + 13 * 4 + 6}">actor, number of H100, context</text>')
    return "\n".join([*parts, "</svg>"])


def timelines(case: Case, predictions: dict[str, Prediction], names: Sequence[str]) -> list[str]:
    """Draw a step with ``megatron`` and one with the searched plan."""
    engine, workload, actor, devices = case
    begin, end = predictions["megatron"].timeline.steady_state
    title = f"engine {engine_named(engine).label}, {actor}, {devices} H100, {workload}"
    titles = {plan: f"{title}: {plan}, {predictions[plan].seconds:.0f} s a step" for plan in ("megatron", SEARCHED)}
    return [timeline_svg(predictions[plan].timeline, names, text, end - begin) for plan, text in titles.items()]


def read_rows(file: Path) -> list[Row]:
    """Return the rows of earlier runs, none if the file does not exist."""
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def main() -> None:
    rows = read_rows(RESULTS)
    known = {row.case for row in rows}
    for case in cases() if "--report" not in sys.argv else []:
        if case in known:
            continue
        row, _ = predict(case)
        rows.append(row)
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(*case, *(f"{name} {s:.1f}" for name, s in row.seconds.items()), percent(row.gain("megatron")), flush=True)
    (HERE / "table.md").write_text(table(rows))
    shown = {engine.label: [row for row in of(rows, name) if row.seconds[SEARCHED]] for name, engine in ENGINES.items()}
    (HERE / "bars.svg").write_text(stack_svgs([bars(some, f"engine {label}") for label, some in shown.items()]))
    pictures: list[str] = []
    for engine in ENGINES:
        row, predictions = predict((engine, "long", "70B", 128))
        pictures += timelines(row.case, predictions, list(row.calls[SEARCHED]))
    (HERE / "timelines.svg").write_text(stack_svgs(pictures))
    print(table(rows))


if __name__ == "__main__":
    main()
