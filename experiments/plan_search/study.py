"""Predicted step times of heuristic and searched plans for PPO on LLaMA-shaped models, 16 to 128 H100.

    python experiments/plan_search/study.py [--quick]

Writes results.json, table.md, bars.svg and timelines.svg to this folder. ``--quick`` computes only the weak-scaling
rows (7B on 16 devices to 70B on 128).
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from realhf.api.config import ModelSpec
from realhf.api.execution_plan import MicroBatching
from realhf.api.machine import Workload
from realhf.api.model_config import ModelConfig
from realhf.apps.view.timeline_svg import stack_svgs, timeline_svg
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.cost.cost import CostModel
from realhf.plan.cost.memory import MemoryModel
from realhf.plan.machines.hardware import read_hardware
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from realhf.plan.search.candidates import Candidates
from realhf.plan.search.planner import Planner
from realhf.plan.search.timeline import Prediction

HERE = Path(__file__).parent
SIZES = {"7B": (32, 4096, 32, 32, 11008), "13B": (40, 5120, 40, 40, 13824), "34B": (48, 8192, 64, 8, 22016),
         "70B": (80, 8192, 64, 8, 28672)}  # fmt: skip
WORKLOADS = {"short": (512, 1024, 1024), "long": (128, 1024, 7168)}
"""Prompts per step, tokens per prompt, tokens per response."""
DEVICES = (16, 32, 64, 128)
RULES = ("megatron", "pipe_model", "symmetric", "real", "split")


@dataclass(frozen=True)
class Row:
    """Predicted seconds per step; 0 for a plan that does not fit in memory."""

    workload: str
    actor: str
    devices: int
    megatron: float
    pipe_model: float
    symmetric: float
    real: float
    split: float
    searched: float
    search_s: float
    layouts: dict[str, str]

    @property
    def gain(self) -> float:
        """Relative speedup of the searched plan over the plan ``megatron``."""
        return self.megatron / self.searched - 1 if self.megatron else float("inf")


def llama(size: str, head: str = "lm") -> ModelConfig:
    n_layers, hidden, n_heads, n_kv_heads, intermediate = SIZES[size]
    return ModelConfig("llama", n_layers, hidden, n_heads, n_kv_heads, hidden // n_heads, intermediate, vocab=32000,
                       max_positions=8192, head=head)  # fmt: skip


def planner_for(actor: str, devices: int, workload: str) -> Planner:
    batch, prompt, response = WORKLOADS[workload]
    experiment = PPOExperiment()
    experiment.dataset.train_bs_n_seqs = batch
    experiment.ppo.ppo_n_minibatches = 8
    experiment.ppo.gen.max_new_tokens = experiment.ppo.gen.min_new_tokens = response
    experiment.ppo.gen.max_num_seqs = batch
    for role in ("actor", "critic", "ref", "rew"):
        setattr(experiment, role, ModelSpec(config="-", init_from_scratch=True, bf16=True, gradient_checkpointing=True))
    graph, roles, sampling = experiment.graph(), experiment.roles(), experiment.sampling_options()
    reward_model = llama("7B", head="scalar")
    models = {"actor": llama(actor), "ref": llama(actor), "critic": reward_model, "rew": reward_model}
    hardware = read_hardware("h100")
    rows = Workload(((prompt,),), (response,))
    cost = CostModel(graph, models, roles, Roofline(hardware), rows, hardware.node_size, sampling)
    memory = MemoryModel(graph, models, roles, rows, AnalyticMemory("cuda"), hardware.reserved, "cuda", sampling)
    limits = {mfc.name: MicroBatching(max_tokens_per_mb=32768) for mfc in graph.mfcs}
    return Planner(graph, Candidates(cost, memory, hardware, batch, limits), devices)


def predict(actor: str, devices: int, workload: str) -> tuple[Row, dict[str, Prediction]]:
    """Predict the plan of every rule and of the search."""
    planner = planner_for(actor, devices, workload)
    capacity = planner.calls.hardware.usable
    predictions = {rule: planner.predict(planner.by_heuristic(rule)) for rule in RULES}
    began = time.monotonic()
    best = planner.search().plan
    search_s = time.monotonic() - began
    predictions["searched"] = planner.predict(best)
    seconds = {name: p.seconds if p.peak <= capacity else 0.0 for name, p in predictions.items()}
    layouts = {name: str(placement.layout) for name, placement in best.placements.items()}
    return Row(workload, actor, devices, **seconds, search_s=search_s, layouts=layouts), predictions


def cell(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds else "does not fit"


def table(rows: list[Row]) -> str:
    head = ("workload", "actor", "H100", *(f"{rule}, s" for rule in RULES), "searched, s", "gain over megatron")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        gain = f"{100 * row.gain:+.0f}%" if row.megatron else "-"
        steps = [cell(vars(row)[name]) for name in (*RULES, "searched")]
        lines.append(f"| {' | '.join((row.workload, row.actor, str(row.devices), *steps, gain))} |")
    for workload in WORKLOADS:
        gains = [row.gain for row in rows if row.workload == workload and row.megatron and row.searched]
        lines.append(f"\nMean gain, {workload}: +{100 * mean(gains):.0f}% over {len(gains)} rows.")
    return "\n".join(lines) + "\n"


def bars(rows: list[Row]) -> str:
    """Draw the step time of the searched plan relative to ``megatron`` for every row."""
    width, height = 46 * len(rows) + 70, 270
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
             'font-size="11">', '<text x="40" y="16">predicted step: searched over Megatron-style</text>']  # fmt: skip
    for i, row in enumerate(rows):
        share = row.searched / row.megatron if row.megatron else 0.0
        x, top = 50 + 46 * i, 30 + 170 * (1 - share)
        fill = "#4c78a8" if row.workload == "short" else "#f58518"
        parts.append(f'<rect x="{x}" y="30" width="30" height="170" fill="#eee"/>')
        parts.append(f'<rect x="{x}" y="{top:.0f}" width="30" height="{200 - top:.0f}" fill="{fill}"/>')
        for line, text in enumerate((f"{share:.2f}" if share else "-", row.actor, str(row.devices), row.workload)):
            parts.append(f'<text x="{x + 15}" y="{214 + 13 * line}" text-anchor="middle">{text}</text>')
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    weak = dict(zip(SIZES, DEVICES, strict=True))
    cases = [(actor, n, w) for w in WORKLOADS for actor in SIZES for n in DEVICES if n == weak[actor]
             or "--quick" not in sys.argv]  # fmt: skip
    rows, pictures = [], []
    for actor, devices, workload in cases:
        row, predictions = predict(actor, devices, workload)
        seconds = ", ".join(f"{name} {p.seconds:.1f}" for name, p in predictions.items())
        print(f"{workload:>6} {actor:>4} {devices:>4}: {seconds}", flush=True)
        if not row.searched:
            continue
        rows.append(row)
        if (actor, devices) == ("70B", 128):
            names = list(row.layouts)
            until = predictions["megatron"].timeline
            length = until.steady_state[1] - until.steady_state[0]
            pictures += [timeline_svg(predictions[k].timeline, names, f"70B, 128 H100, {workload}: {k}, "
                                      f"{predictions[k].seconds:.0f} s a step", length)
                         for k in ("megatron", "searched")]  # fmt: skip
    (HERE / "results.json").write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    (HERE / "table.md").write_text(table(rows))
    (HERE / "bars.svg").write_text(bars(rows))
    (HERE / "timelines.svg").write_text(stack_svgs(pictures))
    print(table(rows))


if __name__ == "__main__":
    main()
