"""Assumptions of predictions: response lengths, dataset rows, and the machine."""

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import yaml

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.codec import to_json
from realhf.api.config import Device, ExperimentConfig, GenerationConfig, Mode, ModelSpec
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.experiment import RoleSpec, Task
from realhf.apps.prepare.planning import limits_of, machine_of, plan_for_mode, planner_of, replan, workload_of
from realhf.apps.prepare.preflight import plan_report
from realhf.base.errors import UserError
from realhf.data.encode import EncodedRow, EncodedRows
from realhf.data.order import rows_at
from realhf.experiments.gen import GenerationExperiment
from realhf.launch import cuda
from realhf.plan.compile.heuristic import HEURISTICS
from realhf.plan.cost.speed import CollectiveKind, StageShard, Traffic, Work
from realhf.plan.lengths import default_lengths
from realhf.plan.machines.hardware import FOLDER, read_hardware
from realhf.plan.machines.mixed_speed import MixedSpeed
from realhf.plan.machines.processor import cores, processor_name, torch_version
from realhf.plan.machines.profile import (
    Fit,
    Profile,
    ProfiledMachine,
    ProfiledSpeed,
    decode_counts,
    message_counts,
    pass_counts,
    shape_of,
    traffic_counts,
)
from realhf.plan.machines.roofline import AnalyticMemory, Roofline
from tests.plan.search.planners import LLAMA, WIDE, layout, ppo_planner

ROLES = {"model": RoleSpec(ModelSpec())}
HERE = ProfiledMachine("cpu", processor_name("cpu"), len(cores()), 1, torch_version())
MODELS = {"model": LLAMA}


def data(prompts: tuple[int, ...], answers: tuple[int, ...] = ()) -> EncodedRows:
    """One row per prompt length, each with all the answers."""
    empty = np.zeros(0, np.uint8)
    parts = tuple(np.zeros(n, np.int32) for n in answers)
    return EncodedRows([EncodedRow(np.zeros(n, np.int32), parts, empty) for n in prompts], [])


def config_with(**options: object) -> ExperimentConfig:
    config = ExperimentConfig(device=Device.cpu)
    config.dataset.train_bs_n_seqs, config.dataset.max_prompt_len, config.dataset.max_seqlen = 2, 40, 90
    for key, value in options.items():
        setattr(config.planner, key, value)
    return config


SAMPLING = GenerationConfig(max_new_tokens=24)


def test_prompts_are_in_the_order_of_the_run() -> None:
    lengths, config = tuple(range(5, 25)), config_with()
    workload = workload_of(config, Task.math, data(lengths), SAMPLING, 3)
    order = rows_at(config.seed, 20, 0, 6, config.dataset.shuffle)
    assert workload.prompts == tuple((lengths[i],) for i in order) and len(workload.prompts) == 6  # three steps
    assert workload.response_lengths == (24,) and workload.samples == 3
    assert workload.dataset_rows(1) == ((RowId(1, PROMPT), lengths[order[1]]),)
    assert workload.sampled_rows(1) == tuple((RowId(1, sample), lengths[order[1]] + 24) for sample in range(3))
    config.dataset.train_bs_n_seqs = 16
    short = workload_of(config, Task.math, data(lengths), SAMPLING, 2, default_lengths(6, 24))
    assert mean(short.response_lengths) == pytest.approx(6, abs=0.5) and max(short.response_lengths) <= 24
    assert len(short.response_lengths) == 32  # of one step
    assert short.description == ("15 tokens per prompt on average; lognormal(6.076,0.7), limit 24: mean 6 tokens per "
                                 "response, median 5, 99 % up to 21, longest 21")  # fmt: skip


def test_expected_lengths_are_those_of_the_options(generation: GenerationExperiment) -> None:
    generation.sampling.max_new_tokens, generation.dataset.train_bs_n_seqs = 400, 8
    report = plan_report("gen", generation)
    assert report.planner.calls.cost.workload.response_lengths == (400,)
    slow = report.prediction.seconds
    generation.planner.lengths = "uniform(100,300)"
    report = plan_report("gen", generation)
    workload = report.planner.calls.cost.workload
    assert sorted(workload.response_lengths) == [112, 138, 162, 188, 212, 238, 262, 288]
    assert "uniform(100,300), limit 400: mean 200 tokens" in workload.description
    assert report.prediction.seconds < slow
    generation.planner.lengths = ""
    generation.planner.new_tokens = 200
    workload = plan_report("gen", generation).planner.calls.cost.workload
    assert mean(workload.response_lengths) == pytest.approx(200, abs=1) and max(workload.response_lengths) > 350
    generation.planner.lengths = "uniform(100"
    with pytest.raises(UserError, match="planner.lengths=uniform.100 and planner.new_tokens are both set"):
        plan_report("gen", generation)


