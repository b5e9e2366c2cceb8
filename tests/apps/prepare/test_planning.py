"""What predictions assume: how long answers are, what rows look like, and which machine it is."""

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.codec import to_json
from realhf.api.config import Device, ExperimentConfig, GenerationConfig, ModelSpec
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.experiment import RoleSpec, Task
from realhf.apps.prepare.planning import answer_lengths, machine_of, planned, planner_of, replanned, workload_of
from realhf.apps.prepare.preflight import survey
from realhf.base.errors import UserError
from realhf.data.encode import EncodedRow, EncodedRows
from realhf.data.order import rows_at
from realhf.experiments.gen import GenerationExperiment
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.cost.activation_memory import AnalyticMemory
from realhf.plan.cost.profile import (
    Fit,
    Profile,
    ProfiledMachine,
    ProfiledSpeed,
    decode_counts,
    message_counts,
    pass_counts,
    shape_of,
)
from realhf.plan.cost.roofline import Roofline
from realhf.plan.cost.speed import StageShard, Work
from tests.plan.search.planners import LLAMA, WIDE, layout, ppo_planner

ROLES = {"model": RoleSpec(ModelSpec())}
MODELS = {"model": LLAMA}


@settings(max_examples=100, deadline=None)
@given(st.floats(1, 300), st.integers(1, 300))
def test_answers_spread_about_their_mean(average: float, longest: int) -> None:
    found = answer_lengths(average, longest)
    assert min(found) >= 1 and max(found) <= longest
    assert mean(found) == pytest.approx(min(average, longest), abs=0.51)  # they are whole numbers
    if 3 <= average <= longest - 3:
        assert len(set(found)) > 4 and all(a != b for a, b in zip(found, found[1:], strict=False))


def test_without_a_guess_every_answer_is_as_long_as_allowed() -> None:
    assert answer_lengths(None, 64) == answer_lengths(64, 64) == answer_lengths(90.0, 64) == (64,)
    found = answer_lengths(30, 64)
    assert (len(found), min(found), max(found), mean(found)) == (16, 1, 59, 30)


def data(prompts: tuple[int, ...], answers: tuple[int, ...] = ()) -> EncodedRows:
    """A row for each prompt, of so many tokens, each with all the answers."""
    nothing = np.zeros(0, np.uint8)
    parts = tuple(np.zeros(n, np.int32) for n in answers)
    return EncodedRows([EncodedRow(np.zeros(n, np.int32), parts, nothing) for n in prompts], [])


def config_with(**options: object) -> ExperimentConfig:
    config = ExperimentConfig(device=Device.cpu)
    config.dataset.train_bs_n_seqs, config.dataset.max_prompt_len, config.dataset.max_seqlen = 2, 40, 90
    for key, value in options.items():
        setattr(config.planner, key, value)
    return config


SAMPLING = GenerationConfig(max_new_tokens=24)


def test_prompts_are_those_of_the_data_set_in_the_order_of_the_run() -> None:
    lengths, config = tuple(range(5, 25)), config_with()
    found = workload_of(config, Task.math, data(lengths), SAMPLING, 3)
    order = rows_at(config.seed, 20, 0, 6, config.dataset.shuffle)
    assert found.prompts == tuple((lengths[i],) for i in order) and len(found.prompts) == 6  # three steps
    assert found.answers == (24,) and found.samples == 3
    assert found.fetched(1) == ((RowId(1, PROMPT), lengths[order[1]]),)
    assert found.drawn(1) == tuple((RowId(1, sample), lengths[order[1]] + 24) for sample in range(3))
    short = workload_of(config_with(new_tokens=6), Task.math, data(lengths), SAMPLING, 1)
    assert mean(short.answers) == 6 and max(short.answers) <= 24


def test_without_data_rows_are_as_long_as_allowed() -> None:
    assert workload_of(config_with(), Task.prompt, None, SAMPLING, 1).prompts == ((40,),)
    found = workload_of(config_with(), Task.sft, None, None, 1)
    assert found.prompts == ((90,),) and not found.sampled


