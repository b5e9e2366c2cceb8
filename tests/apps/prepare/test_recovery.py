"""``realhf resume`` in damaged run directories. Everything runs in this process, without the rights of root."""

import contextlib
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.apps.main import run
from realhf.apps.prepare.options import save_experiment
from realhf.apps.prepare.recovery import retried
from realhf.base.errors import RunFailed
from realhf.base.paths import RunDir
from realhf.experiments import experiment_class
from realhf.system.checkpoint.best_models import read_pointer, rewind_best
from realhf.system.checkpoint.manifest import checkpoints_of
from tests.conftest import Task
from tests.scaling import examples

OTHER_USER = 65534
STEPS, STOPPED = 4, 3
VALUES = (None, [], {}, -1, 10**30, "x", 1e400, float("nan"), True, "", [1], {"a": 1}, 0.5)
TEXTS = (b"", b"\0", b"null", b"[]", b"{}", b"7", b"[" * 100_000, b"a: [", b"\t", b"*x", b"!!python/object:a.b {}",
         b"\xff\xfe", b"a: &a [*a]", b"${x}", b"a: ${a}", b"a: ${oc.env:NO_SUCH}")  # fmt: skip


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def owned(folder: Path) -> Path:
    """Give a folder to the user of ``unprivileged``."""
    for path in (folder, *folder.rglob("*")) if os.geteuid() == 0 and os.path.lexists(folder) else ():
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def finished(task: Task) -> Iterator[Path]:
    """A run of four steps with evaluations and best models, in a folder that all users can enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copytree(task.root, folder / "task")
        words = [
            *(f"model.{key}={folder}/task/{value}" for key, value in (("config", "model"), ("tokenizer", "tokenizer"))),
            f"dataset.path={folder}/task/sft.jsonl", f"fileroot={folder}", "experiment_name=t", "trial_name=run",
            "device=cpu", "mode=inline", "threads_per_worker=1", "tensorboard.enabled=False",
            "dataset.eval_fraction=0.2", "model.init_from_scratch=True", "dataset.train_bs_n_seqs=8",
            f"exp_ctrl.total_train_steps={STEPS}",
            "exp_ctrl.ckpt_freq_steps=1", "exp_ctrl.eval_freq_steps=1", "exp_ctrl.keep_best=-eval/loss",
        ]  # fmt: skip
        assert run(["quickstart", "sft", *words]) == 0
        yield owned(folder / "t").joinpath("run").rename(folder / "t" / "finished")


def stopped(finished: Path) -> Path:
    """Return the run after three steps of four; a copy at the place where it started."""
    root = finished.with_name("run")
    if os.path.lexists(root) and not (root.is_dir() and not root.is_symlink()):
        root.unlink()
    elif root.exists():
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())):
            folder.chmod(0o700)
        shutil.rmtree(root)
    shutil.copytree(finished, root)
    shutil.rmtree(root / "models")
    shutil.rmtree(root / "checkpoints" / f"step_{STEPS}")
    (root / "checkpoints" / "latest").write_text(f"step_{STOPPED}")
    return root


def resumed(root: Path) -> tuple[int, list[str]]:
    """Return the exit code and the lines of standard error."""
    owned(root)
    errors = io.StringIO()
    with unprivileged(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = run(["resume", str(root)])
    return code, errors.getvalue().splitlines()


def content(root: Path) -> dict[str, bytes | str]:
    return {str(path): path.read_bytes() if path.is_file() else oct(path.lstat().st_mode) for path in root.rglob("*")}


def edited(value: Any, rng: random.Random) -> Any:
    """Replace or remove a random part of a JSON value."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(VALUES)
    key = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.2:
        del value[key]
    else:
        value[key] = edited(value[key], rng)
    return value


