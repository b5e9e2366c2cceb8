"""Overrides and files are parsed into an experiment, or all their problems are listed."""

import tempfile
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from realhf.api.config import Device, ExperimentConfig, LRSchedule, Mode, OnBadRow, ValueNormType
from realhf.apps.prepare.option_help import options_of
from realhf.apps.prepare.options import RENAMED_OPTIONS, load_experiment, save_experiment, updated
from realhf.base.errors import UserError
from realhf.experiments import EXPERIMENTS, experiment_class
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.experiments.vineppo import VinePPOExperiment
from realhf.system.checkpoint.manifest import flat_options
from tests.scaling import examples


def build(*words: str, file: Path | None = None) -> PPOExperiment:
    built = updated(PPOExperiment(), words, str(file) if file else None)
    assert isinstance(built, PPOExperiment)
    return built


def problems(*words: str, file: Path | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        build(*words, file=file)
    return caught.value.problems


def write(folder: Path, text: str) -> Path:
    (folder / "c.yaml").write_text(text)
    return folder / "c.yaml"


def test_defaults_without_overrides() -> None:
    assert build() == PPOExperiment()


def test_overrides_of_every_type() -> None:
    config = build(
        "seed=7",
        "actor.optimizer.lr=1e-3",
        "critic.optimizer.lr=2",
        "ppo.adv_norm=false",
        "ppo.early_stop_imp_ratio=null",
        "ppo.generation_size=4",
        "mode=inline",
        "device=cpu",
        "dataset.on_bad_row=skip",
        "actor.optimizer.lr_scheduler_type=linear",
        "ppo.value_norm_type=ma",
        "save_roles=[actor,critic]",
        "ppo.gen.stop_token_ids=[1,2]",
        "dataset.path=a/b-c.jsonl",
        "actor_gen.device_mesh='node01:0-3'",
        "experiment_name=007",
    )
    assert (config.seed, config.actor.optimizer.lr, config.ppo.adv_norm) == (7, 1e-3, False)
    assert isinstance(config.critic.optimizer.lr, float) and config.critic.optimizer.lr == 2.0
    assert config.ppo.early_stop_imp_ratio is None and config.ppo.generation_size == 4
    assert (config.mode, config.device, config.dataset.on_bad_row) == (Mode.inline, Device.cpu, OnBadRow.skip)
    assert config.actor.optimizer.lr_scheduler_type is LRSchedule.linear
    assert config.ppo.value_norm_type is ValueNormType.ma
    assert config.save_roles == ["actor", "critic"] and config.ppo.gen.stop_token_ids == [1, 2]
    assert config.dataset.path == "a/b-c.jsonl" and config.experiment_name == "007"
    assert config.actor_gen.device_mesh == "node01:0-3"


@pytest.mark.parametrize("text", ["actor_gen:d2,*:d1", "d2t1p1", "heuristic"])
def test_allocation_modes_need_no_quotes(text: str) -> None:
    assert build(f"allocation_mode={text}").allocation_mode == text


def test_the_last_override_wins_and_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 3\nppo:\n  kl_ctl: 0.5\n  gen: {max_new_tokens: 9}\nsave_roles: [actor]\n")
    config = build("seed=4", "seed=5", file=file)
    assert (config.seed, config.ppo.kl_ctl, config.ppo.gen.max_new_tokens) == (5, 0.5, 9)
    assert config.save_roles == ["actor"] and config.ppo.eps_clip == PPOExperiment().ppo.eps_clip
    assert build(file=write(tmp_path, "")) == PPOExperiment()


@pytest.mark.parametrize(
    ("word", "start"),
    [
        ("ppo.kl_ctrl=1", "unknown option ppo.kl_ctrl  did you mean ppo.kl_ctl ?"),
        ("kl_ctl=1", "unknown option kl_ctl  did you mean ppo.kl_ctl ?"),
        ("zzz=1", "unknown option zzz"),
        ("ppo=1", "ppo is a group of options; set one of them, like ppo.gen.n=..."),
        ("actor.optimizer=adam", "actor.optimizer is a group of options; set one of them, like actor.optimizer.type="),
        ("ppo.kl_ctl.x=1", "unknown option ppo.kl_ctl.x"),
        ("seed", "'seed' is not of the form key=value"),
        ("sed", "'sed' is not of the form key=value  did you mean seed ?"),
        ("seed=one", "seed=one: "),
        ("seed=1.5", "seed=1.5: "),
        ("seed=null", "seed=None: "),
        ("ppo.adv_norm=maybe", "ppo.adv_norm=maybe: "),
        ("mode=cloud", "mode=cloud: "),
        ("device=tpu", "device=tpu: "),
        ("ppo.gen.stop_token_ids=[a]", "ppo.gen.stop_token_ids="),
        ("seed=[1]", "seed=[1]: "),
        ("dataset.path='a", "'dataset.path='a' cannot be parsed: "),
        ("~seed=1", "'~seed=1': options cannot be added, deleted or moved"),
        ("trial_name=${missing}", "trial_name=${missing}: "),
    ],
)
def test_an_invalid_override_gives_one_line(word: str, start: str) -> None:
    (problem,) = problems(word)
    assert problem.startswith(start) and "\n" not in problem


def test_all_problems_are_listed_with_the_file_they_come_from(tmp_path: Path) -> None:
    file = write(tmp_path, "sed: 3\nppo: 4\nactor: {optimizer: {lr: fast}}\n")
    lines = problems("seed=x", "seed=1", "nope", file=file)
    assert len(lines) == 5
    assert lines[0] == f"unknown option sed  did you mean seed ? ({file})"
    assert all(line.endswith(f"({file})") for line in lines[:3])
    assert lines[2].startswith("actor.optimizer.lr=fast: ")


@pytest.mark.parametrize(
    ("cls", "old", "new"),
    [
        (PPOExperiment, "ppo.loss_mean", "ppo.loss_aggregation"),
        (PPOExperiment, "ppo.kl_loss_mean", "ppo.kl_loss_aggregation"),
        (PPOExperiment, "ppo.dense.alpha", "ppo.prm.alpha"),
        (PPOExperiment, "ppo.dense.splitter", "ppo.prm.step_splitter"),
        (PPOExperiment, "score.splitter", "score.step_splitter"),
        (VinePPOExperiment, "vine.splitter", "vine.step_splitter"),
        (PPOExperiment, "ppo.gen.max_slots", "ppo.gen.max_num_seqs"),
        (PPOExperiment, "vllm.slots", "vllm.max_num_seqs"),
        (PPOExperiment, "mismatch_limit", "logprob_diff_warning"),
        (PPOExperiment, "ppo.behaviour_cap", "ppo.is_weight_cap"),
        (PPOExperiment, "ppo.max_redraws", "ppo.max_resamples"),
        (PPOExperiment, "dataset.eval_share", "dataset.eval_fraction"),
        (PPOExperiment, "dataset.max_replies", "dataset.max_responses"),
        (PPOMathExperiment, "reward.in_flight", "reward.max_concurrency"),
        (PPOExperiment, "recover_deaths", "max_device_failures"),
    ],
)
def test_an_old_option_name_is_answered_with_the_new_one(cls: type[ExperimentConfig], old: str, new: str) -> None:
    with pytest.raises(UserError) as caught:
        updated(cls(), [f"{old}=1"], None)
    assert caught.value.problems == [f"unknown option {old}: renamed to {new}"]


def test_an_old_option_name_without_its_group_is_answered_with_the_closest_new_one() -> None:
    assert problems("loss_mean=seq_mean") == ["unknown option loss_mean  did you mean ppo.loss_aggregation ?"]


def test_the_table_of_renamed_options_has_no_current_names() -> None:
    current = {part for name in EXPERIMENTS for o in options_of(experiment_class(name)) for part in o.key.split(".")}
    assert not current & set(RENAMED_OPTIONS) and current >= {
        part for new in RENAMED_OPTIONS.values() for part in new.split(".")
    }


@pytest.mark.parametrize(
    ("word", "new"),
    [
        ("ppo.advantage=given", "precomputed"),
        ("ppo.advantage=baseline", "greedy_baseline"),
        ("actor.optimizer.type=empty", "none"),
    ],
)
def test_an_old_option_value_is_answered_with_the_new_one(word: str, new: str) -> None:
    assert problems(word) == [f"{word}: renamed to {new}"]
    build(f"{word.partition('=')[0]}={new}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert problems(file=tmp_path / "none.yaml") == [f"{tmp_path}/none.yaml: there is no such file"]
    assert "invalid YAML" in problems(file=write(tmp_path, "a: [1"))[0]
    assert "expected a mapping" in problems(file=write(tmp_path, "- 1\n- 2\n"))[0]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_survives_a_round_trip_through_its_config_file(name: str, tmp_path: Path) -> None:
    cls = experiment_class(name)
    overrides = ["seed=5", "mode=inline", "save_roles=[x]", "exp_ctrl.total_train_steps=3", "dataset.path=a,b.jsonl",
                 "dataset.prompt_template='Q: {prompt}\nA:'"]  # fmt: skip
    config = updated(cls(), overrides, None)
    assert config.dataset.prompt_template == "Q: {prompt}\nA:" and config.dataset.path == "a,b.jsonl"
    save_experiment(config, tmp_path / "config.yaml")
    loaded = load_experiment(cls, tmp_path / "config.yaml")
    assert loaded == config and type(loaded) is cls


def leaves(config: object, prefix: str = "") -> list[str]:
    keys = []
    for field in fields(config):
        value = getattr(config, field.name)
        keys += leaves(value, f"{prefix}{field.name}.") if is_dataclass(value) else [prefix + field.name]
    return keys


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_option_has_a_help_text(name: str) -> None:
    cls = experiment_class(name)
    options = list(options_of(cls))
    assert [o.key for o in options] == [key for key in leaves(cls()) if key not in ("interpolations", "snapshots")]
    assert all(o.help and o.type for o in options) and issubclass(cls, ExperimentConfig)


def test_help_shows_choices_types_and_defaults() -> None:
    listed = {o.key: (o.type, o.default) for o in options_of(PPOMathExperiment)}
    assert listed["device"] == ("auto|cpu|cuda", "auto")
    assert listed["ppo.generation_size"] == ("int", "None") and listed["seed"] == ("int", "1")
    assert listed["reward.fn"] == ("str", "math") and listed["save_roles"] == ("list[str]", "[]")


@pytest.mark.parametrize("key", ["wandb.entity", "experiment_name", "seed", "device", "ppo.kl_ctl", "save_roles"])
def test_environment_variables_are_stored_unresolved(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"seed": "77", "device": "cuda", "ppo.kl_ctl": "0.77"}.get(key, "s3cret")
    monkeypatch.setenv("VALUE", value)
    word = "[${oc.env:VALUE}]" if key == "save_roles" else "${oc.env:VALUE}"
    config = replace(build(f"{key}={word}"), trial_name="x")
    save_experiment(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "${oc.env:VALUE}" in text and value not in text
    loaded = load_experiment(PPOExperiment, tmp_path / "config.yaml")
    assert loaded == config and flat_options(loaded) == flat_options(config)
    assert "s3cret" not in str(flat_options(config))
    monkeypatch.setenv("VALUE", {"seed": "78", "device": "cpu", "ppo.kl_ctl": "0.78"}.get(key, "other"))
    changed = load_experiment(PPOExperiment, tmp_path / "config.yaml")
    assert changed != config and flat_options(changed)[key] != flat_options(config)[key], "the digest shows the change"
    monkeypatch.delenv("VALUE")
    with pytest.raises(UserError, match="Environment variable 'VALUE' not found"):
        load_experiment(PPOExperiment, tmp_path / "config.yaml")


def test_a_replaced_value_is_stored_instead_of_its_interpolation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEED", "7")
    config = replace(build("seed=${oc.env:SEED}"), seed=9)
    save_experiment(config, tmp_path / "config.yaml")
    assert load_experiment(PPOExperiment, tmp_path / "config.yaml").seed == 9


def test_existing_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", "data")
    for name in ("data/rows.jsonl", "r.py", "data/machine.yaml", "tiny/config.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("")
    Path("math").mkdir()
    words = ["dataset.path=${oc.env:DATA}/rows.jsonl", "actor.path=tiny", "actor.config=tiny/config.json",
             "ref.tokenizer=tiny", "ensemble.members=[tiny,none]", "planner.hardware=data/machine.yaml",
             "reward.fns=[math,r.py:f,format:a]", "rew.path=missing"]  # fmt: skip
    config = updated(PPOMathExperiment(), words, None)
    save_experiment(config, tmp_path / "config.yaml")
    monkeypatch.chdir("/")
    monkeypatch.setenv("DATA", f"{tmp_path}/data")
    assert f"{tmp_path}/${{oc.env:DATA}}/rows.jsonl" in (tmp_path / "config.yaml").read_text()
    monkeypatch.setenv("DATA", "data")
    loaded = load_experiment(PPOMathExperiment, tmp_path / "config.yaml")
    assert loaded == config and loaded.dataset.path == f"{tmp_path}/data/rows.jsonl"
    assert (loaded.actor.path, loaded.actor.config) == (f"{tmp_path}/tiny", f"{tmp_path}/tiny/config.json")
    assert loaded.ensemble.members == [f"{tmp_path}/tiny", "none"] and loaded.rew.path == "missing"
    assert loaded.reward.fns == ["math", f"{tmp_path}/r.py:f", "format:a"]
    assert loaded.planner.hardware == f"{tmp_path}/data/machine.yaml" and loaded.ref.tokenizer == f"{tmp_path}/tiny"


KEYS = ["seed", "dataset.path", "actor.optimizer.lr", "mode", "ppo", "devices", "wandb.entity", "nope", ""]
WORDS = ["=", "+", "~", "'", '"', ",", "[", "]", "{", "}", "${", "\\", ":", "@", "1", "-", "nan", "null", "???",
         "\udcff", "choice(1,2)", "range(1,3)", "glob(*)", "oc.env:", "\u00e9"]  # fmt: skip
PIECES = [*WORDS, *KEYS, " ", "\n", "\t", "9" * 400]


YAML_PIECES = [*PIECES, "seed: 1\n", "ppo:\n", "  kl_ctl: ", "- ", "? ", "&a ", "*a", "!!python/name:x", "a: b: c"]


@settings(max_examples=examples(12))
@example("dataset.path", "9" * 400, "")  # longer than a file name may be
@given(
    st.sampled_from(KEYS), st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.sampled_from(["", "+", "~"])
)
def test_any_word_is_accepted_or_refused_with_one_line(key: str, rest: str, prefix: str) -> None:
    for word in (f"{prefix}{key}={rest}", f"{prefix}{key}{rest}"):
        try:
            build(word)
        except UserError as error:
            assert len(error.problems) == 1 and error.problems[0].isprintable(), error.problems


@settings(max_examples=examples(12))
@given(
    st.lists(
        st.sampled_from(
            [*PIECES, "seed: 1\n", "ppo:\n", "  kl_ctl: ", "- ", "? ", "&a ", "*a", "!!python/name:x", "a: b: c"]
        ),
        max_size=7,
    ).map("".join)
)
def test_any_file_is_accepted_or_refused_with_one_line_per_problem(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        try:
            build(file=file)
        except UserError as error:
            assert error.problems and all(line.isprintable() for line in error.problems), error.problems
