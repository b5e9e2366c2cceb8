"""``realhf plan``: what a run would do and how long it would take, without launching it."""

import json
from dataclasses import fields
from pathlib import Path

from rich.table import Table as RichTable

from realhf.api.codec import to_plain
from realhf.api.plan import ExecutionPlan
from realhf.api.program import Compute, Instruction
from realhf.apps.console import open_console
from realhf.apps.drawing import page, ranks_text, stacked, timeline_svg
from realhf.apps.preflight import Survey, survey
from realhf.apps.quickstart import read_words
from realhf.base.errors import UserError
from realhf.plan.memory import Bytes
from realhf.plan.planner import Planner
from realhf.plan.prediction import Alternative, Prediction
from realhf.plan.program import compile_program

USAGE = """usage: realhf plan EXPERIMENT [--config FILE.yaml] [key=value ...]
  --out FILE.svg|FILE.html|FILE.json   the timeline as a picture, everything on a page, or the plan as data
  --compare MODE,MODE,...              predict several allocation modes side by side: heuristic,search,d4t2p1
  --why                                what the next best layout of every call would cost

Neither weights nor data nor devices are needed: a model's config.json is enough, and dataset.path may be left out."""
Rows = list[tuple[str, ...]]


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    words, flags = _flags(arguments)
    modes = [mode for mode in flags.get("--compare", "").split(",") if mode]
    if out := flags.get("--out"):
        _check_suffix(out)
    experiment, _ = read_words(words[0], words[1:])
    config = experiment.config
    surveys = []
    for mode in modes or [config.allocation_mode]:
        config.allocation_mode = mode
        surveys.append(survey(words[0], experiment))
    predictions = [found.planner.predict(found.plan) for found in surveys]
    tables = _tables(surveys[0], predictions[0]) if not modes else {}
    if modes:
        tables["comparison"] = _comparison(modes, surveys, predictions)
    if "--why" in flags:
        tables["why"] = _why(surveys[0].planner, surveys[0].plan)
    first = surveys[0]
    open_console().print(f"{first.name}: {first.n_rows_text}, {first.plan.n_workers} x {first.device}, predicted from "
                         f"{first.machine.source}")  # fmt: skip
    _show(tables)
    if out:
        _write(Path(out), modes or [config.allocation_mode], surveys, predictions, tables)
    capacity = surveys[0].machine.hardware.memory
    lacking = [mode for mode, p in zip(modes or [config.allocation_mode], predictions, strict=True)
               if p.peak > capacity]  # fmt: skip
    if lacking:
        raise UserError([surveys[0].planner.too_large(s.plan, p) for s, p in zip(surveys, predictions, strict=True)
                         if p.peak > capacity])  # fmt: skip


