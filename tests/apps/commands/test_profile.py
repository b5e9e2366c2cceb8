"""``realhf profile`` reports all problems before measuring, and updates an existing profile."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.api.codec import from_json
from realhf.api.config import Device
from realhf.apps.commands import profile as command
from realhf.apps.main import run
from realhf.apps.prepare.options import updated
from realhf.apps.profiles.profile_file import update_profile
from realhf.base.errors import UserError
from realhf.plan.machines.profile import Fit, Point, Profile, ProfiledMachine

MACHINE = ProfiledMachine("cpu", "abacus", 2, 1)
FIT = Fit({"call": 1e-3, "row": 0.0}, (Point({"call": 1, "row": 8}, 5e-4, 1e-3, 1.5e-3, 5),))
PROFILE = Profile(MACHINE, 2e8, {"call": FIT, "h8-v9/t1/forward": FIT})
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 48}


def read(*words: str) -> command.ProfileOptions:
    return updated(command.ProfileOptions(), words)


def problems(*words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        command.check(read(*words))
    return caught.value.problems


def test_all_invalid_options_are_reported() -> None:
    found = problems("modell=x", "bf16=perhaps", "here", "device=tpu")
    assert found[::2] == ["unknown option modell  did you mean model ?", "'here' is not of the form key=value"]
    assert found[1].startswith("bf16=perhaps: expected bool") and found[3].startswith(
        "device=tpu: expected auto|cpu|cuda"
    )
    assert problems("n_gpus_per_node=0", "seconds=-1") == [
        "n_gpus_per_node=0: must be >= 1",
        "seconds=-1.0: must be > 0",
    ]


def test_all_unusable_models_and_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    (tmp_path / "notes.json").write_text("[]")
    found = problems(f"model={tmp_path},{tmp_path}/none", f"out={tmp_path}/notes.json", "device=cpu")
    assert len(found) == 3 and "unknown model_type 'lama'" in found[0] and "no model configuration at" in found[1]
    assert "notes.json is not a valid profile" in found[2]
    assert problems(f"out={tmp_path}", "device=cpu") == [f"out={tmp_path} is a folder, not a file"]


def test_options_and_models_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = [f"model={tmp_path},{tmp_path}/config.json", "bf16=true", "threads_per_worker=2", "device=cpu"]
    options = read(*words, f"out={tmp_path}/new/profile.json")
    assert options.bf16 and options.threads_per_worker == 2 and options.device is Device.cpu and options.seconds == 90.0
    device, models, previous = command.check(options)
    assert [m.hidden for m in models] == [32, 32] and previous is None and device == "cpu"


def test_existing_profile_is_read(tmp_path: Path) -> None:
    update_profile(file := tmp_path / "profile.json", PROFILE, "out")
    assert command.check(read(f"out={file}", "device=cpu"))[2] == PROFILE


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["n_nodes=2"], "mode=local runs on this machine only; set n_nodes=1 (got 2), or mode=slurm or mode=ray"),
        (["mode=inline"], "mode=inline: profiles are measured in worker processes; set mode=local"),
        (["mode=ray", "device=auto"], "mode=ray: set device=cuda or device=cpu"),
        (["mode=slurm", "slurm.array_seeds=[1,2]"], "slurm.array_seeds is for training runs; omit it"),
        (["mode=slurm", "slurm.extra=[hold]"], "slurm.extra: 'hold' is not an option of sbatch; write --name=value"),
        (["mode=slurm", "device=auto"], "mode=slurm runs workers on other machines; set device=cuda or device=cpu"),
    ],
)
def test_options_of_launches_are_checked(words: list[str], problem: str, tmp_path: Path) -> None:
    assert problem in problems("device=cpu", f"out={tmp_path}/p.json", *words)


def test_profile_of_another_machine_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    update_profile(file := tmp_path / "profile.json", PROFILE, "out")
    assert run(["profile", f"out={file}", "device=cpu"]) == 2
    assert "is the profile of another machine (abacus (2 cores" in capsys.readouterr().err
    assert from_json(file.read_text(), Profile) == PROFILE


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "model=/nowhere"]) == 2 and "/nowhere" in capsys.readouterr().err
    assert run(["profile", "--help"]) == 0 and "threads_per_worker: int" in capsys.readouterr().out


def test_table_shows_all_fits() -> None:
    table = command.table(replace(PROFILE, fits={**PROFILE.fits, "h8-v9/t1/kept_bytes": FIT}))
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["call", "h8-v9/t1/forward", "h8-v9/t1/kept_bytes"] and columns[1] == ["1"] * 3
    assert columns[2] == ["0.0%"] * 3 and columns[3] == ["200%"] * 3
    assert columns[4] == ["call 1 ms", "call 1 ms", "call 1 mB"]
