"""Fits recover coefficients, profiles round-trip through JSON, and missing measurements are reported."""

from dataclasses import replace
from math import pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.codec import from_json, to_json
from realhf.api.config import Recompute
from realhf.api.model_config import ModelConfig
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work
from realhf.plan.machines.profile import (
    Fit,
    Point,
    Profile,
    ProfiledMachine,
    ProfiledSpeed,
    decode_counts,
    fitted,
    message_counts,
    pass_counts,
    shape_of,
    traffic_counts,
)

MODEL = ModelConfig("llama", 4, 64, 4, 2, 16, 128, 512, 1024)
MACHINE = ProfiledMachine("cpu", "abacus", 2, 1)
RANKS = (0, 1)
COSTS = st.floats(1e-7, 1e-3)
WORKS = tuple(Work.of(lengths) for lengths in ([8] * 4, [64] * 2, [64] * 32, [300, 300], list(range(20, 60)), [5, 9]))


def part(n_blocks: int = 4, first: bool = True, last: bool = True, tp: int = 1, **more: bool) -> StageShard:
    return StageShard(MODEL, tp, n_blocks, first, last, bf16=False, **more)


def point(counts: dict[str, float], value: float) -> Point:
    return Point(counts, 0.9 * value, value, 1.3 * value, 9)


def all_ones(counts: dict[str, float]) -> Fit:
    return Fit(dict.fromkeys(counts, 1.0), (point(counts, 1.0),))


def measured() -> ProfiledSpeed:
    """Return a profile with 1 s per count; 2 s and 3 s for training passes."""
    whole = pass_counts(part(), WORKS[0])
    shape = shape_of(MODEL, False)
    twice, thrice = (Fit(dict.fromkeys(whole, factor), ()) for factor in (2.0, 3.0))
    passes = {"forward": all_ones(whole), "train_forward": twice, "train_backward": thrice}
    fits = {f"{shape}/t1/{name}": fit for name, fit in passes.items()}
    fits[f"{shape}/t1/decode"] = all_ones(decode_counts(part(), 1, 1))
    fits[f"{shape}/optimizer"] = all_ones({"update": 1, "parameter": 1})
    fits["all_reduce/4"] = fits["send"] = fits["host_copy"] = all_ones(message_counts(1.0))
    fits["exchange"] = all_ones(traffic_counts(Traffic(node=1)))
    fits["interface/sft/train_step"] = all_ones({"call": 1, "row": 1, "token": 1})
    fits["call"] = Fit({"call": 1.0, "row": 0.0}, ())
    return ProfiledSpeed(Profile(MACHINE, 1e8, fits))


@given(st.lists(COSTS, min_size=4, max_size=4), st.integers(0, 5))
def test_fit_recovers_coefficients_despite_an_outlier(costs: list[float], outlier: int) -> None:
    names = ("block", "block token", "block pair", "block run")
    true = dict(zip(names, costs, strict=True))
    parts = [pass_counts(part(n, False, False), work) for n in (1, 3) for work in WORKS]
    counts = [{name: some[name] for name in names} for some in parts]
    points = [point(some, Fit(true, ())(some)) for some in counts]
    points[outlier] = points[outlier].scaled(1.7)  # an outlier
    fit = fitted(points)
    for some in counts:
        assert fit(some) == pytest.approx(Fit(true, ())(some), rel=0.03)


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 1e6), st.floats(1e-6, 10)), min_size=1, max_size=12))
def test_no_coefficient_is_negative(rows: list[tuple[float, float, float]]) -> None:
    fit = fitted([point({"a": a, "b": b}, value) for a, b, value in rows])
    assert min(fit.coefficients.values()) >= 0 and fit.error >= 0


def test_decreasing_times_give_a_zero_coefficient() -> None:
    fit = fitted([point({"call": 1, "row": n}, 1.0 - n / 100) for n in range(0, 50, 5)])
    assert fit.coefficients["row"] == 0.0 and 0.5 < fit.coefficients["call"] <= 1.0


def test_invalid_points_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot fit 0 points"):
        fitted([])
    with pytest.raises(ValueError, match="all medians positive"):
        fitted([point({"call": 1}, 0.0)])


@given(st.tuples(*[st.floats(1e-6, 10)] * 3), st.tuples(*[st.floats(1e-6, 10)] * 3))
def test_quartiles_of_a_difference_are_in_order(one: tuple[float, ...], other: tuple[float, ...]) -> None:
    a, b = (Point({"call": 1.0}, *sorted(values), repeats=5) for values in (one, other))
    found = a - b
    assert found.low <= found.median <= found.high and found.median == a.median - b.median