def rewritten(path: Path, data: bytes, rng: random.Random) -> bytes:
    """Change the content of a file: at random bytes, or at a value of its format."""
    at = rng.randrange(len(data) + 1)
    changes: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + b"\0" * 64 + data[at + 64 :],
        lambda: rng.choice(TEXTS),
        lambda: rng.choice(TEXTS) + data,
    ]
    lines = data.splitlines()
    formats: dict[str, Callable[[], bytes]] = {
        ".json": lambda: json.dumps(edited(json.loads(data), rng)).encode(),
        ".yaml": lambda: yaml.safe_dump(edited(yaml.safe_load(data), rng)).encode(),
        ".jsonl": lambda: b"\n".join([*lines[:-1], json.dumps(edited(json.loads(lines[-1]), rng)).encode(), b""]),
    }
    if path.suffix in formats and path.name != "trace.json":
        changes += [formats[path.suffix]] * 3
    return rng.choice(changes)()


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file or folder; return how."""
    kind = rng.choice(["content", "content", "content", "mode", "other kind", "link", "pipe", "missing"])
    if kind == "mode":
        path.chmod(rng.choice([0, 0o100, 0o200, 0o400, 0o500]))
        return kind
    is_folder, data = path.is_dir(), path.read_bytes() if path.is_file() else b""
    shutil.rmtree(path) if is_folder else path.unlink()
    if kind == "link":
        path.symlink_to(rng.choice([path, path.with_name("nowhere")]))
    elif kind == "pipe":
        os.mkfifo(path)
    elif (kind == "other kind" and not is_folder) or (kind == "content" and is_folder):
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(rewritten(path, data, rng))
    return kind


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_damaged_run_directory_is_resumed_correctly_or_refused_in_one_line(finished: Path, seed: int) -> None:
    rng, root = random.Random(seed), stopped(finished)
    entries = sorted([root, *root.iterdir()] if rng.random() < 0.7 else root.rglob("*"))
    entry = rng.choice(entries)
    how = f"{entry.relative_to(root)}: {damage(entry, rng)}"
    before = content(root)
    code, errors = resumed(root)
    if code == 2:
        assert content(root) == before, how
        assert len(errors) == 1 or errors[0].endswith("nothing was launched"), (how, errors)
        assert all(len(line) < 700 for line in errors) and "Traceback" not in str(errors), (how, errors)
        return
    if code == 1 and entry.name == "config.yaml":  # exp_ctrl.keep_best is another text
        assert [line[:6] for line in errors] == ["error:"], (how, errors)
        return
    assert code == 0, (how, errors)
    model = Path("models", "model", f"step_{STEPS}", "model.safetensors")
    assert (root / model).read_bytes() == (finished / model).read_bytes(), how


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "seed: [", "config.yaml: invalid YAML"),
        ("config.yaml", "seed: 1\n", "config.yaml is damaged, or of another version: "),
        ("plan.json", "{", "plan.json is damaged (JSONDecodeError: "),
        ("plan.json", "{}", "plan.json is damaged (ValidationError: Object missing required field `experiment`)"),
        ("plan.json", None, "plan.json is not a regular file; "),
        ("metrics.jsonl", None, "metrics.jsonl is not a regular file; "),
        ("stop", None, "stop is not a regular file; "),
        ("logs/worker-0.log", None, "worker-0.log is not a regular file; "),
        ("../.run.lock", None, "run cannot be used: [Errno 21] Is a directory: "),
    ],
)
def test_named_damage(finished: Path, name: str, text: str | None, message: str) -> None:
    root = stopped(finished)
    path = root / name
    path.unlink(missing_ok=True)
    path.mkdir() if text is None else path.write_text(text)
    code, errors = resumed(root)
    if text is None:
        path.rmdir()
    assert code == 2 and len(errors) == 1 and message in errors[0]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_failure_is_reported_if_the_run_cannot_be_resumed(finished: Path, seed: int) -> None:
    rng, paths = random.Random(seed), RunDir(stopped(finished))
    damage(rng.choice([paths.config, paths.plan, paths.checkpoints, paths.checkpoints / f"step_{STOPPED}"]), rng)

    def fail() -> None:
        raise RunFailed("worker 1 died", n_nodes=1)

    with unprivileged(), pytest.raises(RunFailed, match="^worker 1 died"):
        retried(fail, paths)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_multi_stage_experiment_is_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    rng, paths = random.Random(seed), RunDir(tmp_path)
    save_experiment(experiment_class("restem")(), paths.config)
    paths.stages.write_text('{"experiment": "restem", "done": ["round1-sample"]}')
    damage(rng.choice([paths.stages, paths.stages, paths.config]), rng)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = run(["resume", str(tmp_path)])
    lines = errors.getvalue().splitlines()
    assert (
        code == 2 and (len(lines) == 1 or lines[0].endswith("nothing was launched")) and "Traceback" not in str(lines)
    )


def test_the_best_models_of_every_checkpoint_are_kept(finished: Path, tmp_path: Path) -> None:
    """The models of the best evaluation before a checkpoint exist, even if a later one was better."""
    for step in checkpoints_of(finished / "checkpoints"):
        best = Path(shutil.copytree(finished / "best", tmp_path / str(step)))
        rewind_best(best, step)
        assert (best / f"step_{read_pointer(best)[1][-1].step}" / "model" / "model.safetensors").is_file()
