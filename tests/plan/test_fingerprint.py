"""Digests of code and files, and the differences between two of them."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.config import DatasetConfig, LRSchedule, ModelSpec, OptimizerConfig
from realhf.api.experiment import RoleSpec
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.plan import fingerprint
from realhf.plan.fingerprint import fingerprint_changes, lr_changes, sampled_sha256, take_fingerprint
from realhf.plan.learning_rate import learning_rate
from tests.scaling import examples


@pytest.fixture
def experiment(tmp_path: Path) -> PPOMathExperiment:
    """An experiment whose files are all in ``tmp_path``."""
    for name in ("train.jsonl", "valid.jsonl", "actor/config.json", "actor/model.safetensors", "actor/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "rewards.py").write_text("import helper, torch\ndef f(): ...\n")
    (tmp_path / "helper.py").write_text("from package import deep\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "deep.py").write_text("x = 1\n")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    (tmp_path / "actor" / "README.md").write_text("notes")
    data = DatasetConfig(str(tmp_path / "train.jsonl"), train_bs_n_seqs=2, eval_path=str(tmp_path / "valid.jsonl"))
    found = PPOMathExperiment(dataset=data, actor=ModelSpec(str(tmp_path / "actor")))
    for name in ("group.py", "judge.txt"):
        (tmp_path / name).write_text(name.partition(".")[0])
    found.reward.group_fn, found.reward.judge.prompt = f"{tmp_path}/group.py:f", f"{tmp_path}/judge.txt"
    found.reward.fns = ["math", f"{tmp_path}/rewards.py:f"]
    return found


def take(experiment: PPOMathExperiment) -> fingerprint.Fingerprint:
    return take_fingerprint("ppo-math", experiment, experiment.graph(), experiment.roles())


PART_OF = {"train.jsonl": "data", "valid.jsonl": "eval_data", "rewards.py": "reward_file", "helper.py": "reward_file",
           "package/deep.py": "reward_file", "actor/config.json": "models", "actor/model.safetensors": "models",
           "group.py": "reward_file", "judge.txt": "reward_file",
           "actor/tokenizer.json": "models", "unrelated.py": None, "actor/README.md": None}  # fmt: skip


@pytest.mark.parametrize("file", PART_OF)
@pytest.mark.parametrize("edit", [lambda path: path.write_text("y = 2\n"), lambda path: path.unlink()])
def test_an_edit_changes_the_part_of_its_file(
    file: str, edit: Callable[[Path], None], experiment: PPOMathExperiment, tmp_path: Path
) -> None:
    before = take(experiment)
    assert before == take(experiment)
    edit(tmp_path / file)
    changed = fingerprint_changes(before, take(experiment))
    assert list(changed) == ([PART_OF[file]] if PART_OF[file] else [])


def test_sources_are_told_apart_by_their_order(experiment: PPOMathExperiment, tmp_path: Path) -> None:
    one, two = (str(tmp_path / name) for name in ("train.jsonl", "valid.jsonl"))
    experiment.dataset.path, experiment.dataset.paths = "", [one, two]
    before = take(experiment)
    assert list(before["data"]) == ["dataset.paths.0", "dataset.paths.1"]
    experiment.dataset.paths = [two, one]
    assert list(fingerprint_changes(before, take(experiment))) == ["data"]


def test_code_includes_sources_kernels_versions_and_files_of_experiments(
    experiment: PPOMathExperiment, tmp_path: Path
) -> None:
    code = take(experiment)["code"]
    assert {"realhf", "torch", "realhf/plan/fingerprint.py", "realhf/ops/_C.so"} <= code.keys() and code["torch"]
    graph = experiment.graph()
    own = replace(graph.mfcs[0], interface=replace(graph.mfcs[0].interface, name=f"{tmp_path}/helper.py:Own"))
    graph = replace(graph, mfcs=(own, *graph.mfcs[1:]))
    found = take_fingerprint(f"{tmp_path}/unrelated.py:Mine", experiment, graph, {})
    own_files = ("unrelated.py", "helper.py", "package/__init__.py", "package/deep.py")
    assert set(found["code"]) - set(code) == {str(tmp_path / name) for name in own_files}


@settings(max_examples=examples(40))
@given(st.integers(0, 1 << 32))
def test_a_difference_names_the_part_and_its_files(seed: int) -> None:
    rng = random.Random(seed)
    before = {part: {f"{part}{i}": str(rng.random()) for i in range(rng.randint(0, 6))} for part in ("code", "data")}
    now = {part: {name: digest if rng.random() < 0.5 else "other" for name, digest in files.items()
                  if rng.random() < 0.8} for part, files in before.items()}  # fmt: skip
    changed = fingerprint_changes(before, now)
    assert set(changed) == {part for part in before if before[part] != now[part]}
    for part, text in changed.items():
        names = sorted(name for name in before[part] if before[part][name] != now[part].get(name))
        assert "\n" not in text and all(f"{name}: " in text for name in names[:3])
        assert ("more files" in text) == (len(names) > 3)


@settings(max_examples=examples(40))
@given(st.integers(0, 3 << 20), st.integers(0, 1 << 32))
def test_a_sampled_digest_is_complete_for_small_files(
    tmp_path_factory: pytest.TempPathFactory, size: int, seed: int
) -> None:
    rng, path = random.Random(seed), tmp_path_factory.mktemp("sampled") / "weights"
    path.write_bytes(data := bytearray(rng.randbytes(size)))
    before = sampled_sha256(path)
    if size:
        data[rng.randrange(size)] ^= 1 + rng.randrange(255)
        path.write_bytes(data)
        assert sampled_sha256(path) != before
    path.write_bytes(data + b"x")
    assert sampled_sha256(path) != before


def test_a_sampled_digest_of_a_large_file_covers_its_header_and_equal_distances(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = 300 << 20
    with path.open("wb") as file:
        file.truncate(size)
    before = sampled_sha256(path)
    for at in (0, 8, *range(0, size, size // 64)[5::20]):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        assert before != (before := sampled_sha256(path)), f"byte {at}"
    with path.open("r+b") as file:
        file.truncate(size - 1)
    assert sampled_sha256(path) != before


@settings(max_examples=examples(100))
@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from(LRSchedule), st.floats(0, 1))
def test_a_change_of_the_length_is_a_change_of_future_learning_rates(
    step: int, before: int, now: int, schedule: LRSchedule, warmup: float
) -> None:
    options = OptimizerConfig(lr_scheduler_type=schedule, warmup_steps_proportion=warmup)
    changed = lr_changes({"actor": RoleSpec(ModelSpec(optimizer=options))}, step, before, now)
    steps = range(step, max(before, now))
    rates = [[learning_rate(options, s, total) for s in steps] for total in (before, now)]
    assert bool(changed) == (rates[0] != rates[1])
    assert changed in ([], [f"actor ({schedule.value})"])
    if schedule is LRSchedule.constant and warmup == 0.0:
        assert not changed
