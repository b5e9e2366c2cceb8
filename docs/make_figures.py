"""Draws the figures of the documents from the real graph, layouts, programs and reallocations.

    python docs/make_figures.py [DEMO_DIR]

With the folder of a finished ``realhf demo``, its curves and its output are drawn too.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from docs.curves_svg import curves_svg
from docs.drawing import Drawing, for_both_schemes, terminal
from realhf.api.graph import MFC, Graph
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.param_box import ParamSpec
from realhf.api.program import Compute, Instruction, Reallocate, Release, Transfer
from realhf.apps.commands.plan import main as plan_command
from realhf.experiments.ppo import PPOExperiment
from realhf.plan.compile.allocate import allocate
from realhf.plan.compile.program import compile_program
from realhf.plan.compile.realloc import plan_realloc, route_copies, shard_boxes

FIGURES = Path(__file__).parent / "figures"
COLOUR = {"actor": "c0", "critic": "c1", "ref": "c2", "rew": "c3"}
LLAMA_7B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "hidden_act": "silu",
            "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip


def ppo_graph() -> Graph:
    experiment = PPOExperiment()
    for role in COLOUR:
        vars(experiment)[role].path = role
    return experiment.graph()


def graph_figure() -> str:
    """Draw the calls of PPO, one column per depth; edges of indirect consumers are left out."""
    graph = ppo_graph()
    columns = [["actor_gen"], ["rew_inf", "ref_inf", "critic_inf"], ["critic_train", "actor_train"]]
    drawing, width = Drawing(772, 300, "The graph of PPO: six calls of four models"), 170
    at = {name: (150 + 215 * x, 150 + 90 * (y - (len(column) - 1) / 2) - 25)
          for x, column in enumerate(columns) for y, name in enumerate(column)}  # fmt: skip
    drawing.text(20, 145, "data: prompts", "small soft")
    drawing.arrow((100, 150), (at["actor_gen"][0] - 2, 150))
    for mfc in graph.mfcs:
        for parent in direct_parents(graph, mfc):
            (x0, y0), (x1, y1) = at[parent.name], at[mfc.name]
            drawing.arrow((x0 + width, y0 + 25), (x1 - 2, y1 + 25))
    for mfc in graph.mfcs:
        output = " ".join(key for key in mfc.outputs if key != "prompt_mask") or "new weights"
        shown = output.replace(" logprobs truncated", ", logprobs")
        drawing.box(*at[mfc.name], width, [f"{mfc.name}", f"{mfc.kind.value}: {shown}"], COLOUR[str(mfc.role)])
    for i, (role, kind) in enumerate(COLOUR.items()):
        drawing.rect(150 + 110 * i, 272, 12, 12, kind, 2)
        drawing.text(168 + 110 * i, 282, f"model {role}", "small")
    return drawing.svg()


def direct_parents(graph: Graph, mfc: MFC) -> list[MFC]:
    """Return the parents that are not also parents of another parent."""
    parents = graph.parents(mfc)
    indirect = {p.name for parent in parents for p in graph.parents(parent)}
    return [p for p in parents if p.name not in indirect]


def layout_figure() -> str:
    """Draw the part of the model on each of eight workers with d2t2p2."""
    layout = Layout(DeviceMesh(tuple(range(8))), ParallelStrategy(dp=2, tp=2, pp=2))
    drawing = Drawing(640, 330, "Layout d2t2p2 on workers 0-7")
    drawing.text(20, 30, f"layout {layout}: every worker holds a quarter of the model", "bold")
    for dp in range(2):
        drawing.text(240 + 240 * dp, 60, f"data-parallel replica {dp}", "small soft", "middle")
        drawing.rect(130 + 240 * dp, 68, 220, 244, "empty")
    for pp in range(2):
        drawing.text(20, 130 + 120 * pp, f"stage {pp}", "bold")
        drawing.text(20, 147 + 120 * pp, f"layers {'1-16' if pp == 0 else '17-32'}", "small soft")
    for rank in layout.mesh.ranks:
        at = layout.coord(rank)
        x, y = 140 + 240 * at.dp + 104 * at.tp, 78 + 120 * at.pp
        drawing.rect(x, y, 96, 108, "box")
        drawing.text(x + 48, y + 18, f"worker {rank}", "bold", "middle")
        drawing.text(x + 48, y + 34, f"p{at.pp} d{at.dp} t{at.tp}", "small soft", "middle")
        drawing.rect(x + 23, y + 44, 50, 52, "empty", 0)
        drawing.rect(x + 23 + 25 * at.tp, y + 44 + 26 * at.pp, 25, 26, "c0", 0)
    return drawing.svg()


def program_figure() -> str:
    """Draw the instructions of four calls of PPO on four workers."""
    graph, experiment = ppo_graph(), PPOExperiment()
    experiment.n_gpus_per_node, experiment.allocation_mode = 4, "actor_gen:d4,actor_train:d2t2,ref_inf:d2t2,*:d4"
    plan = allocate(graph, experiment, {mfc.name: vars(experiment)[mfc.name] for mfc in graph.mfcs}, {}, "cpu",
                    experiment.roles())  # fmt: skip
    program = compile_program(graph, plan)
    drawing = Drawing(760, 242, "The program of four calls")
    for y, name in enumerate(("actor_gen", "ref_inf", "critic_train", "actor_train")):
        drawing.text(20, 45 + 52 * y, name, "bold")
        drawing.text(20, 61 + 52 * y, str(plan[name].layout), "small soft")
        for x, step in enumerate(program[name]):
            drawing.box(150 + 150 * x, 24 + 52 * y, 136, [type(step).__name__, describe(step)], kind_of(step))
            if x:
                drawing.line((136 + 150 * x, 47 + 52 * y), (148 + 150 * x, 47 + 52 * y))
    return drawing.svg()


def describe(step: Instruction) -> str:
    match step:
        case Transfer(keys, _):
            return f"{len(keys)} column{'s' * (len(keys) > 1)} of rows"
        case Reallocate(role, src, _, dst):
            return f"{role} {src.strategy} to {dst.strategy}"
        case Compute(_, role, _) | Release(role, _):
            return f"{role}" if isinstance(step, Compute) else f"temporary {role}"
    raise AssertionError(f"{step} is not drawn")


def kind_of(step: Instruction) -> str:
    return {Transfer: "c2", Reallocate: "c3", Compute: "c0"}.get(type(step), "box")


def reallocation_figure() -> str:
    """Draw the copies of one weight from t4 to d2t2."""
    workers = DeviceMesh((0, 1, 2, 3))
    before, after = (Layout(workers, ParallelStrategy.parse(text)) for text in ("t4", "d2t2"))
    spec, stages = ParamSpec("w", (8, 8), 1, tp_dim=1), lambda *_: [range(1, 2)]
    drawing = Drawing(700, 300, "Reallocation of a weight from t4 to d2t2")
    for layout, y in ((before, 50), (after, 215)):
        drawing.text(20, y + 28, str(layout.strategy), "bold")
        for rank in workers.ranks:
            x = 132 + 145 * rank
            (_, (start, stop)) = shard_boxes([spec], stages, layout, rank)["w"]
            drawing.rect(x, y, 96, 48, "empty", 0)
            drawing.rect(x + 12 * start, y, 12 * (stop - start), 48, "c0", 0)
            drawing.text(x + 48, y + (66 if y > 100 else -10), f"worker {rank}", "small soft", "middle")
    for copy in route_copies(plan_realloc([spec], stages, before, after)):
        middle = 12 * sum(copy.box[1]) / 2
        ends = (132 + 145 * copy.src + middle, 98), (132 + 145 * copy.dst + middle, 213)
        drawing.line(*ends, "dashed" if copy.src == copy.dst else "")
    drawing.text(20, 150, "dashed: own copy", "small soft")
    drawing.text(20, 166, "solid: exchange", "small soft")
    return drawing.svg()


def plan_figure() -> str:
    """Return the timelines of the heuristic and of the searched plan, as ``realhf plan --out`` draws them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config, out = Path(folder, "config.json"), Path(folder, "plan.svg")
        config.write_text(json.dumps(LLAMA_7B))
        words = [word for role in COLOUR for word in (f"{role}.config={config}", f"{role}.init_from_scratch=True")]
        words += ["n_nodes=2", "n_gpus_per_node=8", "device=cuda", "planner.hardware=h100",
                  "dataset.train_bs_n_seqs=512", "ppo.gen.max_new_tokens=1024", "ppo.ppo_n_minibatches=8",
                  "actor.gradient_checkpointing=True", "critic.gradient_checkpointing=True"]  # fmt: skip
        plan_command(["ppo", *words, "--compare", "heuristic,search", "--out", str(out)])
        return for_both_schemes(out.read_text())


def demo_figures(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the curves of the demo, and the output of its first steps of PPO from ``output.txt``."""
    lines = [json.loads(line) for line in (folder / "demo" / "ppo-math" / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["step"], line["reward/accuracy"]) for line in lines]
    yield "demo_accuracy", for_both_schemes(curves_svg("demo: fraction of right sums", {"reward/accuracy": curve}))
    shown = (folder / "output.txt").read_text().splitlines()
    yield "demo_output", terminal([line[:118].rstrip() for line in shown], "Output of realhf demo")


def main(arguments: list[str]) -> None:
    figures = {"graph": graph_figure(), "layout": layout_figure(), "program": program_figure(),
               "reallocation": reallocation_figure(), "plan": plan_figure()}  # fmt: skip
    studies = FIGURES.parents[1] / "experiments"
    for name in ("plan_search/bars", "plan_search/timelines", "distillation/curves"):
        figures[name.replace("/", "_")] = for_both_schemes((studies / f"{name}.svg").read_text())
    figures |= dict(demo_figures(Path(arguments[0]))) if arguments else {}
    for name, svg in figures.items():
        (FIGURES / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