def test_rows_of_supervised_data_are_prompt_and_answer_together() -> None:
    assert set(workload_of(config_with(), Task.sft, data((5, 5), (7,)), None, 1).prompts) == {(12,)}
    pairs = workload_of(config_with(), Task.pairs, data((5, 5), (7, 1, 2, 3, 9, 9)), None, 1)
    assert set(pairs.prompts) == {(12, 6, 7, 8)}  # two pairs of three


def test_workers_on_cpu_share_the_memory_and_the_cores_of_the_machine(tmp_path: Path) -> None:
    config = config_with()
    config.fileroot, config.n_gpus_per_node, config.threads_per_worker = str(tmp_path), 4, 1
    found = machine_of(config, "cpu", MODELS, ROLES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.hardware.memory == memory / 4 and found.hardware.node_size == 4
    assert found.hardware.cores == os.cpu_count() and found.source == "the limits of cpu"
    assert found.speed == Roofline(found.hardware) and found.footprint == AnalyticMemory("cpu")
    config.planner.memory_gb = 6.5
    assert machine_of(config, "cpu", MODELS, ROLES).hardware.memory == 6.5e9
    config.planner.hardware = "a100"
    a100 = machine_of(config, "cuda", MODELS, ROLES)
    assert (a100.source, a100.hardware.cores, a100.hardware.memory) == ("the limits of a100", 0, 6.5e9)
    config.planner.hardware, config.planner.memory_gb = "", None
    assert machine_of(config, "cuda", MODELS, ROLES).hardware.name == "h100"
    config.planner.memory_gb = 0.2
    with pytest.raises(UserError, match="has 0.2 GB and needs 0.35 GB before it has any model"):
        machine_of(config, "cpu", MODELS, ROLES)


def profile_of(device: str = "cpu", bf16: bool = False) -> Profile:
    """A profile of one model on one worker: each count takes a microsecond, a token a byte."""
    part = StageShard(LLAMA, 1, 4, first=True, last=True, bf16=bf16)
    counts = dict.fromkeys(pass_counts(part, Work.of([1]), 1), 1e-6)
    shape = shape_of(LLAMA, bf16)
    fits = {f"{shape}/t1/{op}": Fit(counts, ()) for op in ("forward", "train_forward", "train_backward")}
    fits |= {f"{shape}/t1/{op}": Fit(dict.fromkeys(counts, 1.0), ()) for op in ("forward_bytes",)}
    fits[f"{shape}/t1/decode"] = Fit(dict.fromkeys(decode_counts(part, 1, 1), 1e-6), ())
    fits["send"] = Fit(dict.fromkeys(message_counts(1.0), 1e-9), ())
    parts = ("exchange", "part", "copied byte", "meeting", "leaving part", "leaving byte")
    fits["exchange"] = Fit(dict.fromkeys(parts, 1e-9), ())
    fits["call"] = Fit({"call": 1e-3, "row": 0.0}, ())
    return Profile(ProfiledMachine(device, "abacus", 2, 1), 4e8, fits)


def test_a_profile_is_used_where_it_knows_everything(tmp_path: Path) -> None:
    config = config_with()
    config.fileroot = str(tmp_path)
    (tmp_path / "profile.json").write_text(to_json(profile_of()))
    found = machine_of(config, "cpu", MODELS, ROLES)
    assert isinstance(found.speed, ProfiledSpeed) and found.footprint == found.speed
    assert found.hardware.reserved == 4e8 and found.source == f"the profile {tmp_path}/profile.json"
    (tmp_path / "other.json").write_text(to_json(profile_of()))
    config.planner.profile = str(tmp_path / "other.json")
    assert machine_of(config, "cpu", MODELS, ROLES).source.endswith("other.json")


@pytest.mark.parametrize(
    ("device", "n_nodes", "bf16", "why"),
    [
        ("cuda", 1, False, "is of a machine with device=cpu"),
        ("cpu", 2, False, "knows no links between nodes"),
        ("cpu", 1, True, "does not know the model of model"),
    ],
)
def test_why_a_profile_is_passed_over_is_said(device: str, n_nodes: int, bf16: bool, why: str, tmp_path: Path) -> None:
    config = config_with()
    config.fileroot, config.n_nodes = str(tmp_path), n_nodes
    (tmp_path / "profile.json").write_text(to_json(profile_of()))
    found = machine_of(config, device, MODELS, {"model": RoleSpec(ModelSpec(bf16=bf16))})
    assert isinstance(found.speed, Roofline) and found.source.endswith(f"(the profile {tmp_path}/profile.json {why})")
    config.planner.hardware = "cpu"
    assert machine_of(config, device, MODELS, ROLES).source == "the limits of cpu"


def test_profiles_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    config = config_with(profile=str(tmp_path / "p.json"))
    with pytest.raises(UserError, match="p.json: there is no such file; make it with realhf profile"):
        machine_of(config, "cpu", MODELS, ROLES)
    for text in ("{", "[]", "{}", '{"machine": 3}', json.dumps({**json.loads(to_json(profile_of())), "more": 1})):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(UserError, match="p.json is no profile"):
            machine_of(config, "cpu", MODELS, ROLES)
    config.planner.hardware = "h100"
    with pytest.raises(UserError, match="are both set"):
        machine_of(config, "cpu", MODELS, ROLES)


@pytest.fixture
def generation(tmp_path: Path) -> GenerationExperiment:
    """An experiment with one call of the model that the profile beside it knows."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 120, "max_position_embeddings": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (tmp_path / "profile.json").write_text(to_json(profile_of()))
    made = GenerationExperiment(fileroot=str(tmp_path), device=Device.cpu)
    made.model = ModelSpec(path=str(tmp_path))
    made.n_gpus_per_node, made.dataset.train_bs_n_seqs, made.allocation_mode = 2, 4, "d2"
    return made


def test_a_plan_of_which_the_profile_knows_all_is_predicted_from_it(generation: GenerationExperiment) -> None:
    assert survey("gen", generation).machine.source.startswith("the profile ")
    generation.allocation_mode = "search"
    found = survey("gen", generation)
    assert found.machine.source.startswith("the profile ") and found.plan["gen"].layout.strategy.tp == 1


def test_a_plan_that_the_profile_does_not_know_is_predicted_from_limits(generation: GenerationExperiment) -> None:
    generation.allocation_mode = "t2"
    found = survey("gen", generation)
    assert found.machine.source.startswith("the limits of cpu (the profile knows nothing of ")
    assert "realhf profile" in found.machine.source and found.prediction.seconds > 0
    assert str(found.plan["gen"].layout.strategy) == "d1t2p1"


def test_the_planner_of_an_experiment(generation: GenerationExperiment) -> None:
    generation.gen.mb_spec.max_tokens_per_mb, generation.sampling.n = 777, 3
    found = survey("gen", generation)
    planner = planner_of(generation, generation.graph(), {"model": LLAMA}, None, found.machine, "cpu")
    assert planner.calls.limits == {"gen": MicroBatching(1, 777)} and planner.n_workers == 2
    assert planner.calls.cost.workload.samples == 3 and planner.calls.batch_size == 4
    assert found.n_rows == 0 and found.n_rows_text == "rows of full length"


def test_modes_of_the_planner() -> None:
    planner, config = ppo_planner(4, actor=WIDE), config_with()
    for mode, rule in (("heuristic", "symmetric"), *((rule, rule) for rule in HEURISTICS)):
        config.allocation_mode = mode
        assert (
            planned(planner, config)
            == planner.by_heuristic(rule)
            == replanned(planner, mode, planner.by_heuristic("split"))
        )
    config.allocation_mode = "search"
    assert planned(planner, config) == planner.search(config.seed).plan
    assert planner.fits(replanned(planner, "search", planner.by_heuristic("split")))


def test_a_fixed_plan_keeps_its_layouts_under_another_micro_batching() -> None:
    planner = ppo_planner(4)
    plan = ExecutionPlan(4, {name: Placement(layout("t4")) for name in planner.calls.limits})
    limits = {name: MicroBatching(2, 99) for name in planner.calls.limits}
    finer = replace(planner, calls=replace(planner.calls, limits=limits))
    assert set(replanned(finer, "t4", plan).placements.values()) == {Placement(layout("t4"), MicroBatching(2, 99))}
