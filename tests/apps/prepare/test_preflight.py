"""Every invalid input gives one line, and all lines are reported together. Needs transformers for the tokenizer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import Backend, DatasetConfig, Device, ExperimentConfig, Mode, ModelSpec
from realhf.api.graph import MFC, Graph
from realhf.apps.prepare.backends import resolve_dtypes
from realhf.apps.prepare.preflight import preflight
from realhf.base.errors import InfeasibleError, UserError
from realhf.base.paths import RunDir
from realhf.experiments.gen import GenerationExperiment
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.experiments.rw import RewardModelExperiment
from realhf.experiments.sft import SFTExperiment
from realhf.plan.machines.hardware import read_hardware
from realhf.plan.run_spec import RunSpec


@pytest.fixture
def paths(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "exp" / "trial")


@pytest.fixture
def sft(task: Any, actor_folder: Path) -> SFTExperiment:
    return ready(SFTExperiment(model=ModelSpec(path=str(actor_folder))), task.sft)


@pytest.fixture
def ppo(task: Any, actor_folder: Path) -> PPOMathExperiment:
    made = ready(PPOMathExperiment(actor=ModelSpec(path=str(actor_folder))), task.train)
    made.ppo = PPOConfig(ppo_n_minibatches=2)
    made.ppo.gen.max_new_tokens = 16
    return made


@pytest.fixture
def copy(actor_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """``copy(name, config=..., without=pattern)``: a copy of the model with another config or without some files."""

    def make(name: str, config: dict | None = None, without: str = "") -> Path:
        folder = tmp_path / name
        shutil.copytree(actor_folder, folder)
        for file in folder.glob(without) if without else ():
            file.unlink()
        if config:
            stored = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**stored, **config}))
        return folder

    return make


def ready(experiment: Any, data: Path) -> Any:
    experiment.experiment_name, experiment.trial_name, experiment.device = "exp", "trial", Device.cpu
    experiment.dataset = DatasetConfig(path=str(data), train_bs_n_seqs=4)
    return experiment


def problems(experiment: Any, paths: RunDir) -> list[str]:
    with pytest.raises(UserError) as caught:
        preflight("x", experiment, paths)
    return caught.value.problems


def one(experiment: Any, paths: RunDir) -> str:
    (problem,) = problems(experiment, paths)
    return problem


def test_preflight_of_a_valid_run_writes_no_files(ppo: PPOMathExperiment, sft: Any, paths: RunDir) -> None:
    run = preflight("ppo-math", ppo, paths)
    assert isinstance(run, RunSpec) and (run.experiment, run.device, run.n_rows) == ("ppo-math", "cpu", 17)
    assert run.schedule.n_steps == 5 and set(run.program) == {m.name for m in run.graph.mfcs}
    assert set(run.models) == {"actor", "ref", "critic"} and run.models["critic"].head == "scalar"
    assert preflight("sft", sft, paths).n_rows == 40 and not paths.root.parent.exists()


def test_expected_times_and_memory_of_a_run(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.planner.hardware = "cpu"
    expected = preflight("ppo-math", ppo, paths).expected
    assert expected is not None and expected.source == "the limits of cpu" and expected.step_s > 0
    assert set(expected.calls) == {m.name for m in ppo.graph().mfcs} and 3.5e8 < expected.peak_bytes < 5e8


def test_a_run_that_does_not_fit_is_an_error_with_a_suggested_fix(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.dataset.train_bs_n_seqs, ppo.ppo.gen.max_new_tokens, ppo.ppo.ppo_n_minibatches = 16, 150, 1
    ppo.allocation_mode, ppo.planner.hardware = "d1", "cpu"
    expected = preflight("ppo-math", ppo, paths).expected
    assert expected is not None
    ppo.planner.memory_gb = (expected.peak_bytes / 1e9 - 1e-4) / (1 - read_hardware("cpu").reserve_fraction)
    with pytest.raises(InfeasibleError) as caught:
        preflight("ppo-math", ppo, paths)
    (problem,) = caught.value.problems
    assert problem.startswith("worker 0 would need 0.") and "runtime 0.35" in problem
    option, _, value = problem.rpartition("it fits with ")[2].partition("=")
    assert option == "actor_train.mb_spec.max_tokens_per_mb"
    ppo.actor_train.mb_spec.max_tokens_per_mb = int(value)
    assert preflight("ppo-math", ppo, paths)
    assert not paths.root.parent.exists()


def test_models_from_scratch_need_no_weights(task: Any, paths: RunDir) -> None:
    spec = ModelSpec(init_from_scratch=True, config=str(task.model), tokenizer=str(task.tokenizer))
    made = ready(SFTExperiment(model=spec), task.sft)
    assert preflight("sft", made, paths).models["model"].n_layers == 2
    made.model = replace(spec, tokenizer=None)
    assert one(made, paths) == "no tokenizer: set model.tokenizer=FOLDER (models from scratch have none)"
    made.model = replace(spec, config=None)
    assert one(made, paths) == "model.init_from_scratch=True needs model.config=FOLDER_OR_JSON"
    made.model = replace(spec, config="nowhere")
    assert one(made, paths).startswith("model: no model configuration at 'nowhere'")


def test_a_missing_shared_model_is_reported_once(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.actor.path = None
    expected = "actor.path is not set (a Hugging Face folder), and actor.init_from_scratch is not True"
    assert one(ppo, paths) == expected
    ppo.actor.path = "no-such"
    assert one(ppo, paths) == "actor.path=no-such: there is no such folder"


def test_missing_independent_models_are_reported_each(task: Any, paths: RunDir) -> None:
    made = ready(PPOExperiment(ref=ModelSpec(path="r"), critic=ModelSpec(path="c")), task.train)
    names = [line.split(" ")[0] for line in problems(made, paths)]
    assert names == ["actor.path", "ref.path=r:", "rew.path", "critic.path=c:"]


def test_a_folder_without_weights(sft: SFTExperiment, copy: Callable[..., Path], paths: RunDir) -> None:
    sft.model.path = str(copy("bare", without="*.safetensors"))
    assert one(sft, paths) == f"model.path={sft.model.path}: the folder has no weights (model.safetensors or " \
                              "model.safetensors.index.json)"  # fmt: skip


def test_an_invalid_or_unknown_model_config(sft: SFTExperiment, copy: Callable[..., Path], paths: RunDir) -> None:
    sft.model.path = str(copy("unknown", config={"model_type": "lama"}))
    assert "model: '" in one(sft, paths) and "did you mean llama" in one(sft, paths)
    (Path(sft.model.path) / "config.json").write_text("{")
    assert "is not valid JSON" in one(sft, paths)


def test_a_folder_without_a_tokenizer(sft: SFTExperiment, copy: Callable[..., Path], paths: RunDir) -> None:
    sft.model.path = str(copy("mute", without="tokenizer*"))
    assert one(sft, paths).startswith(f"{sft.model.path} has no tokenizer: it contains none of tokenizer.json,")
    sft.model.tokenizer = "nowhere"
    assert one(sft, paths) == "tokenizer folder nowhere does not exist; tokenizer= can name another one"


def test_a_small_vocabulary_is_reported_once(ppo: PPOMathExperiment, copy: Callable[..., Path], paths: RunDir) -> None:
    ppo.actor.path = str(copy("small", config={"vocab_size": 5}))
    problem = one(ppo, paths)
    assert problem.startswith("actor, ref, critic: the tokenizer in ") and problem.endswith("vocab_size is 5")


def test_roles_must_share_a_tokenizer(
    ppo: PPOMathExperiment, copy: Callable[..., Path], paths: RunDir, tmp_path: Path
) -> None:
    ppo.ref.path = str(copy("other"))
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(ppo.ref.path)
    assert one(ppo, paths).startswith(f"ref: its tokenizer {ppo.ref.path} differs from ")


def test_a_batch_larger_than_the_dataset(sft: SFTExperiment, paths: RunDir) -> None:
    sft.dataset.train_bs_n_seqs = 41
    assert one(sft, paths) == f"dataset.train_bs_n_seqs=41 is larger than the 40 rows of {sft.dataset.path}"


def test_a_batch_without_rows(sft: SFTExperiment, paths: RunDir) -> None:
    sft.dataset.train_bs_n_seqs = 0
    assert one(sft, paths) == "dataset.train_bs_n_seqs=0: must be >= 1"


def test_rows_longer_than_the_positions_of_the_model(
    ppo: PPOMathExperiment, sft: SFTExperiment, copy: Callable[..., Path], paths: RunDir
) -> None:
    ppo.ppo.gen.max_new_tokens = 500
    assert one(ppo, paths) == (
        "actor, ref, critic: the model has 256 positions, the longest prompt and 500 new tokens need 505; "
        "lower max_new_tokens or dataset.max_prompt_len"
    )
    sft.model.path = str(copy("short", config={"max_position_embeddings": 10}))
    assert one(sft, paths).startswith("model: the model has 10 positions, the longest row needs ")


def test_missing_and_invalid_data(sft: SFTExperiment, paths: RunDir, tmp_path: Path) -> None:
    sft.dataset.path = "none.jsonl"
    assert one(sft, paths) == "dataset.path=none.jsonl: there is no such file"
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=\\n"}\n')
    sft.dataset.path = str(tmp_path / "bad.jsonl")
    assert problems(sft, paths)[0] == f"{tmp_path}/bad.jsonl:1: 'answer' is missing (keys: prompt)"


def test_an_existing_run_directory(sft: SFTExperiment, paths: RunDir) -> None:
    paths.root.mkdir(parents=True)
    assert preflight("sft", sft, paths)  # an empty directory is valid
    (paths.root / "notes.txt").write_text("mine")
    assert one(sft, paths) == f"{paths.root} is not empty and contains no realhf run; choose another trial_name"
    sft.overwrite = True
    assert "contains no realhf run" in one(sft, paths)
    paths.config.write_text("")
    assert preflight("sft", sft, paths)
    sft.overwrite = False
    assert one(sft, paths) == f"{paths.root} already contains a run; choose another trial_name, or set overwrite=True"


def test_a_file_in_place_of_a_parent_directory(sft: SFTExperiment, paths: RunDir) -> None:
    paths.root.parents[1].mkdir()
    paths.root.parent.write_text("a file")
    problem = one(sft, paths)
    assert f"{paths.root.parent} is a file; set fileroot or trial_name" in problem


def test_invalid_experiment_and_trial_names(sft: SFTExperiment, paths: RunDir) -> None:
    sft.trial_name, sft.experiment_name = "a/b", ".."
    assert problems(sft, paths) == [
        "experiment_name='..': use letters, digits, '.', '_' and '-'",
        "trial_name='a/b': use letters, digits, '.', '_' and '-'",
    ]


def test_launch_modes_with_invalid_sizes(sft: SFTExperiment, paths: RunDir) -> None:
    sft.mode, sft.n_gpus_per_node = Mode.inline, 2
    assert one(sft, paths) == "mode=inline runs one worker in this process; set n_nodes=1 n_gpus_per_node=1"
    sft.mode, sft.n_gpus_per_node, sft.n_nodes = Mode.local, 1, 2
    assert one(sft, paths) == "mode=local runs on this machine only; set n_nodes=1 (got 2), or mode=slurm or mode=ray"
    sft.n_nodes, sft.allocation_mode = 1, "serch"
    assert one(sft, paths).startswith("allocation_mode=serch: unknown mode; use heuristic, ")


def test_slurm_requires_an_explicit_device(sft: SFTExperiment, paths: RunDir) -> None:
    sft.mode, sft.device = Mode.slurm, Device.auto
    assert one(sft, paths) == "mode=slurm runs workers on other machines; set device=cuda or device=cpu"
    sft.device = Device.cuda
    assert preflight("sft", sft, paths).device == "cuda"


def test_invalid_layouts_are_listed_with_the_nearest_valid_one(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.n_gpus_per_node, ppo.allocation_mode = 6, "actor_gen:t3,critic_train:d2p3,ref_inf:d7,*:d2t2p2"
    assert problems(ppo, paths) == [
        "actor_gen: d1t3p1: 4 heads (4 KV heads) are not divisible by tensor-parallel size 3; nearest legal: d3t1p1",
        "rew_inf: d2t2p2: its size is 8, that of mesh 0-5 is 6; nearest legal: d3t2p1",
        "ref_inf: d7t1p1: its size is 7, that of mesh 0-5 is 6; nearest legal: d6t1p1",
        "critic_inf: d2t2p2: its size is 8, that of mesh 0-5 is 6; nearest legal: d3t2p1",
        "critic_train: d2t1p3: 2 layers are fewer than 3 pipeline stages; nearest legal: d3t1p2",
        "actor_train: d2t2p2: its size is 8, that of mesh 0-5 is 6; nearest legal: d3t2p1",
    ]
    ppo.allocation_mode = "manual"
    ppo.actor_gen.device_mesh, ppo.actor_gen.parallel.tensor_parallel_size = "node02", 3
    ppo.ref_inf.device_mesh, ppo.ref_inf.parallel.pipeline_parallel_size = "2-4", 3
    lines = problems(ppo, paths)
    assert lines[0].endswith("names node 2, but there are nodes 1 to 1; nearest legal: node 1") and len(lines) == 7
    assert lines[3].startswith("ref_inf: d1t1p3: 2 layers are fewer than 3 pipeline stages; nearest legal: ")
    assert lines[3].endswith("ref_inf.parallel.data_parallel_size=3 ref_inf.parallel.pipeline_parallel_size=1")
    assert not paths.root.parent.exists()


def test_run_lengths_must_be_positive(sft: SFTExperiment, paths: RunDir) -> None:
    sft.exp_ctrl.total_train_steps, sft.exp_ctrl.save_freq_secs = 0, -1
    assert problems(sft, paths) == [
        "exp_ctrl.total_train_steps=0: must be >= 1",
        "exp_ctrl.save_freq_secs=-1: must be >= 1",
    ]


def test_roles_to_save_must_be_trained(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.save_roles = ["actor", "ref", "actr"]
    assert problems(ppo, paths) == [
        "save_roles: 'ref' is not trained (roles: actor, critic)",
        "save_roles: 'actr' is not trained (roles: actor, critic)",
    ]


class NeedsMore(SFTExperiment):
    """An experiment with a call that reads an unknown key."""

    def graph(self) -> Graph:
        (mfc,) = super().graph().mfcs
        return Graph((MFC(mfc.name, mfc.role, mfc.kind, mfc.interface, (*mfc.inputs, "rewards"), batch_size=4),))


def test_a_key_without_a_producer(sft: SFTExperiment, paths: RunDir) -> None:
    made = NeedsMore(**vars(sft))
    assert isinstance(made, ExperimentConfig)
    assert one(made, paths) == (
        "sft_train needs 'rewards': no MFC produces it, and sft data has only prompt_mask, tokens"
    )


def test_all_problems_are_reported_together(ppo: PPOMathExperiment, copy: Callable[..., Path], paths: RunDir) -> None:
    paths.root.mkdir(parents=True)
    paths.config.write_text("")
    ppo.trial_name, ppo.n_nodes, ppo.ppo.ppo_n_minibatches = "", 2, 19
    ppo.reward.weights, ppo.save_roles, ppo.allocation_mode = [1.0, 2.0], ["rew"], "d5"
    ppo.actor.path, ppo.ref.path = str(copy("small", config={"vocab_size": 5})), "no-such"
    ppo.dataset.train_bs_n_seqs = 18
    starts = [
        "trial_name=''",
        f"{paths.root} already contains a run",
        "mode=local",
        "ppo.ppo_n_minibatches",
        "reward.weights",
        "ref.path=no-such",
        "allocation_mode=d5",
        "actor, critic: the tokenizer",
        "save_roles: 'rew'",
    ]
    lines = problems(ppo, paths)
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_data_is_checked_even_without_a_tokenizer(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.actor.path, ppo.dataset.path = "no-such", "none.jsonl"
    assert problems(ppo, paths) == [
        "actor.path=no-such: there is no such folder",
        "dataset.path=none.jsonl: there is no such file",
    ]


def test_held_out_rows_are_counted_and_evaluation_calls_are_placed(
    task: Any, actor_folder: Path, paths: RunDir
) -> None:
    made = ready(RewardModelExperiment(model=ModelSpec(path=str(actor_folder))), task.root / "preferences.jsonl")
    made.dataset.eval_fraction = 0.25
    run = preflight("rw", made, paths)
    assert (run.n_rows, run.n_held_out) == (13, 4) and run.plan["rw_eval"] == run.plan["rw_train"]
    assert set(run.program) == {"rw_train", "rw_eval"} and run.eval_schedule.n_steps == run.eval_schedule.first_step + 1
    made.dataset.eval_path = "none.jsonl"
    assert one(made, paths).startswith("dataset.eval_fraction and dataset.eval_path are both set")
    made.dataset.eval_fraction = 0.0
    assert one(made, paths) == "dataset.path=none.jsonl: there is no such file"


def test_evaluation_calls_use_the_layout_of_their_role(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.dataset.eval_fraction, ppo.n_gpus_per_node, ppo.allocation_mode = 0.25, 2, "actor_gen:d2,*:p2"
    run = preflight("ppo-math", ppo, paths)
    assert (run.n_rows, run.n_held_out) == (13, 4)
    assert run.plan["eval_gen"] == run.plan["actor_train"] and run.plan["eval_rew"] == run.plan["rew_inf"]


def test_unused_evaluation_options(sft: Any, ppo: PPOMathExperiment, task: Any, paths: RunDir) -> None:
    answers = ready(GenerationExperiment(model=ppo.actor), task.train)
    answers.dataset.eval_fraction, answers.sampling.max_new_tokens = 0.25, 16
    assert one(answers, paths) == "dataset.eval_fraction=0.25: this experiment has no evaluation"
    ppo.evaluation.n, ppo.exp_ctrl.keep_best = 4, "eval/accuracy"
    assert problems(ppo, paths) == [
        "evaluation has options, but there are no held-out rows: set dataset.eval_path or dataset.eval_fraction",
        "exp_ctrl.keep_best=eval/accuracy: there are no held-out rows",
    ]
    sft.exp_ctrl.eval_freq_steps = 3
    assert one(sft, paths) == "exp_ctrl.eval_freq_steps=3: there are no held-out rows"
    sft.exp_ctrl.eval_freq_steps = 0
    assert "exp_ctrl.eval_freq_steps=0: must be >= 1" in problems(sft, paths)


def test_backends_that_cannot_train_a_role(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.actor.backend = Backend.megatron
    (only,) = problems(ppo, paths)
    ppo.actor.optimizer.offload = True
    assert problems(ppo, paths) == [only, "actor.optimizer.offload=True requires actor.backend=native"]
    ppo.actor.optimizer.offload = False
    ppo.critic.backend, ppo.ref = Backend.vllm, replace(ppo.actor)
    assert sorted(problems(ppo, paths)) == [
        only,
        "critic.backend=vllm: vLLM only generates; set it for a call, like critic_gen.backend=vllm",
        "ref.backend=megatron: megatron-core only trains, and no call trains ref; remove the option",
    ]
    assert only == "actor.backend=megatron: megatron-core requires GPUs; the native backend trains on CPUs"


def test_unset_dtypes_are_resolved_once(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.critic = replace(ppo.actor, bf16=True)
    made = preflight("x", ppo, paths)
    assert {role: spec.spec.bf16 for role, spec in made.roles.items()} == {"actor": False, "ref": False, "critic": True}
    assert ppo.actor.bf16 is False and ppo.ref.bf16 is None, "roles without a model are unchanged"
    other = PPOMathExperiment(actor=ModelSpec(path="m"), critic=ModelSpec(config="c", bf16=False))
    resolve_dtypes(other, bf16=True)
    assert (other.actor.bf16, other.critic.bf16, other.ref.bf16) == (True, False, None)


def test_router_replay_needs_routed_experts(ppo: PPOMathExperiment, paths: RunDir) -> None:
    ppo.ppo.router_replay = True
    assert "ppo.router_replay=True needs a model with routed experts" in one(ppo, paths)
    ppo.actor_gen.backend = Backend.vllm
    assert any("ppo.router_replay needs actor_gen.backend=native" in problem for problem in problems(ppo, paths))
    ppo.env.cls = "nowhere.py:Class"
    assert any("ppo.router_replay is for single responses" in problem for problem in problems(ppo, paths))
