"""Profiles are checked when they are read, and concurrent updates lose nothing."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.codec import to_json
from realhf.apps.profiles.profile_file import read_profile, update_profile
from realhf.base.errors import UserError
from realhf.plan.machines.profile import Fit, Point, Profile, ProfiledMachine
from tests.scaling import examples

MACHINE = ProfiledMachine("cpu", "abacus", 2, 1, "2.13.0")
POINT = Point({"call": 1, "row": 8}, 5e-4, 1e-3, 1.5e-3, 5)
FIT = Fit({"call": 1e-3, "row": 0.0}, (POINT,))
PROFILE = Profile(MACHINE, 2e8, {"call": FIT, "h8-v9/t1/forward": FIT, "cluster_send": FIT, "all_reduce/2": FIT,
                                 "cluster_all_reduce/2x4": FIT, "interface/mine.py:Mine/inference": FIT})  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "profile.json"
    assert update_profile(file, PROFILE, "out") == PROFILE == read_profile(file, "out")
    newer = Profile(MACHINE, 3e8, {"send": FIT})
    assert update_profile(file, newer, "out") == PROFILE + newer == read_profile(file, "out")
    assert [f.name for f in file.parent.iterdir()] == ["profile.json"]


def test_differences_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Their quartiles may cross."""
    old = replace(PROFILE, fits={"tp_collectives/2": replace(FIT, points=(replace(POINT, high=POINT.median / 2),))})
    assert update_profile(tmp_path / "p.json", old, "out") == old == read_profile(tmp_path / "p.json", "out")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"resident": -1.0}, "resident=-1.0 must be a finite number >= 0"),
        ({"resident": float("nan")}, "resident=nan must be"),
        ({"fits": {"a//b": FIT}}, "unknown measurement 'a//b'"),
        ({"fits": {"h8/t0/forward": FIT}}, "unknown measurement 'h8/t0/forward'"),
        ({"fits": {"all_reduce/x": FIT}}, "unknown measurement 'all_reduce/x'"),
        ({"fits": {"call": replace(FIT, coefficients={"call": -1.0, "row": 0.0})}}, "coefficient of call is -1.0"),
        ({"fits": {"call": replace(FIT, coefficients={"call": float("inf"), "row": 0.0})}}, "of call is inf"),
        ({"fits": {"call": replace(FIT, points=(replace(POINT, median=0.0),))}}, "the median 0.0, must be > 0"),
        ({"fits": {"call": replace(FIT, points=(replace(POINT, repeats=0),))}}, "must be > 0, as low and repeats"),
        ({"fits": {"call": replace(FIT, points=(replace(POINT, low=float("nan")),))}}, "must be finite"),
        ({"fits": {"call": replace(FIT, points=(replace(POINT, low=POINT.median + 1),))}}, "in ascending order"),
        ({"fits": {"call": replace(FIT, points=(replace(POINT, high=POINT.median / 2),))}}, "in ascending order"),
        ({"fits": {"call": replace(FIT, coefficients={"call": 1.0})}}, "counts without a coefficient"),
        ({"fits": {"h8/t1/kept_bytes": replace(FIT, coefficients={"call": 0.0, "row": 0.0})}}, "0 at a point"),
    ],
)
def test_invalid_values_are_reported(change: dict, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(to_json(replace(PROFILE, **change)))
    with pytest.raises(UserError) as caught:
        read_profile(tmp_path / "p.json", "planner.profile")
    (text,) = caught.value.problems
    assert text.startswith(f"planner.profile={tmp_path}/p.json is not a valid profile (") and problem in text
    assert text.endswith("; remove it and make it again with realhf profile")


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_damaged_files_are_user_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Truncated at any byte, or with any value replaced by another one."""
    file, text = tmp_path_factory.mktemp("damaged") / "p.json", to_json(PROFILE)
    if data.draw(st.booleans()):
        file.write_text(text[: data.draw(st.integers(0, len(text) - 1))])
        with pytest.raises(UserError, match="is not a valid profile"):
            read_profile(file, "out")
        return
    plain = json.loads(text)
    node, key = plain, data.draw(st.sampled_from(sorted(plain)))
    while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(st.sampled_from([None, [], {}, "", "x", -1, [1], {"a": 1}, float("nan"), 1e400]))
    file.write_text(json.dumps(plain))
    try:
        profile = read_profile(file, "out")
    except UserError:
        return
    assert all(error >= 0 for error in profile.errors.values()) and profile.n_workers >= 1  # a valid one


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"null"])
def test_files_that_are_no_json_objects(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(UserError, match="not a valid profile"):
        read_profile(tmp_path / "p.json", "out")
    with pytest.raises(UserError, match="IsADirectoryError"):
        read_profile(tmp_path, "out")


def test_measurements_are_kept_if_the_file_is_of_another_machine(tmp_path: Path) -> None:
    file, other = tmp_path / "p.json", replace(PROFILE, machine=replace(MACHINE, cores=4))
    update_profile(file, PROFILE, "out")
    for name in ("p-2.json", "p-3.json"):
        with pytest.raises(UserError, match=f"the new measurements are in {tmp_path}/{name}"):
            update_profile(file, other, "out")
        assert read_profile(tmp_path / name, "out") == other
    assert read_profile(file, "out") == PROFILE


def add(file: str, start: int, n: int) -> None:
    for i in range(start, start + n):
        update_profile(Path(file), Profile(MACHINE, 2e8, {f"all_reduce/{i + 1}": FIT}), "out")


def test_concurrent_updates_lose_nothing(tmp_path: Path) -> None:
    file, n = tmp_path / "p.json", 15
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add, args=(str(file), k * n, n)) for k in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert set(read_profile(file, "out").fits) == {f"all_reduce/{i + 1}" for i in range(3 * n)}