def test_json_round_trip() -> None:
    profile = measured().profile
    assert from_json(to_json(profile), Profile) == profile


def test_shape_is_independent_of_depth_and_head() -> None:
    assert shape_of(replace(MODEL, n_layers=9, head="scalar"), False) == shape_of(MODEL, False)
    others = [{"hidden": 128}, {"vocab": 99}, {"n_experts": 4}, {"norm": "layer"}, {"sliding_windows": (8,) * 4}]
    shapes = {shape_of(replace(MODEL, **change), False) for change in others} | {shape_of(MODEL, True)}  # type: ignore[arg-type]
    assert len(shapes) == 6 and shape_of(MODEL, False) not in shapes


def test_pass_counts() -> None:
    work = Work.of([3, 4])
    assert measured().forward(part(2, False, False), work, (0,)) == 2 * (1 + 7 + 16 + 2) + 1 + 2 + 7
    assert measured().forward(part(0, True, False), work, (0,)) == (1 + 2 + 7) + (1 + 7)
    assert measured().forward(part(0, False, True), work, (0,)) == (1 + 2 + 7) + (1 + 7)


def test_the_head_computes_only_predicted_tokens() -> None:
    works = [Work.of([10], predicted) for predicted in (None, 4)]
    all_tokens, some = (measured().train(part(), work, (0,)) for work in works)
    assert all_tokens[0] - some[0] == 2 * 6 and all_tokens[1] - some[1] == 3 * 6
    all_tokens, some = (measured().forward(part(), work, (0,)) for work in works)
    assert all_tokens - some == 6


def test_recomputation_moves_the_forward_pass_to_the_backward_pass() -> None:
    work = Work.of([10])
    plain, again = (measured().train(part(recompute=recompute), work, (0,)) for recompute in (None, Recompute.full))
    blocks = 4 * (1 + 10 + 55 + 1)
    assert plain[0] - again[0] == blocks and again[1] - plain[1] == 2 * blocks


def test_decoding_counts_cached_tokens() -> None:
    assert measured().decode(part(2), 3, 10.0, (0,)) == 2 * (1 + 3 + 30) + 1 + 3 + 1 + 3
    assert measured().decode(part(0, False, True), 3, 0, (0,)) == 2 * (1 + 3)


def test_other_methods() -> None:
    speed = measured()
    assert speed.optimizer(part(), 10) == 11
    assert speed.send(100, 0, 1) == 101 and speed.send(100, 1, 1) == 0
    assert speed.collective(CollectiveKind.ALL_REDUCE, 100, (0,)) == 0
    assert speed.collective(CollectiveKind.ALL_REDUCE, 100, (0, 1, 2)) == 101  # rounded up to four
    assert speed.exchange(Traffic(local=5, n_parts=2, copied=10)) == 1 + 2 + 10
    assert speed.exchange(Traffic(node=6, n_parts=2, copied=6)) == 1 + 2 + 6 + 1 + 2 + 6
    assert speed.interface("sft/train_step", 2, 30) == 33 and speed.interface("sft/train_step", 0, 0) == 0
    assert speed.interface("mine.py:Mine/inference", 2, 30) == 0
    assert speed.call == 1.0


def test_missing_measurements_are_reported_with_a_command() -> None:
    speed = measured()
    with pytest.raises(
        ValueError, match=r"t2/forward.*only h64\S+ \(t1\).*realhf profile model=\S+ n_gpus_per_node=2'"
    ):
        speed.forward(part(tp=2), WORKS[0], RANKS)
    with pytest.raises(ValueError, match=r"h32\S+/t1/decode.*n_gpus_per_node=1 bf16=True'"):
        speed.decode(replace(part(), model=replace(MODEL, hidden=32), bf16=True), 1, 1, (0,))
    with pytest.raises(ValueError, match=r"all_reduce/5.*n_gpus_per_node=5"):
        speed.collective(CollectiveKind.ALL_REDUCE, 8, range(5))
    with pytest.raises(ValueError, match="links between nodes"):
        speed.exchange(Traffic(cluster=1))
    assert speed.covers(MODEL) and not speed.covers(MODEL, tp=2) and not speed.covers(MODEL, bf16=True)


