"""The declarations of the experiments, and the checks of their options."""

from pathlib import Path

import pytest

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import (
    DatasetConfig,
    EvaluationConfig,
    GenerationConfig,
    KLEstimator,
    KLPlace,
    MFCConfig,
    ModelSpec,
)
from realhf.api.config.preference import DPOConfig, EnsembleConfig, PreferenceLoss, RewardModelType, RWConfig
from realhf.api.experiment import MultiStageExperiment, Task
from realhf.base.errors import UserError
from realhf.experiments import EXPERIMENTS, experiment_class
from realhf.experiments.dpo import DPOExperiment
from realhf.experiments.gen import GenerationExperiment
from realhf.experiments.options.checks import sampling_problems
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.ppo_math import PPOMathExperiment
from realhf.experiments.rw import RewardModelExperiment
from realhf.experiments.sft import SFTExperiment

USERS = """
from dataclasses import dataclass
from realhf.experiments.sft import SFTExperiment

@dataclass
class Mine(SFTExperiment):
    shots: int = 3
"""


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if not issubclass(experiment_class(n), MultiStageExperiment)])
def test_declarations_are_consistent(name: str) -> None:
    experiment = experiment_class(name)()
    experiment.dataset.train_bs_n_seqs = 6
    graph = experiment.graph()
    assert set(experiment.roles()) == set(graph.roles)
    assert set(experiment.placements()) == {m.name for m in graph.mfcs}
    assert {m.batch_size for m in graph.mfcs} == {6}
    assert experiment.problems() == []
    assert (experiment.sampling_options() is not None) == ("prompts" in graph.dataset_keys)


@pytest.mark.parametrize(
    ("experiment", "keys", "task"),
    [
        (SFTExperiment(), ("tokens", "prompt_mask"), Task.sft),
        (RewardModelExperiment(), ("tokens", "prompt_mask"), Task.pairs),
        (RewardModelExperiment(rw=RWConfig(RewardModelType.ranked)), ("tokens", "prompt_mask"), Task.ranked),
        (RewardModelExperiment(rw=RWConfig(RewardModelType.outcome)), ("tokens", "label"), Task.outcome),
        (RewardModelExperiment(rw=RWConfig(RewardModelType.process)), ("tokens", "step_labels"), Task.process),
        (DPOExperiment(), ("tokens", "prompt_mask"), Task.pairs),
        (
            DPOExperiment(dpo=DPOConfig(PreferenceLoss.kto, unpaired=True)),
            ("tokens", "prompt_mask", "kl_tokens", "kl_prompt_mask", "label"),
            Task.outcome,
        ),
        (GenerationExperiment(), ("prompts", "row"), Task.prompt),
        (PPOExperiment(), ("prompts", "row"), Task.prompt),
        (PPOMathExperiment(), ("prompts", "row"), Task.math),
    ],
)
def test_dataset_keys(experiment: SFTExperiment, keys: tuple[str, ...], task: Task) -> None:
    assert (experiment.graph().dataset_keys, experiment.task) == (keys, task)


def test_ppo_has_six_calls_and_four_without_a_critic() -> None:
    assert [m.name for m in PPOExperiment().graph().topological] == [
        "actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train",
    ]  # fmt: skip
    without = PPOExperiment(ppo=PPOConfig(disable_value=True))
    assert [m.name for m in without.graph().topological] == ["actor_gen", "rew_inf", "ref_inf", "actor_train"]
    assert "critic" not in without.roles() and "values" not in without.graph()["actor_train"].inputs


def test_best_of_n_runs_inference_on_selected_rows_only() -> None:
    plain, best = (PPOExperiment(ppo=PPOConfig(group_size=2, generation_size=n)) for n in (None, 8))
    assert not plain.drops_rows and best.drops_rows
    assert [e.graph()["ref_inf"].inputs for e in (plain, best)] == [
        ("tokens", "prompt_mask"), ("tokens", "rewards", "prompt_mask"),
    ]  # fmt: skip


