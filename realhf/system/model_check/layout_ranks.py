"""Processes that compute the log-probabilities of a model in a layout, for ``realhf model check``."""

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import AXES, DeviceMesh, Layout, ParallelStrategy
from realhf.base.errors import RunFailed
from realhf.comm.process_groups import (
    ParallelContext,
    destroy_process_group,
    init_process_group,
    make_groups,
    open_rendezvous,
)
from realhf.data.batch import Column, SequenceBatch
from realhf.models.engine.native import build_engine
from realhf.plan.run_spec import model_config

TIMEOUT_S = 600.0


def in_layout(folder: Path, work: Path, strategy: ParallelStrategy, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probabilities of the tokens of rows but the first, computed by processes.

    RunFailed if one fails.
    """
    files = {name: work / f"{strategy}-{name}" for name in ("rows.safetensors", "result.safetensors", "error.txt")}
    rows_file, result, error = files.values()
    save_file({str(number): row for number, row in enumerate(rows)}, rows_file)
    store = open_rendezvous("127.0.0.1", 0, TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    arguments = (str(folder), str(strategy), str(rows_file), str(result), str(error), store.port)
    processes = [context.Process(target=_rank_main, args=(rank, *arguments), daemon=True)
                 for rank in range(strategy.world)]  # fmt: skip
    try:
        for process in processes:
            process.start()
        _wait(processes, strategy, error)
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = load_file(result)
    return [found[str(number)] for number in range(len(rows))]


def _wait(processes: Sequence[multiprocessing.process.BaseProcess], strategy: ParallelStrategy, error: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.exitcode is None for process in processes):
        wait([process.sentinel for process in processes if process.exitcode is None], 1.0)
        failed = next((rank for rank, process in enumerate(processes) if process.exitcode), None)
        if error.exists() or failed is not None:
            code = None if failed is None else processes[failed].exitcode
            text = error.read_text() if error.exists() else f"process {failed} ended with exit code {code}"
            raise RunFailed(f"layout {strategy}: {text.strip()}")
        if time.monotonic() > deadline:
            raise RunFailed(f"layout {strategy}: no result from {len(processes)} processes for {TIMEOUT_S:.0f} s")


def _rank_main(rank: int, folder: str, strategy_text: str, rows_file: str, result: str, error: str, port: int) -> None:
    try:
        _compute(rank, folder, ParallelStrategy.parse(strategy_text), rows_file, result, port)
    except BaseException:
        Path(error).write_text(traceback.format_exc())
        raise


def _compute(rank: int, folder: str, strategy: ParallelStrategy, rows_file: str, result: str, port: int) -> None:
    torch.set_num_threads(1)
    _store = init_process_group("127.0.0.1", port, rank, strategy.world, "cpu", TIMEOUT_S, None, bytes(32))
    layout = Layout(DeviceMesh(tuple(range(strategy.world))), strategy)
    members = {layout.axis(axis, r) for axis in AXES for r in layout.mesh.ranks}
    groups = make_groups(sorted(m for m in members if len(m) > 1), rank)
    role = RoleSpec(ModelSpec(path=folder))
    parallel = ParallelContext(layout, rank, groups=groups)
    engine = build_engine(model_config(role), role, parallel, trained=False, holds_weights=True, seed=1, total_steps=1,
                          stop_ids=(), tokenizer_folder=None)  # fmt: skip
    rows = load_file(rows_file)
    ordered = [rows[str(number)] for number in range(len(rows))]
    ids = tuple(RowId(number, PROMPT) for number in range(len(rows)))
    batch = SequenceBatch(ids, {"tokens": Column.of(ordered)})
    found = engine.forward(batch, lambda outputs, _: outputs.logprobs(1.0))
    if rank == 0:
        lengths = [len(row) for row in ordered]
        save_file({str(n): row[1:].contiguous() for n, row in enumerate(found.split(lengths))}, result)
    destroy_process_group()
