"""Values derived from a run spec, and its files."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.api.config import ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.apps.commands.quickstart import prepare
from realhf.apps.prepare.launching import read_run, write_run
from realhf.plan.run_spec import RunSpec, model_config, tokenizer_dir
from realhf.plan.train_schedule import TrainSchedule
from tests.conftest import Task

SPEC = InterfaceSpec("any")
GEN = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 3)
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens",), (), 3)


def test_fetchers_schedule_and_program(make_run: Callable[..., RunSpec], tmp_path: Path) -> None:
    meshes = {"gen": (2, 1), "train": (0,)}
    run = make_run(Graph((TRAIN, GEN)), meshes, tmp_path, n_rows=7, batch=3, total_train_epochs=2)
    assert run.fetch_ranks == (2, 1)
    assert run.schedule == TrainSchedule(3, 14, 5)
    assert [type(step).__name__ for step in run.program["gen"]] == ["Transfer", "Reallocate", "Compute", "Release"]


def test_architecture_of_a_role(task: Task, actor_folder: Path) -> None:
    scratch = ModelSpec(config=str(task.model), init_from_scratch=True, path="ignored")
    assert model_config(RoleSpec(scratch)).hidden == 32
    critic = model_config(RoleSpec(ModelSpec(str(actor_folder)), scalar_head=True))
    assert critic.head == "scalar" and critic.vocab == model_config(RoleSpec(scratch)).vocab
    with pytest.raises(ValueError, match="no model configuration"):
        model_config(RoleSpec(ModelSpec()))


def test_the_first_tokenizer_of_a_role_is_used() -> None:
    specs = (ModelSpec(), ModelSpec("weights", tokenizer="words"), ModelSpec("x"))
    assert tokenizer_dir({str(i): RoleSpec(spec) for i, spec in enumerate(specs)}) == Path("words")
    assert tokenizer_dir({"a": RoleSpec(ModelSpec("weights"))}) == Path("weights")
    assert tokenizer_dir({}) == Path("")


def test_a_run_is_restored_from_its_directory(task: Task, actor_folder: Path, tmp_path: Path) -> None:
    overrides = [f"fileroot={tmp_path}", "trial_name=t", f"actor.path={actor_folder}", f"dataset.path={task.train}",
             "dataset.train_bs_n_seqs=7", "ppo.gen.max_new_tokens=9", "n_gpus_per_node=2", "device=cpu",
             "allocation_mode=actor_gen:d2,*:d1", "ppo.gen.stop_token_ids=[3,4]"]  # fmt: skip
    run = prepare("ppo-math", overrides)
    assert not tmp_path.joinpath("ppo-math").exists()
    mask = os.umask(0)
    try:
        write_run(run, "launch")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(run.paths.root.stat().st_mode) == 0o700  # for any umask
    restored = read_run(run.paths.root)
    assert (
        restored.digest
        and replace(restored, digest="") == run
        and restored.program == run.program
        and restored.models == run.models
    )
    assert restored.fetch_ranks == (0, 1) and restored.tokenizer_dir == actor_folder


@pytest.mark.parametrize(("n_held_out", "length"), [(0, (15, 5)), (4, (19, 7)), (3, (18, 6))])
def test_held_out_rows_are_numbered_after_training_rows(
    make_run: Callable[..., RunSpec], tmp_path: Path, n_held_out: int, length: tuple[int, int]
) -> None:
    run = make_run(Graph((GEN, TRAIN)), {"gen": (0,), "train": (0,)}, tmp_path, n_rows=7, batch=3, total_train_epochs=2)
    assert replace(run, n_held_out=n_held_out).eval_schedule == TrainSchedule(3, *length, first_step=5)
