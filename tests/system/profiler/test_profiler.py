"""A tiny profile through real processes: all fits are present and non-negative."""

import math
from pathlib import Path

import pytest

from realhf.api.model_config import ModelConfig
from realhf.apps.profiles.profile_file import read_profile, update_profile
from realhf.base.errors import RunFailed
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work
from realhf.plan.machines.profile import ProfiledSpeed, numbers_of_workers
from realhf.system.profiler.profiler import ProfileJob, take_profile, this_machine

MODEL = ModelConfig("llama", 4, 32, 4, 2, 8, 64, 64, 100)
SHAPE = "h32-a4k2x8-m64-v64-fp32"
ALGORITHMS = ("ppo_actor/train_step", "generation/generate")


@pytest.mark.dist
@pytest.mark.slow
def test_a_profile_of_one_model_on_two_workers(tmp_path: Path) -> None:
    logged: list[str] = []
    profile = take_profile(ProfileJob("cpu", 2, 1, False, (MODEL,), 2.0, ALGORITHMS), logged.append)
    assert profile.machine == this_machine("cpu", 1) and profile.resident > 5e7
    assert profile.shapes == {SHAPE: (1, 2)} and SHAPE in logged and f"{SHAPE} with tensor-parallel size 2" in logged
    passes = ("forward", "train_forward", "train_backward", "decode", "kept_bytes", "train_bytes", "forward_bytes")
    names = {f"{SHAPE}/t{tp}/{name}" for tp in (1, 2) for name in passes}
    names |= {f"{kind.value}/2" for kind in CollectiveKind} | {f"interface/{name}" for name in ALGORITHMS}
    assert set(profile.fits) - {"tp_collectives/2"} == names | {
        f"{SHAPE}/optimizer",
        "send",
        "exchange",
        "host_copy",
        "call",
    }
    for fit in profile.fits.values():
        assert all(math.isfinite(c) and c >= 0 for c in fit.coefficients.values()) and fit.points
        assert any(fit.coefficients.values())
    speed, work = ProfiledSpeed(profile), Work.of([8, 8, 8, 8])
    for tp in (1, 2):
        part = StageShard(MODEL, tp, 4, True, True, False)
        assert speed.forward(part, work, range(tp)) > 0 and min(speed.train(part, work, range(tp))) > 0
        assert speed.decode(part, 4, 10.0, range(tp)) > 0 and speed.train_bytes(part, work)[0] > 0
    assert speed.exchange(Traffic(node=1000, n_parts=2, copied=1000)) > 0 and speed.call > 0
    assert update_profile(tmp_path / "p.json", profile, "out") == profile == read_profile(tmp_path / "p.json", "out")


@pytest.mark.slow
@pytest.mark.dist
def test_failure_of_a_worker_is_reported() -> None:
    broken = ModelConfig("llama", 4, 33, 4, 2, 9, 64, 64, 100)  # rotary embedding needs an even head size
    with pytest.raises(RunFailed, match="worker 0 of 1 failed: Traceback"):
        take_profile(ProfileJob("cpu", 1, 1, False, (broken,), 1.0, ALGORITHMS), lambda text: None)


def test_numbers_of_workers() -> None:
    assert [numbers_of_workers(n) for n in (1, 2, 3, 4, 6)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 6)]