def _flags(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Take the flags of this command out of the words."""
    words, flags, rest = [], {}, iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--why":
            flags[name] = "yes"
        elif name in ("--out", "--compare"):
            value = value if equals else next(rest, "")
            if not value:
                raise UserError(f"{name} needs a value\n{USAGE}")
            flags[name] = value
        else:
            words.append(word)
    if not words:
        raise UserError(f"which experiment?\n{USAGE}")
    return words, flags


def _check_suffix(out: str) -> None:
    if Path(out).suffix not in (".svg", ".html", ".json"):
        raise UserError(f"--out {out}: write .svg, .html or .json")


def _tables(found: Survey, prediction: Prediction) -> dict[str, Rows]:
    return {
        "allocation": _allocation(found, prediction),
        "instructions": _instructions(found.planner, found.plan),
        "memory per worker": _memory(prediction, found.machine.hardware.memory),
        "step": _step(prediction),
    }


def _allocation(found: Survey, prediction: Prediction) -> Rows:
    rows: Rows = [("call", "kind", "role", "layout", "tokens/mb", "prompts", "seconds", "moves", "makes")]
    spent = prediction.call_seconds
    for mfc in found.planner.graph.topological:
        placement = found.plan[mfc.name]
        compute, moves = spent[mfc.name]
        cells = (mfc.name, mfc.kind.value, mfc.role or "-", str(placement.layout))
        limits = placement.micro_batching
        batching = f"{limits.max_tokens_per_mb}" + (f", {limits.max_slots} rows" if limits.max_slots else "")
        rows.append((*cells, batching, str(mfc.batch_size), f"{compute:.3g}", f"{moves:.3g}", " ".join(mfc.outputs)))
    return rows


def _instructions(planner: Planner, plan: ExecutionPlan) -> Rows:
    rows: Rows = [("call", "instructions")]
    for name, steps in compile_program(planner.graph, plan).items():
        rows += [(name if i == 0 else "", text(step)) for i, step in enumerate(steps)]
    return rows


def text(step: Instruction) -> str:
    """Return an instruction in short: its name, then its fields."""
    if isinstance(step, Compute):
        return f"Compute on {step.layout}"
    values = (getattr(step, f.name) for f in fields(step))
    return f"{type(step).__name__} " + " ".join(",".join(v) if isinstance(v, tuple) else str(v) for v in values)


def _memory(prediction: Prediction, capacity: float) -> Rows:
    names = [f.name for f in fields(Bytes)]
    rows: Rows = [("workers", *names, "total", "of")]
    alike: dict[Bytes, list[int]] = {}
    for rank, some in prediction.memory.items():
        alike.setdefault(some, []).append(rank)
    for some, ranks in alike.items():
        cells = [size_text(v) for v in (*to_plain(some).values(), some.total)]
        rows.append((ranks_text(ranks), *cells, size_text(capacity)))
    return rows


def size_text(nbytes: float) -> str:
    """Return bytes in the largest unit that leaves a digit before the point."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B" if nbytes else "-"


def _step(prediction: Prediction) -> Rows:
    path = prediction.critical_shares
    chain = ", ".join(f"{name} {100 * share:.0f}%" for name, share in path.items() if share >= 0.005)
    return [
        ("", ""),
        ("predicted step", f"{prediction.seconds:.4g} s"),
        ("workers busy", f"{100 * (1 - prediction.timeline.idle):.0f}%"),
        ("critical path", chain),
    ]


def _comparison(modes: list[str], surveys: list[Survey], predictions: list[Prediction]) -> Rows:
    best = min(p.seconds for p in predictions)
    capacity = surveys[0].machine.hardware.memory
    rows: Rows = [("allocation_mode", "step", "against the best", "fullest worker", "busy", "layouts")]
    for mode, found, p in zip(modes, surveys, predictions, strict=True):
        layouts = " ".join(f"{name}:{placement.layout}" for name, placement in found.plan.placements.items())
        fits = "" if p.peak <= capacity else " (does not fit)"
        busy = f"{100 * (1 - p.timeline.idle):.0f}%"
        rows.append((mode, f"{p.seconds:.4g} s", f"{p.seconds / best:.2f}", size_text(p.peak) + fits, busy, layouts))
    return rows


def _why(planner: Planner, plan: ExecutionPlan) -> Rows:
    rows: Rows = [("call", "has", "next best, the others as they are", "step")]
    now, others = planner.alternatives(plan)
    for name, found in others.items():
        rows.append((name, str(plan[name].layout), *_alternative(found, now)))
    return rows


def _alternative(found: Alternative | None, now: float) -> tuple[str, str]:
    if found is None:
        return "none that fits", "-"
    return str(found.layout), f"{found.seconds:.4g} s ({100 * (found.seconds / now - 1):+.1f}%)"


def _show(tables: dict[str, Rows]) -> None:
    out = open_console()
    for name, (head, *rows) in tables.items():
        table = RichTable(box=None, pad_edge=False, title=name, title_justify="left", show_header=any(head))
        for column in head:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        out.print(table)
        out.print()


def _write(
    path: Path, modes: list[str], surveys: list[Survey], predictions: list[Prediction], tables: dict[str, Rows]
) -> None:
    names = [m.name for m in surveys[0].planner.graph.mfcs]
    until = max(p.timeline.settled[1] - p.timeline.settled[0] for p in predictions)
    pictures = {mode: timeline_svg(p.timeline, names, f"{surveys[0].name}, {mode}: {p.seconds:.3g} s a step", until)
                for mode, p in zip(modes, predictions, strict=True)}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".svg":
            path.write_text(stacked(list(pictures.values())))
        case ".html":
            path.write_text(page(f"realhf plan {surveys[0].name}", pictures, tables))
        case ".json":
            found = {mode: {"plan": to_plain(s.plan), "step_s": p.seconds, "peak_bytes": p.peak}
                     for mode, s, p in zip(modes, surveys, predictions, strict=True)}  # fmt: skip
            path.write_text(json.dumps(found, indent=1))
    open_console().print(f"wrote {path}")