def test_profiles_of_one_machine_are_merged() -> None:
    older, fit = measured().profile, all_ones({"call": 1})
    newer = Profile(MACHINE, 2e8, {"send": fit})
    both = older + newer
    assert both.fits["send"] == fit and set(both.fits) == set(older.fits) and both.resident == 2e8
    with pytest.raises(ValueError, match="abacus.*not on another"):
        Profile(replace(MACHINE, processor="another"), 0.0, {}) + newer


def test_excess_of_memory_fits() -> None:
    """Nine of ten points equal their fit; one is 50 % larger."""
    points = tuple(Point({"byte": 1.0}, n, n, n, 1) for n in [100.0] * 18 + [150.0] * 2)
    fit = Fit({"byte": 100.0}, points)
    profile = replace(measured().profile, fits={"a/t1/train_bytes": fit, "b/t2/train_bytes": fit, "a/t1/forward": fit})
    assert profile.excess("train_bytes") == pytest.approx(0.5) and profile.excess("forward_bytes") == 0.0
    assert replace(profile, fits={"a/t1/train_bytes": replace(fit, points=points[:19])}).excess("train_bytes") == 0.0


def test_error_is_the_standard_error_of_the_regression() -> None:
    """Two fits of one operation with two points beyond their coefficients; residuals of +-10 % and of 0."""
    exact, wrong = (Fit({"call": 1.0}, tuple(Point({"call": 1}, v, v, v, 1) for v in values))
                    for values in ((1.0, 1.0), (1 / 1.1, 1 / 0.9)))  # fmt: skip
    fits = {"a/t1/forward": exact, "b/t2/forward": wrong, "all_reduce/2": wrong, "cluster_all_reduce/2x4": exact}
    fits |= {"interface/sft/train_step": wrong, "call": Fit({"call": 1.0}, ()), "a/optimizer": exact}
    profile = Profile(MACHINE, 1e8, fits)
    assert profile.error("forward") == pytest.approx((0.02 / 2) ** 0.5)
    assert profile.error("all_reduce") == profile.error("interface") == pytest.approx(0.02**0.5)
    assert profile.errors == {"forward": profile.error("forward"), "all_reduce": profile.error("all_reduce"),
                              "cluster_all_reduce": 0.0, "interface": profile.error("all_reduce"),
                              "optimizer": 0.0}  # fmt: skip
    for missing in ("decode", "call"):  # not measured; without points
        with pytest.raises(ValueError, match=f"no measurements of {missing}"):
            profile.error(missing)


def test_the_error_is_not_below_that_of_the_medians() -> None:
    """Quartiles of 1.349 standard deviations of 10 %; the fit equals its only point."""
    fit = Fit({"call": 2.0}, (Point({"call": 1}, 2 - 0.1349, 2.0, 2 + 0.1349, 100),))
    assert Profile(MACHINE, 0.0, {"send": fit}).error("send") == pytest.approx(0.1 * (pi / 2 / 100) ** 0.5)


def test_a_fit_without_a_needed_coefficient_is_reported() -> None:
    with pytest.raises(ValueError, match="no coefficient 'row'; run realhf profile again"):
        Fit({"call": 1.0}, ())({"call": 1, "row": 2})


def test_machines_differ_by_known_values_only() -> None:
    machine = ProfiledMachine("cpu", "abacus", 2, 1, "2.13.0")
    assert not machine.differs_from(machine) and not machine.differs_from(replace(machine, threads=2))
    for unknown in ({"torch": ""}, {"processor": ""}, {"cores": 0}):
        assert not machine.differs_from(replace(machine, **unknown))  # type: ignore[arg-type]
    for other in ({"torch": "2.12.0"}, {"processor": "slide rule"}, {"cores": 4}, {"device": "cuda"}):
        assert machine.differs_from(replace(machine, **other))  # type: ignore[arg-type]
    assert "torch 2.13.0" in str(machine) and "torch" not in str(MACHINE)


def test_jitter_is_the_deviation_of_repeated_work() -> None:
    speed = measured()
    assert speed.jitter == pytest.approx((1.3 - 0.9) / 0.9 / 1.349)  # of quartiles 0.9 and 1.3
    shape = shape_of(MODEL, False)
    steady = replace(speed.profile, fits={f"{shape}/t1/forward": Fit({}, (Point({}, 2.0, 2.0, 2.0, 9),))})
    assert steady.jitter == 0.0
    assert replace(speed.profile, fits={"send": speed.profile.fits["send"]}).jitter == 0.0  # waits for another worker
