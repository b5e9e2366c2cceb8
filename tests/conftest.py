"""Shared fixtures: a tiny arithmetic task, a model for it, and gloo ranks in separate processes."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from realhf.api.param_box import whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.param_specs import param_specs
from realhf.comm.process_groups import destroy_process_group, init_process_group, open_rendezvous
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import init_random, save_hf
from tests.rank_results import packed, unpacked
from tests.scaling import examples

os.environ["HF_HUB_OFFLINE"] = "1"  # no test depends on the network
settings.register_profile("ours", deadline=None, max_examples=examples(30))  # a busy machine is not a failure
settings.load_profile("ours")
EXAMPLES = Path(__file__).parents[1] / "examples"
TIMEOUT_S = float(os.environ.get("TEST_TIMEOUT_S", "300"))
"""Limits every wait for another process: long enough for a busy machine, since only a hang reaches it."""
Job = Callable[..., Any]
LONGEST = ("sanitizers", "launch_race", "ray", "planner_fuzz", "agents", "zero", "partial_rollouts", "hub", "layouts",
           "slurm", "metamorphic", "agreement", "plan_sweep", "verdicts", "extension", "algorithms", "lora",
           "phases")  # fmt: skip
"""Files by the time of their tests. They start first, so that none runs alone at the end."""


PART = os.environ.get("TEST_PART", "1/1")


def pytest_configure() -> None:
    part_of([], PART)  # before workers start, which would not show the error


@pytest.hookimpl(trylast=True)  # after markers have selected items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files by their time, and keep those of a part."""
    place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
    files = set(part_of(list(dict.fromkeys(item.path for item in items)), PART))
    config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
    items[:] = [item for item in items if item.path in files]


def part_of(files: list[Path], part: str) -> list[Path]:
    """Return the files of a part, ``K/N``; together the parts are all files."""
    number, _, n_parts = part.partition("/")
    if not (number.isdecimal() and n_parts.isdecimal() and 1 <= int(number) <= int(n_parts)):
        raise pytest.UsageError(f"TEST_PART={part}: must be K/N with 1 <= K <= N")
    return files[int(number) - 1 :: int(n_parts)]


@dataclass(frozen=True)
class Task:
    """One-digit sums: 40 to warm up on, 17 to train on, 5 to test on; tokenizer and a 2-layer, hidden-32 Llama."""

    root: Path
    sft: Path
    train: Path
    valid: Path
    tokenizer: Path
    model: Path


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors are tiny: more threads would be slower."""
    torch.set_num_threads(1)


def make_task(root: Path) -> Task:
    """Write the files of a task."""
    sizes = {"digits": 1, "sft-rows": 40, "train-rows": 17, "valid-rows": 5, "hidden": 32, "layers": 2}
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    subprocess.run([sys.executable, str(EXAMPLES / "arithmetic.py"), str(root), *options], check=True)
    return Task(
        root, *(root / f"{name}.jsonl" for name in ("sft", "train", "valid")), root / "tokenizer", root / "model"
    )


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("arithmetic"))


@pytest.fixture(scope="session")
def actor_folder(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the task as a Hugging Face folder, with the tokenizer."""
    config = read_hf_config(task.model, scalar_head=False)
    specs = param_specs(config)
    params = FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, torch.float32, "cpu")
    init_random(config, params, seed=7)
    folder = tmp_path_factory.mktemp("actor") / "model"
    save_hf(folder, config, params.view, task.tokenizer)
    return folder


def rank_main(reply: Connection, job: Job, port: int, rank: int, world: int, arguments: tuple) -> None:
    """One gloo rank: initialise, run the job, send (result, error)."""
    torch.set_num_threads(1)
    try:
        _store = init_process_group("127.0.0.1", port, rank, world, "cpu", TIMEOUT_S, None, bytes(32))
        answer = packed((job(rank, world, *arguments), None))
    except BaseException:
        answer = packed((None, traceback.format_exc()))
    reply.send_bytes(answer)
    reply.recv_bytes()  # a rank that exits early breaks the others' connections
    destroy_process_group()


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """``on_ranks(world, job, *arguments)``: the results of ``job(rank, world, *arguments)`` on ``world`` gloo ranks.

    ``job`` is a function of a test module; a rank that raises fails the test with its traceback.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch.distributed", "realhf.system.worker"])

    def run(world: int, job: Job, *arguments: Any) -> list[Any]:
        store = open_rendezvous("127.0.0.1", 0, TIMEOUT_S)
        ends, ranks = [], []
        for rank in range(world):
            mine, theirs = processes.Pipe()
            process = processes.Process(target=rank_main, args=(theirs, job, store.port, rank, world, arguments))
            process.start()
            theirs.close()
            ends.append(mine)
            ranks.append(process)
        answers = gather(ends)
        for rank, process in enumerate(ranks):
            if rank in answers:
                ends[rank].send_bytes(b"leave")
                process.join(10)
        for process in ranks:
            process.kill()
        errors = [f"rank {rank}: {answers.get(rank, ('', 'no answer'))[1]}" for rank in range(world)]
        assert not any(error for _, error in answers.values()) and len(answers) == world, "\n".join(errors)
        return [answers[rank][0] for rank in range(world)]

    return run


def gather(ends: list[Connection]) -> dict[int, tuple[Any, str | None]]:
    """Return the results by rank; after the first failure, do not wait for the others."""
    answers: dict[int, tuple[Any, str | None]] = {}
    patience = TIMEOUT_S
    while len(answers) < len(ends):
        ready = wait([end for rank, end in enumerate(ends) if rank not in answers], patience)
        if not ready:
            break
        for end in ready:
            answers[ends.index(end)] = unpacked(end.recv_bytes())
        if any(error for _, error in answers.values()):
            patience = 0.5
    return answers


@pytest.fixture(scope="session")
def live_processes() -> Callable[[Path], dict[int, str]]:
    """``live_processes(folder)``: the command lines of processes that refer to ``folder``, by process id."""

    def find(folder: Path) -> dict[int, str]:
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it may exit meanwhile
                if entry.name.isdigit() and str(folder) in (words := (entry / "cmdline").read_text(errors="replace")):
                    found[int(entry.name)] = words.replace("\0", " ")
        found.pop(os.getpid(), None)
        return found

    return find


def reset_signals() -> None:
    """Background jobs of a shell ignore SIGINT and SIGQUIT, those of nohup SIGHUP; programs in a terminal do not."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; programs of tests would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