def test_ref_and_critic_default_to_the_actor() -> None:
    actor = ModelSpec(path="a", bf16=True, gradient_checkpointing=True)
    roles = PPOExperiment(actor=actor, rew=ModelSpec(path="r")).roles()
    assert roles["ref"].spec == ModelSpec(path="a", bf16=True) and roles["ref"].starts_as == "actor"
    assert roles["critic"].spec == ModelSpec(path="a", init_critic_from_actor=True) and roles["critic"].scalar_head
    assert roles["rew"].scalar_head and not roles["actor"].scalar_head and roles["actor"].spec is actor
    own = PPOExperiment(actor=actor, ref=ModelSpec(path="b"), critic=ModelSpec(path="c")).roles()
    assert own["ref"].spec.path == "b" and own["ref"].starts_as is None
    assert own["critic"].spec == ModelSpec(path="c")
    scratch = PPOExperiment(actor=ModelSpec(config="cfg", init_from_scratch=True)).roles()
    assert scratch["critic"].spec == ModelSpec(config="cfg", init_from_scratch=True)


def test_reward_models_get_a_new_head_unless_is_reward_model() -> None:
    heads = [RewardModelExperiment(is_reward_model=b).roles()["model"].spec.init_critic_from_actor for b in (0, 1)]
    assert heads == [True, False]
    scratch = RewardModelExperiment(model=ModelSpec(init_from_scratch=True))
    assert not scratch.roles()["model"].spec.init_critic_from_actor


@pytest.mark.parametrize("loss", PreferenceLoss)
def test_dpo_graph_with_and_without_reference(loss: PreferenceLoss) -> None:
    experiment = DPOExperiment(dpo=DPOConfig(loss), dataset=DatasetConfig(eval_fraction=0.1))
    experiment.actor, experiment.ref = ModelSpec("a", bf16=True, gradient_checkpointing=True), ModelSpec(offload=True)
    graph, roles = experiment.graph(), experiment.roles()
    if loss in (PreferenceLoss.orpo, PreferenceLoss.simpo):
        assert [m.name for m in graph.mfcs] == ["actor_train"] and set(roles) == {"actor"}
        assert [m.name for m in graph.evaluation] == ["actor_eval"] and graph.offloaded == ()
        assert experiment.problems() == [f"ref has options, but dpo.loss={loss.name} uses no reference"]
        return
    more = loss is PreferenceLoss.kto  # KTO needs log-probs of mismatched responses
    steps, evaluation = [*["ref_kl_inf"] * more, "actor_train"], [*["ref_kl_eval"] * more, "actor_eval"]
    assert [m.name for m in graph.topological] == ["ref_inf", *steps] and graph.offloaded == ("ref",)
    assert [m.name for m in graph.eval_graph.topological] == ["ref_eval", *evaluation] and experiment.problems() == []
    assert set(experiment.placements()) == {m.name for m in graph.mfcs}
    assert roles["ref"].spec == ModelSpec("a", bf16=True, offload=True) and roles["ref"].starts_as == "actor"
    assert DPOExperiment(ref=ModelSpec("b")).roles()["ref"].starts_as is None


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"label_smoothing": 0.1, "loss": PreferenceLoss.ipo}, "dpo.label_smoothing is for dpo.loss=sigmoid and"),
        (
            {"desirable_weight": 0, "undesirable_weight": 0},
            "dpo.desirable_weight and dpo.undesirable_weight must",
        ),
        ({"unpaired": True}, "dpo.unpaired=True is for dpo.loss=kto; sigmoid compares two responses"),
    ],
)
def test_invalid_dpo_options(options: dict, start: str) -> None:
    (problem,) = DPOExperiment(dpo=DPOConfig(**options)).problems()
    assert problem.startswith(start)


@pytest.mark.parametrize("kind", RewardModelType)
def test_reward_models_are_evaluated_on_held_out_rows(kind: RewardModelType) -> None:
    experiment = RewardModelExperiment(rw=RWConfig(kind))
    assert experiment.graph().evaluation == ()
    experiment.dataset.eval_path = "held_out.jsonl"
    (evaluation,) = experiment.graph().evaluation
    assert evaluation.interface == experiment.graph()["rw_train"].interface and evaluation.outputs == ()
    experiment.rw.score_l2_reg = 0.1
    assert len(experiment.problems()) == (kind in (RewardModelType.outcome, RewardModelType.process))