def test_without_data_rows_have_the_maximum_length() -> None:
    assert workload_of(config_with(), Task.prompt, None, SAMPLING, 1).prompts == ((40,),)
    workload = workload_of(config_with(), Task.sft, None, None, 1)
    assert workload.prompts == ((90,),) and not workload.is_generated


def test_lengths_of_supervised_rows_include_prompt_and_answer() -> None:
    assert set(workload_of(config_with(), Task.sft, data((5, 5), (7,)), None, 1).prompts) == {(12,)}
    pairs = workload_of(config_with(), Task.pairs, data((5, 5), (7, 1, 2, 3, 9, 9)), None, 1)
    assert set(pairs.prompts) == {(12, 6, 7, 8)}  # two pairs of three


def test_workers_on_cpu_share_the_memory_and_the_cores_of_the_machine(tmp_path: Path) -> None:
    config = config_with()
    config.fileroot, config.n_gpus_per_node, config.threads_per_worker = str(tmp_path), 4, 1
    machine = machine_of(config, "cpu", MODELS, ROLES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.hardware.memory == memory / 4 and machine.hardware.node_size == 4
    assert machine.hardware.cores == os.cpu_count() and machine.source == "the limits of cpu"
    assert machine.speed == Roofline(machine.hardware) and machine.footprint == AnalyticMemory("cpu")
    config.planner.memory_gb = 6.5
    assert machine_of(config, "cpu", MODELS, ROLES).hardware.memory == 6.5e9
    config.planner.hardware = "a100"
    a100 = machine_of(config, "cuda", MODELS, ROLES)
    assert (a100.source, a100.hardware.cores, a100.hardware.memory) == ("the limits of a100", 0, 6.5e9)
    config.planner.hardware, config.planner.memory_gb = "", None
    assert machine_of(config, "cuda", MODELS, ROLES).hardware.name == "h100"
    config.planner.memory_gb = 0.2
    with pytest.raises(UserError, match="has 0.2 GB and needs 0.35 GB without any model"):
        machine_of(config, "cpu", MODELS, ROLES)


def profile_of(device: str = "cpu", bf16: bool = False) -> Profile:
    """A profile of one model on one worker with made-up coefficients."""
    part = StageShard(LLAMA, 1, 4, first=True, last=True, bf16=bf16)
    counts = dict.fromkeys(pass_counts(part, Work.of([1])), 1e-6)
    shape = shape_of(LLAMA, bf16)
    fits = {f"{shape}/t1/{op}": Fit(counts, ()) for op in ("forward", "train_forward", "train_backward")}
    fits |= {f"{shape}/t1/{op}": Fit(dict.fromkeys(counts, 1.0), ()) for op in ("forward_bytes",)}
    fits[f"{shape}/t1/decode"] = Fit(dict.fromkeys(decode_counts(part, 1, 1), 1e-6), ())
    fits["send"] = Fit(dict.fromkeys(message_counts(1.0), 1e-9), ())
    fits["exchange"] = Fit(dict.fromkeys(("exchange", "part", "copied byte"), 1e-9), ())  # nothing is sent
    fits["call"] = Fit({"call": 1e-3, "row": 0.0}, ())
    return Profile(replace(HERE, device=device), 4e8, fits)


def test_limits_are_those_of_the_gpu_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv(cuda.VISIBLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    options = config_with(fileroot=str(tmp_path), device=Device.cuda)
    assert limits_of(options, "cuda").source == "the limits of h100"  # this machine has no GPU
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / name).touch()
    driver = tmp_path / "nvidia-smi"
    for line, flops, source in (
        ("NVIDIA A100-SXM4-80GB, 81920", read_hardware("a100").flops, "the limits of a100"),
        ("NVIDIA L4, 23034", read_hardware("h100").flops, "the limits of h100 (NVIDIA L4 with 24.2 GB is not known, "
                                     "h100 is assumed; set planner.hardware=FILE.yaml for its own limits)"),
    ):  # fmt: skip
        driver.write_text(f"#!/bin/sh\necho '{line}'\n")
        driver.chmod(0o755)
        found = limits_of(options, "cuda")
        assert found.source == source and found.hardware.memory == int(line.split()[-1]) * 2.0**20
        assert found.hardware.flops == flops
    options.planner.hardware = "h200"
    assert limits_of(options, "cuda").hardware.memory == 141e9  # given hardware may be another machine
    options.planner.hardware, options.mode = "", Mode.slurm
    assert limits_of(options, "cuda").source == "the limits of h100"  # workers are on other machines


def test_a_profile_is_used_if_it_covers_the_run(tmp_path: Path) -> None:
    config = config_with()
    config.fileroot = str(tmp_path)
    (tmp_path / "profile.json").write_text(to_json(profile_of()))
    machine = machine_of(config, "cpu", MODELS, ROLES)
    assert isinstance(machine.speed, ProfiledSpeed) and machine.footprint == machine.speed
    assert machine.hardware.reserved == 4e8 and machine.source == f"the profile {tmp_path}/profile.json"
    (tmp_path / "other.json").write_text(to_json(profile_of()))
    config.planner.profile = str(tmp_path / "other.json")
    assert machine_of(config, "cpu", MODELS, ROLES).source.endswith("other.json")


@pytest.mark.parametrize(
    ("device", "n_nodes", "bf16", "why"),
    [
        ("cuda", 1, False, "is of a machine with device=cpu"),
        ("cpu", 2, True, "does not include the model of model in bfloat16, only in float32"),
        ("cpu", 1, True, "does not include the model of model in bfloat16, only in float32"),
    ],
)
def test_the_source_states_why_a_profile_is_not_used(
    device: str, n_nodes: int, bf16: bool, why: str, tmp_path: Path
) -> None:
    config = config_with()
    config.fileroot, config.n_nodes = str(tmp_path), n_nodes
    (tmp_path / "profile.json").write_text(to_json(profile_of()))
    machine = machine_of(config, device, MODELS, {"model": RoleSpec(ModelSpec(bf16=bf16))})
    assert isinstance(machine.speed, Roofline)
    assert machine.source.endswith(f"(the profile {tmp_path}/profile.json {why})")
    config.planner.hardware = "cpu"
    assert machine_of(config, device, MODELS, ROLES).source == "the limits of cpu"


def test_invalid_profiles_are_errors(tmp_path: Path) -> None:
    config = config_with(profile=str(tmp_path / "p.json"))
    with pytest.raises(UserError, match="p.json: there is no such file; make it with realhf profile"):
        machine_of(config, "cpu", MODELS, ROLES)
    for text in ("{", "[]", "{}", '{"machine": 3}', json.dumps({**json.loads(to_json(profile_of())), "more": 1})):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(UserError, match="p.json is not a valid profile"):
            machine_of(config, "cpu", MODELS, ROLES)


@pytest.mark.parametrize(
    "other",
    [{"processor": "slide rule"}, {"cores": HERE.cores + 2}, {"torch": "1.0.0"}],
    ids=["processor", "cores", "torch"],
)
def test_a_profile_of_another_machine_is_not_used(other: dict[str, Any], tmp_path: Path) -> None:
    config = config_with(profile=str(tmp_path / "p.json"))
    profile = profile_of()
    machine = replace(HERE, **other)
    (tmp_path / "p.json").write_text(to_json(replace(profile, machine=machine)))
    found = machine_of(config, "cpu", MODELS, ROLES)
    assert isinstance(found.speed, Roofline) and not found.is_measured
    assert found.source == f"the limits of cpu (the profile {tmp_path}/p.json is of {machine}, this machine is {HERE})"
    config.n_nodes, config.mode = 2, Mode.slurm  # the machine of other nodes is unknown
    assert machine_of(config, "cpu", MODELS, ROLES).is_measured


def test_a_profile_of_an_earlier_version_is_used(tmp_path: Path) -> None:
    """It has no version of torch."""
    plain = json.loads(to_json(profile_of()))
    del plain["machine"]["torch"]
    (tmp_path / "profile.json").write_text(json.dumps(plain))
    config = config_with(profile=str(tmp_path / "profile.json"))
    assert machine_of(config, "cpu", MODELS, ROLES).source == f"the profile {tmp_path}/profile.json"


def test_parts_that_are_not_measured_are_from_a_file(tmp_path: Path) -> None:
    """Links between nodes, then those within a node; the file may be a user's."""
    (tmp_path / "p.json").write_text(to_json(profile_of()))
    config = config_with(profile=str(tmp_path / "p.json"))
    config.n_nodes = 2
    machine = machine_of(config, "cpu", MODELS, ROLES)
    assert machine.is_measured and isinstance(machine.speed, MixedSpeed) and machine.footprint is machine.speed
    assert machine.source == f"the profile {tmp_path}/p.json of {HERE}, with links between nodes from cpu"
    assert machine.speed.send(10**6, 0, 1) == Roofline(machine.hardware).send(10**6, 0, 1)
    fast = yaml.safe_load((FOLDER / "a100.yaml").read_text()) | {"name": "mine", "cluster": {"bandwidth": 1e12}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fast))
    config.planner.hardware, config.n_gpus_per_node = str(tmp_path / "mine.yaml"), 2
    machine = machine_of(config, "cpu", MODELS, ROLES)
    assert machine.source.endswith(", with links within a node from mine, links between nodes from mine, "
                                   "tensor-parallel size 2 from size 1 and the limits of mine")  # fmt: skip
    assert machine.speed.send(10**6, 0, 2) == 1e-6
    assert machine.hardware.reserved == 4e8 and machine.hardware.name == "mine"


