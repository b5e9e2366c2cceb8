"""One worker in this process."""

import logging
from pathlib import Path

import pytest
import torch

from realhf.api.batch_meta import RowId
from realhf.api.messages import (
    Done,
    ExecuteCall,
    Failed,
    Fetch,
    FreeRows,
    Hello,
    ReadRows,
    Ready,
    Save,
    Start,
    ToMaster,
)
from realhf.apps.commands.quickstart import prepare
from realhf.base.errors import UserError
from realhf.base.host_memory import resident_bytes
from realhf.models.hf_folder import SINGLE
from realhf.plan.compile.schedule import Dispatch, MasterState, RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.system.worker import ModelWorker
from tests.conftest import Task


def sft_run(task: Task, root: Path) -> RunSpec:
    overrides = [f"fileroot={root}", "trial_name=t", "device=cpu", "model.init_from_scratch=True", "mode=inline",
             f"model.config={task.model}", f"model.tokenizer={task.tokenizer}", f"dataset.path={task.sft}",
             "dataset.train_bs_n_seqs=20", "dataset.shuffle=False", "model.optimizer.lr=1e-2"]  # fmt: skip
    return prepare("sft", overrides)


def started(run: RunSpec) -> tuple[ModelWorker, list[ToMaster]]:
    replies: list[ToMaster] = []
    worker = ModelWorker(run, 0, replies.append, logging.getLogger("realhf.test"))
    worker.hello()
    worker.handle(Start("127.0.0.1", 0))
    return worker, replies


def test_messages_from_start_to_end(task: Task, tmp_path: Path) -> None:
    run = sft_run(task, tmp_path)
    worker, replies = started(run)
    hello, ready = replies
    assert isinstance(hello, Hello) and (hello.rank, hello.port) == (0, 0)
    assert isinstance(ready, Ready) and ready.info["device"] == "cpu" and ready.info["parameters"]["model"] > 1000
    state = MasterState(run.graph, run.plan, run.schedule)
    state.start()
    worker.handle(Fetch(1, 0, 0, 20))
    fetched = replies[-1]
    assert isinstance(fetched, Done) and fetched.outputs is not None
    assert fetched.outputs.ids == tuple(RowId(p, 0) for p in range(20))
    assert fetched.trace.count(b"\n") == 1 and fetched.trace.startswith(b'{"name": "fetch"')
    computed, moved, *memory = fetched.metrics  # in the order of WORKER_METRICS
    assert computed == moved == 0 and len(memory) == 2 and min(memory) > 0
    actions = state.handle(RowsReady(None, run.schedule.span(0), {0: fetched.outputs}))
    (call,) = (action.call for action in actions if isinstance(action, Dispatch))
    losses = []
    for _ in range(3):
        worker.handle(call)
        worker.handle(ExecuteCall(call.request))
        total, count = replies[-1].stats["loss"]
        losses.append(total / count)
        assert min(replies[-1].metrics) > 0
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[2]
    worker.handle(ReadRows(7, (RowId(3, 0), RowId(99, 0)), ("tokens", "prompt_mask")))
    (row,) = replies[-1].values["rows"]
    assert row["prompt"].endswith("=\n") and "####" in row["response"] and row["prompt_id"] == 3
    worker.handle(Save(8, 0, "model", str(tmp_path / "saved")))
    assert replies[-1].request == 8 and (tmp_path / "saved" / SINGLE).is_file()
    worker.handle(FreeRows(0, 20))
    assert len(worker.executor.store) == 0 and replies[-1].request == 8  # without a reply


def test_an_error_is_reported_and_raised(task: Task, tmp_path: Path) -> None:
    worker, replies = started(sft_run(task, tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        worker.handle(Save(1, 0, "model", str(tmp_path / "file" / "saved")))
    failed = replies[-1]
    assert isinstance(failed, Failed) and not failed.user_error
    assert failed.during == f"saving model to {tmp_path}/file/saved" and failed.error.startswith("NotADirectoryError: ")
    assert "Traceback" in failed.traceback and "test_worker" not in failed.error


def test_data_that_changed_since_the_launch_is_a_user_error(task: Task, tmp_path: Path) -> None:
    run = sft_run(task, tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(task.sft.read_text().splitlines(keepends=True)[:25]))
    run.config.dataset.path = str(other)
    replies: list[ToMaster] = []
    worker = ModelWorker(run, 0, replies.append, logging.getLogger("realhf.test"))
    with pytest.raises(UserError, match="has 25 rows and 0 held-out rows, at launch it had 40 and 0"):
        worker.handle(Start("127.0.0.1", 0))
    (failed,) = replies
    assert isinstance(failed, Failed) and failed.user_error and failed.during == "reading the data"
    assert failed.error.startswith(str(other)) and "Traceback" in failed.traceback


def test_memory_is_measured_in_bytes() -> None:
    block = torch.ones(4 << 20)
    peak, present = resident_bytes()
    assert present > block.nbytes and peak > 0.9 * present  # the kernel counts both approximately