POLICY_GRADIENT = ("ppo", "ppo-math", "ppo-code", "grpo", "rloo", "reinforce-pp", "remax", "vineppo")


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_evaluation_on_held_out_prompts(name: str) -> None:
    experiment = experiment_class(name)()
    assert isinstance(experiment, PPOExperiment) and experiment.graph().evaluation == ()
    experiment.dataset.eval_fraction, experiment.ppo.gen.temperature, experiment.ppo.gen.max_new_tokens = 0.1, 0.5, 99
    experiment.ppo.generation_size = 16
    graph = experiment.graph()
    gen, rew = graph.eval_graph.topological
    assert (gen.name, gen.role, gen.inputs) == ("eval_gen", "actor", ("prompts", "row"))
    assert {key: gen.interface.config[key] for key in ("greedy", "n", "max_new_tokens", "temperature")} == {
        "greedy": True, "n": 1, "max_new_tokens": 99, "temperature": 1.0}  # fmt: skip
    assert rew.name == "eval_rew" and rew.role == graph["rew_inf"].role and rew.outputs == ("rewards",)
    assert rew.interface.name == graph["rew_inf"].interface.name
    scaled = rew.interface.config.get("ppo", rew.interface.config)
    assert scaled["generation_size"] is None and experiment.ppo.generation_size == 16
    assert experiment.problems() == []


def test_evaluation_of_ensembles_and_of_check_verifier_status() -> None:
    ensemble = PPOExperiment(ensemble=EnsembleConfig(members=["a", "b"]), dataset=DatasetConfig(eval_path="x"))
    names = [m.name for m in ensemble.graph().eval_graph.topological]
    assert names == ["eval_gen", "eval_rew_0", "eval_rew_1", "eval_rew"]
    strict = PPOMathExperiment(dataset=DatasetConfig(eval_path="x"))
    strict.reward.check_verifier_status = True
    config = strict.graph()["eval_rew"].interface.config
    assert not config["reward"]["check_verifier_status"] and strict.reward.check_verifier_status


@pytest.mark.parametrize(
    ("evaluation", "start"),
    [
        (EvaluationConfig(n=4), "evaluation.n=4: greedy responses are all the same"),
        (EvaluationConfig(n=4, greedy=False, temperature=0.0), "evaluation.n=4: greedy responses are all the same"),
    ],
)
def test_invalid_evaluation_options(evaluation: EvaluationConfig, start: str) -> None:
    held_out = DatasetConfig(eval_path="x")
    (problem,) = PPOExperiment(evaluation=evaluation, dataset=held_out).problems()
    assert problem.startswith(start)
    assert PPOExperiment(evaluation=EvaluationConfig(4, False), dataset=held_out).problems() == []
    assert (
        PPOExperiment(evaluation=evaluation).problems()[0].startswith("evaluation has options, but there are no held")
    )


def test_dataset_task_depends_on_the_verifier(tmp_path: Path) -> None:
    experiment = PPOMathExperiment()
    assert experiment.graph()["rew_inf"].role is None and "rew" not in experiment.roles()
    (tmp_path / "r.py").write_text("def reward(prompt, answer, row):\n    return 1.0\n")
    experiment.reward.fn = f"{tmp_path}/r.py:reward"
    assert experiment.task is Task.prompt and experiment.problems() == []
    experiment.reward.fn = f"{tmp_path}/r.py:rewrd"
    assert "does not define 'rewrd'  did you mean reward" in experiment.problems()[0]


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"group_size": 4, "generation_size": 2}, "ppo.generation_size=2 is smaller than ppo.group_size=4"),
        ({"group_adv_norm": True}, "ppo.group_adv_norm needs ppo.group_size > 1"),
        ({"ppo_n_minibatches": 129}, "ppo.ppo_n_minibatches=129 does not fit"),
        ({"overlong_buffer": 257}, "ppo.overlong_buffer=257 is larger than ppo.gen.max_new_tokens=256"),
        ({"gen": GenerationConfig(n=2)}, "ppo.gen.n=2 is for the experiment gen; set ppo.group_size"),
    ],
)
def test_invalid_ppo_options(options: dict, start: str) -> None:
    (problem,) = PPOExperiment(ppo=PPOConfig(**options)).problems()
    assert problem.startswith(start)