def test_links_between_nodes_are_measured_if_the_profile_has_them(tmp_path: Path) -> None:
    profile, message = profile_of(), Fit(dict.fromkeys(message_counts(1.0), 1e-6), ())
    fits = {f"cluster_{kind.value}/2x1": message for kind in CollectiveKind} | {"cluster_send": message}
    (tmp_path / "p.json").write_text(to_json(replace(profile, fits=profile.fits | fits)))
    config = config_with(profile=str(tmp_path / "p.json"))
    config.n_nodes = 3
    machine = machine_of(config, "cpu", MODELS, ROLES)
    assert machine.source == f"the profile {tmp_path}/p.json of {HERE}, with links between nodes measured on 2 nodes"
    assert machine.speed.send(1000, 0, 1) == message(message_counts(1000))
    file = Roofline(machine.hardware)
    ratio = file.collective(CollectiveKind.ALL_REDUCE, 8, (0, 1, 2)) / file.collective(
        CollectiveKind.ALL_REDUCE, 8, (0, 1)
    )
    measured = message(message_counts(8))
    assert machine.speed.collective(CollectiveKind.ALL_REDUCE, 8, (0, 1, 2)) == pytest.approx(ratio * measured)


@pytest.fixture
def generation(tmp_path: Path) -> GenerationExperiment:
    """An experiment with one call, and a profile of its model."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 120, "max_position_embeddings": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (tmp_path / "profile.json").write_text(to_json(profile_of()))
    made = GenerationExperiment(fileroot=str(tmp_path), device=Device.cpu)
    made.model = ModelSpec(path=str(tmp_path))
    made.n_gpus_per_node, made.dataset.train_bs_n_seqs, made.allocation_mode = 2, 4, "d2"
    return made


def test_a_plan_covered_by_the_profile_is_predicted_from_it(generation: GenerationExperiment) -> None:
    assert plan_report("gen", generation).machine.source.startswith("the profile ")
    generation.allocation_mode = "search"
    report = plan_report("gen", generation)
    assert report.machine.source.startswith("the profile ") and report.plan["gen"].layout.strategy.tp == 1


@pytest.mark.parametrize("mode", ["d1", "search"])
def test_a_profile_of_one_worker_predicts_plans_of_one(generation: GenerationExperiment, mode: str) -> None:
    generation.n_gpus_per_node, generation.allocation_mode = 1, mode
    report = plan_report("gen", generation)
    assert report.machine.source == f"the profile {generation.fileroot}/profile.json"
    assert report.plan.n_workers == 1 and report.prediction.seconds > 0


@pytest.mark.parametrize("mode", ["t2", "p2", "d2"])
def test_a_profile_of_one_worker_predicts_parallel_plans(generation: GenerationExperiment, mode: str) -> None:
    generation.allocation_mode = mode
    report = plan_report("gen", generation)
    assert report.machine.source.endswith(", with links within a node from cpu, tensor-parallel size 2 from size 1 and "
                                          "the limits of cpu")  # fmt: skip
    assert report.machine.is_measured and report.prediction.seconds > 0


def test_a_plan_across_nodes_is_predicted_from_the_profile_of_one(generation: GenerationExperiment) -> None:
    generation.n_nodes, generation.mode, generation.allocation_mode = 2, Mode.slurm, "search"
    report = plan_report("gen", generation)
    assert report.machine.source.startswith("the profile ") and report.plan.n_workers == 4
    assert "links between nodes from cpu" in report.machine.source and report.prediction.seconds > 0


def test_a_plan_not_covered_by_the_profile_is_predicted_from_limits(generation: GenerationExperiment) -> None:
    """The profile has the degree of two workers, but not its decoding."""
    path, shape = Path(generation.fileroot) / "profile.json", shape_of(LLAMA, False)
    profile, message = profile_of(), Fit(dict.fromkeys(message_counts(1.0), 1e-9), ())
    shards = {name.replace("/t1/", "/t2/"): fit for name, fit in profile.fits.items() if name.endswith("forward")}
    assert f"{shape}/t2/forward" in shards
    sent = Fit(dict.fromkeys(traffic_counts(Traffic(node=1)), 1e-9), ())
    others = {"all_reduce/2": message, "exchange": sent}
    path.write_text(to_json(replace(profile, fits=profile.fits | shards | others)))
    generation.allocation_mode = "t2"
    report = plan_report("gen", generation)
    assert report.machine.source.startswith("the limits of cpu (the profile has no measurements of ")
    assert "realhf profile" in report.machine.source and report.prediction.seconds > 0
    assert str(report.plan["gen"].layout.strategy) == "d1t2p1"


def test_planner_of_an_experiment(generation: GenerationExperiment) -> None:
    generation.gen.mb_spec.max_tokens_per_mb, generation.sampling.n = 777, 3
    report = plan_report("gen", generation)
    planner = planner_of(generation, generation.graph(), {"model": LLAMA}, None, report.machine, "cpu")
    assert planner.calls.limits == {"gen": MicroBatching(1, 777)} and planner.n_workers == 2
    assert planner.calls.cost.workload.samples == 3 and planner.calls.batch_size == 4
    assert planner.calls.cost.pads_cache
    on_gpus = planner_of(generation, generation.graph(), {"model": LLAMA}, None, report.machine, "cuda")
    assert not on_gpus.calls.cost.pads_cache
    assert report.n_rows == 0 and report.n_rows_text == "maximum-length sequences"


def test_allocation_modes_of_the_planner() -> None:
    planner, config = ppo_planner(4, actor=WIDE), config_with()
    for mode, rule in (("heuristic", "symmetric"), *((rule, rule) for rule in HEURISTICS)):
        config.allocation_mode = mode
        assert (
            plan_for_mode(planner, config, planner.by_heuristic("split"))[0]
            == planner.by_heuristic(rule)
            == replan(planner, mode, planner.by_heuristic("split"))
        )
    config.allocation_mode = "search"
    assert plan_for_mode(planner, config, planner.by_heuristic("split"))[0] == planner.search(config.seed).plan
    assert planner.fits(replan(planner, "search", planner.by_heuristic("split")))


def test_a_fixed_plan_keeps_its_layouts_with_other_micro_batching() -> None:
    planner = ppo_planner(4)
    plan = ExecutionPlan(4, {name: Placement(layout("t4")) for name in planner.calls.limits})
    limits = {name: MicroBatching(2, 99) for name in planner.calls.limits}
    finer = replace(planner, calls=replace(planner.calls, limits=limits))
    assert set(replan(finer, "t4", plan).placements.values()) == {Placement(layout("t4"), MicroBatching(2, 99))}
