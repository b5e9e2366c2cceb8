"""Execution plans as text: the value of ``allocation_mode`` that makes a plan, and plan files.

A call is written ``NAME:[BACKEND.]STRATEGY[@WORKERS][:tokens=N][:mbs=N][:seqs=N][:recompute=HOW][:offload]``, as in
``actor_gen:vllm.d4t1p1@0-3:seqs=64``. Calls are separated by commas; ``*`` is any other call. ``HOW`` is none,
selective or full; it and ``offload`` (optimizer state) are the planner's choices where options of a role are ``auto``.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from realhf.api.codec import from_plain
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.base.errors import UserError, damage_reported, did_you_mean
from realhf.plan.compile.check import contiguous_mesh
from realhf.plan.compile.saving import RECOMPUTED, NamedSaving, name_saving

SUFFIX = ".json"
"""End of an ``allocation_mode`` that is the name of a plan file."""
LIMITS = {"tokens": "max_tokens_per_mb", "mbs": "n_mbs", "seqs": "max_num_seqs"}
"""Keys of the micro-batching of a call, and the fields of ``MicroBatching``."""
SAVINGS = {"recompute": f"recompute=({'|'.join(RECOMPUTED)})", "offload": "offload"}
WORDS = {**{key: rf"{key}=[1-9]\d*" for key in LIMITS}, **SAVINGS}
"""Keys of all words after the layout, and patterns of the words."""
BETWEEN_CALLS = re.compile(r",(?!\s*\d)")
"""A comma before a number is part of a mesh: ``*:d3@0,2,5`` is one call."""


@dataclass(frozen=True)
class CallText:
    """The placement of one call as text: ``strategy`` and ``mesh`` are not parsed; an empty mesh: the first workers.

    ``limits`` are the given fields of the micro-batching. ``saving`` is None if no part of it is named. ``error`` says
    what is malformed.
    """

    strategy: str
    mesh: str = ""
    backend: Backend = Backend.native
    limits: dict[str, int] = field(default_factory=dict)
    saving: NamedSaving | None = None
    error: str = ""


def split_calls(text: str) -> list[tuple[str, str]]:
    """Return (name, placement) of every call in an allocation string."""
    parts = (part.partition(":") for part in BETWEEN_CALLS.split(text))
    return [(name.strip(), placement.strip()) for name, _, placement in parts]


def read_call(text: str) -> CallText:
    """Parse ``[BACKEND.]STRATEGY[@WORKERS][:KEY=VALUE][:offload]``, except strategy and mesh."""
    placement, *given = (part.strip() for part in text.split(":"))
    layout, _, mesh = placement.partition("@")
    backend, dot, strategy = layout.partition(".")
    limits, values, error = dict[str, int](), dict[str, str](), ""
    for word in given:
        key, _, value = word.partition("=")
        if key in values:
            error = error or f"'{word}' is given twice"
        elif key not in WORDS or not re.fullmatch(WORDS[key], word):
            hint = "" if key in WORDS else did_you_mean(key, WORDS)
            error = error or f"'{word}' is not like tokens=4096, mbs=2, seqs=64, recompute=full or offload{hint}"
        values[key] = value
        if key in LIMITS and not error:
            limits[LIMITS[key]] = int(value)
    if dot and backend not in (known.value for known in Backend):
        error = error or f"unknown backend '{backend}'{did_you_mean(backend, [known.value for known in Backend])}"
    named = Backend(backend) if dot and not error else Backend.native
    saving = None
    if values.keys() & SAVINGS.keys():
        saving = NamedSaving(values.get("recompute"), True if "offload" in values else None)
    return CallText((strategy if dot else layout).strip(), mesh.strip(), named, limits, saving, error)


def plan_text(plan: ExecutionPlan, defaults: Mapping[str, MicroBatching]) -> str:
    """Return the ``allocation_mode`` that makes a plan; ``defaults`` are the micro-batching options of its calls."""
    texts = {name: _call_text(placement, defaults[name]) for name, placement in plan.placements.items()}
    (most, count), *others = Counter(texts.values()).most_common()
    whole = next(iter(plan.placements.values())).layout
    if not others and most == f"{whole.strategy}@{contiguous_mesh(plan.n_workers)}":
        return str(whole.strategy)
    listed = [f"{name}:{text}" for name, text in texts.items() if text != most or count == 1]
    return ",".join([*listed, f"*:{most}"] if count > 1 else listed)


def _call_text(placement: Placement, default: MicroBatching) -> str:
    given, standard = vars(placement.micro_batching), vars(default)
    limits = [f":{key}={given[name]}" for key, name in LIMITS.items() if given[name] != standard[name]]
    backend = "" if placement.backend is Backend.native else f"{placement.backend.value}."
    saving = f":{name_saving(placement.saving)}" if placement.saving else ""
    return f"{backend}{placement.layout}{''.join(limits)}{saving}"


def read_plan(path: str) -> ExecutionPlan:
    """Return the plan in a file of ``realhf plan --save``, or in ``plan.json`` of a run; ``UserError`` otherwise."""
    if not Path(path).is_file():
        raise UserError(f"allocation_mode={path}: there is no such file; write one with realhf plan --save FILE.json")
    with damage_reported(Path(path), "write a plan with realhf plan --save FILE.json"):
        content = json.loads(Path(path).read_text())
        return from_plain(content.get("plan", content), ExecutionPlan)