def test_invalid_sampling_options() -> None:
    problem = "gen.min_new_tokens=300 is larger than gen.max_new_tokens=256"
    assert sampling_problems("gen", GenerationConfig(min_new_tokens=300)) == [problem]
    assert sampling_problems("gen", GenerationConfig(min_new_tokens=256)) == []


def test_options_without_effect_are_errors() -> None:
    assert PPOExperiment(ref=ModelSpec(bf16=True)).problems()[0].startswith("ref has options, but ref.path and")
    scratch = PPOExperiment(critic=ModelSpec(init_from_scratch=True)).problems()
    assert scratch == ["critic.init_from_scratch=True needs critic.config=FOLDER_OR_JSON"]
    without_path = PPOMathExperiment(rew=ModelSpec(bf16=True), ppo=PPOConfig(rm_output_scaling=2.0)).problems()
    assert without_path == [
        "rew has options, but rew.path and rew.config are not set",
        "ppo.rm_output_scaling needs a reward model: set rew.path or ensemble.members",
    ]
    assert PPOExperiment(ref_inf=MFCConfig("0")).problems() == []  # checked with the allocation mode


def test_all_problems_are_reported_at_once() -> None:
    experiment = PPOMathExperiment(ppo=PPOConfig(group_adv_norm=True, gen=GenerationConfig(min_new_tokens=999)))
    experiment.reward.weights, experiment.reward.token_env = [1.0, 2.0], "X"
    assert len(experiment.problems()) == 4


def test_user_defined_experiment(tmp_path: Path) -> None:
    file = tmp_path / "json.py"  # has the name of a library
    file.write_text(USERS)
    cls = experiment_class(f"{file}:Mine")
    assert cls.__name__ == "Mine" and cls().shots == 3
    import json

    assert json.loads("1") == 1
    file.write_text("import nowhere_to_be_found\n")
    with pytest.raises(UserError, match=r"json.py:Mine' cannot be loaded: ModuleNotFoundError: .*nowhere"):
        experiment_class(f"{file}:Mine")


def test_unknown_experiment_suggests_the_closest_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown experiment 'ppo_math' \(known: sft, .*did you mean ppo-math"):
        experiment_class("ppo_math")
    with pytest.raises(UserError, match=r"there is no file .*none.py"):
        experiment_class(f"{tmp_path}/none.py:Mine")
    (tmp_path / "e.py").write_text(USERS)
    with pytest.raises(UserError, match="defines no experiment 'Mien'  did you mean Mine"):
        experiment_class(f"{tmp_path}/e.py:Mien")


@pytest.mark.parametrize(
    ("options", "staleness", "words"),
    [
        ({"kl_in": KLPlace.loss, "kl_loss_estimator": KLEstimator.k1}, 0, "expected gradient is 0"),
        ({"kl_reward_estimator": KLEstimator.k3}, 0, "in the reward only k1"),
        ({"group_size": 4, "group_adv_norm": True}, 0, "it is scaled to variance 1"),
        ({"kl_in": KLPlace.loss, "kl_loss_estimator": KLEstimator.k2}, 1, "k4 is not"),
        ({"kl_in": KLPlace.loss, "kl_loss_estimator": KLEstimator.k3}, 1, "estimator=k3 with max_staleness: biased"),
        ({"mask_no_eos_with_zero": True}, 0, "truncated response is 0, that of a finished one can be -inf"),
        ({}, 1, "clipped around the old generator"),
    ],
)
def test_warnings(options: dict, staleness: int, words: str) -> None:
    warnings = PPOExperiment(ppo=PPOConfig(**options), max_staleness=staleness).warnings()
    assert any(words in line for line in warnings)
    assert PPOExperiment(ppo=PPOConfig(kl_in=KLPlace.loss)).warnings() == [] == PPOExperiment().warnings()
