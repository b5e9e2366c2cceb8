"""Pictures of the plan: the layout of every call on the workers, and the memory of the workers by purpose."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape

from realhf.api.layout import Layout
from realhf.apps.view.report.charts import N_COLOURS
from realhf.apps.view.report.text import clean, size_text
from realhf.apps.view.timeline_svg import ranks_text
from realhf.plan.cost.memory import Bytes
from realhf.plan.run_spec import RunSpec

ROW, GAP = 26, 4  # pixels
MAX_LABELLED = 16  # workers whose coordinates are written into the cells
PURPOSES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "borrowed": "weights in another layout",
    "activations": "activations",
    "kv_cache": "KV cache",
    "buffers": "logits and buffers",
    "runtime": "libraries",
    "server": "vLLM process",
}


@dataclass(frozen=True)
class LayoutRow:
    """A call with the picture of its layout: a cell per worker."""

    call: str
    kind: str
    role: str
    layout: str
    colour: int
    picture: str


def layout_rows(run: RunSpec) -> list[LayoutRow]:
    roles = list(run.graph.roles)
    rows = []
    for mfc in run.graph.topological:
        placement = run.plan[mfc.name]
        colour = roles.index(mfc.role) % N_COLOURS if mfc.role in roles else N_COLOURS - 1
        picture = cells(placement.layout, run.plan.n_workers, colour)
        rows.append(LayoutRow(mfc.name, mfc.kind.value, mfc.role or "no model", str(placement), colour, picture))
    return rows


def cells(layout: Layout, n_workers: int, colour: int) -> str:
    """Return a cell per worker; those of the mesh have the colour of the role and show their coordinates."""
    width = 100 / n_workers
    parts = [f'<svg class="cells" height="{ROW}" role="img" aria-label="{layout}">']
    for rank in range(n_workers):
        is_used = rank in layout.mesh.ranks
        title, label = f"worker {rank}: not used", ""
        if is_used:
            pp, dp, tp = layout.coord(rank)
            label = f"d{dp} t{tp} p{pp}"
            title = f"worker {rank}: data {dp}, tensor {tp}, pipeline {pp}"
        classes = f"cell f{colour}" if is_used else "cell idle"
        parts.append(f'<rect class="{classes}" x="{rank * width:.3f}%" y="1" width="{width * 0.97:.3f}%" '
                     f'height="{ROW - GAP}" rx="3"><title>{title}</title></rect>')  # fmt: skip
        if label and n_workers <= MAX_LABELLED:
            parts.append(f'<text class="in-cell" x="{(rank + 0.485) * width:.3f}%" y="17" text-anchor="middle">'
                         f"{label}</text>")  # fmt: skip
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class MemoryRow:
    """Workers with equal predicted memory: picture, total and parts by purpose."""

    workers: str
    total: str
    picture: str
    parts: tuple[tuple[int, str, str], ...]  # colour, purpose and size


def memory_rows(memory: Mapping[int, Bytes], measured: float | None, usable: float) -> list[MemoryRow]:
    """Return a row per group of workers with equal memory. All sizes are in bytes; ``usable`` is the capacity."""
    groups: dict[Bytes, list[int]] = {}
    for rank, needed in memory.items():
        groups.setdefault(needed, []).append(rank)
    scale = 1.04 * max([needed.total for needed in groups] + [measured or 0.0, 1.0])
    rows = []
    for needed, ranks in groups.items():
        sizes = {name: size for name, size in asdict(needed).items() if size}
        numbers = {name: i % N_COLOURS for i, name in enumerate(PURPOSES)}
        parts = tuple((numbers[name], PURPOSES[name], size_text(size)) for name, size in sizes.items())
        picture = _stack(sizes, numbers, scale, measured, usable)
        rows.append(MemoryRow(ranks_text(ranks), size_text(needed.total), picture, parts))
    return rows


def _stack(
    sizes: Mapping[str, float], colours: Mapping[str, int], scale: float, measured: float | None, usable: float
) -> str:
    text = ", ".join(f"{PURPOSES[name]} {size_text(size)}" for name, size in sizes.items())
    parts, x = [f'<svg class="stack" height="{ROW + 8}" role="img" aria-label="{escape(clean(text))}">'], 0.0
    for name, size in sizes.items():
        width = 100 * size / scale
        parts.append(f'<rect class="bar f{colours[name]}" x="{x:.3f}%" y="6" width="{width:.3f}%" height="{ROW - 4}">'
                     f"<title>{PURPOSES[name]}: {size_text(size)}</title></rect>")  # fmt: skip
        x += width
    for value, classes, what in ((measured, "mark measured", "measured peak"), (usable, "mark usable", "usable")):
        if value and value <= scale:
            at = f"{100 * value / scale:.3f}%"
            parts.append(f'<line class="{classes}" x1="{at}" x2="{at}" y1="1" y2="{ROW + 7}">'
                         f"<title>{what}: {size_text(value)}</title></line>")  # fmt: skip
    return "".join([*parts, "</svg>"])
