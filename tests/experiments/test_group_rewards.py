"""Group-wise rewards, a language model as judge, and a reward model beside the verifier: graphs and checks."""

from pathlib import Path
from typing import Any

import pytest

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import DatasetConfig, EnvConfig, EvaluationConfig, GenerationConfig, ModelSpec, RewardConfig
from realhf.api.config.preference import EnsembleConfig
from realhf.api.config.reward import LLMJudgeConfig
from realhf.api.experiment import Task
from realhf.experiments.gen import GenerationExperiment
from realhf.experiments.grpo import GRPOExperiment
from realhf.experiments.options.checks import reward_problems, score_range
from realhf.experiments.ppo import PPOExperiment
from realhf.experiments.remax import ReMaxExperiment
from realhf.experiments.scoring import ScoreExperiment
from realhf.experiments.vineppo import VinePPOExperiment

ENDPOINT: dict[str, Any] = {"base_url": "http://host:8000/v1", "model": "m"}
VALID: dict[str, Any] = {"group_fn": "rubric", "judge": LLMJudgeConfig(**ENDPOINT)}


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"group_fn": "pairwize"}, "reward.group_fn='pairwize' must be one of self_consistency, diversity, pairwise, "
                                   "rubric, or 'file.py:function'  did you mean pairwise ?"),
        ({"group_fn": "code"}, "reward.group_fn='code' must be one of"),
        ({"group_fn": "http://host/judge"}, "reward.group_fn='http://host/judge': services judge single responses"),
        ({"group_fn": "two.py:f"}, "reward.group_fn='two.py:f': f must take three arguments: prompt, responses and"),
        ({"group_fn": "no.py:f"}, "reward.group_fn='no.py:f': no such file: no.py"),
        ({"group_fn": "group.py:f", "fns": ["one.py:f"]}, "reward.fns and group_fn: the names f, f must differ"),
        ({"group_weight": 2.0}, "reward.group_weight has no effect without reward.group_fn"),
        ({"judge": LLMJudgeConfig(model="m")}, "reward.judge has options, but no reward.group_fn asks it"),
        ({"group_fn": "diversity", "judge": LLMJudgeConfig(model="m")},
         "reward.judge has options, but reward.group_fn=diversity asks no language model"),
        ({"fns": ["math", "none"]}, "reward.fn=none gives no reward: it cannot be one of several"),
        ({"fn": "none", "format_reward": "x"}, "reward.format_reward needs one of the verifiers"),
    ],
)  # fmt: skip
def test_invalid_options(options: dict, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text("def f(prompt, responses): ...\n")
    for name in ("one", "group"):
        (tmp_path / f"{name}.py").write_text("def f(prompt, responses, row): ...\n")
    (problem,) = reward_problems(RewardConfig(**options), 4)
    assert problem.startswith(start)


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"base_url": ""}, "reward.group_fn=rubric needs reward.judge.base_url=http://host:port/v1"),
        ({"model": ""}, "reward.group_fn=rubric needs reward.judge.model"),
        ({"base_url": "host:8000"}, "reward.judge.base_url='host:8000' is not of the form"),
        ({"base_url": "http://me:secret@host/v1"},
         "reward.judge.base_url contains a password in the URL of host; use reward.judge.api_key_env"),
        ({"base_url": "http://host/v1?version=2"}, "reward.judge.base_url=http://host/v1?version=2: /chat/completions"),
        ({"api_key_env": "X"}, "reward.judge.api_key_env=X: this environment variable is not set or empty"),
        ({"api_key_env": "BAD"}, "reward.judge.api_key_env=BAD: the key must be printable ASCII without spaces"),
        ({"min_score": 1.0, "max_score": 1.0}, "reward.judge.min_score=1 must be less than max_score=1"),
        ({"budget": 1.0}, "reward.judge.budget=1.0 needs reward.judge.price_in and reward.judge.price_out"),
        ({"cache": "nowhere"}, "reward.judge.cache=nowhere: no such folder; create it"),
        ({"prompt": "text.json"}, "reward.judge.prompt=text.json must be a file with the suffix .txt or .md"),
        ({"prompt": "no.txt"}, "reward.judge.prompt=no.txt: [Errno 2] No such file"),
        ({"prompt": "without.txt"}, "reward.judge.prompt=without.txt: the text has no {response}"),
    ],
)  # fmt: skip
def test_invalid_options_of_the_judge(
    options: dict, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("X", raising=False)
    monkeypatch.setenv("BAD", "a\nb")
    (tmp_path / "without.txt").write_text("Grade {prompt}")
    judge = LLMJudgeConfig(**ENDPOINT | options)
    problems = reward_problems(RewardConfig(group_fn="rubric", judge=judge), 1)
    assert len(problems) == 1 and problems[0].startswith(start), problems


def test_valid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-1")
    (tmp_path / "text.md").write_text("{response_a} or {response_b}?")
    judge = LLMJudgeConfig(**ENDPOINT, api_key_env="KEY", prompt=f"{tmp_path}/text.md", cache=str(tmp_path),
                           budget=1.0, price_out=2.0)  # fmt: skip
    assert reward_problems(RewardConfig(fn="none", group_fn="pairwise", judge=judge), 2) == []
    assert reward_problems(RewardConfig(**VALID), 1) == []  # a score for each response
    assert reward_problems(RewardConfig(fn="none"), 1) == []


def test_comparisons_need_several_responses(tmp_path: Path) -> None:
    alone = GRPOExperiment(reward=RewardConfig(group_fn="diversity"), ppo=PPOConfig(disable_value=True)).problems()
    assert any("compares the responses to a prompt, but there is one; set ppo.group_size" in line for line in alone)
    judged = GenerationExperiment(judge=True, reward=RewardConfig(group_fn="self_consistency"))
    assert len(judged.problems()) == 1
    judged.sampling.n = 2
    assert judged.problems() == []
    from_file = ScoreExperiment(judge=True, reward=RewardConfig(fn="none", group_fn="diversity"))
    assert len(from_file.problems()) == 1
    held_out = GRPOExperiment(reward=RewardConfig(group_fn="diversity"), dataset=DatasetConfig(eval_fraction=0.1))
    assert held_out.problems() == [
        "reward.group_fn=diversity compares responses, but evaluation.n=1; set evaluation.n=4 evaluation.greedy=False"
    ]
    held_out.evaluation = EvaluationConfig(n=4, greedy=False, temperature=1.0)
    assert held_out.problems() == []
    held_out.evaluation, held_out.reward = EvaluationConfig(), RewardConfig(**VALID)
    assert held_out.problems() == []


@pytest.mark.parametrize("kind", [ReMaxExperiment, VinePPOExperiment])
def test_other_algorithms_reward_single_responses(kind: type) -> None:
    (problem,) = kind(reward=RewardConfig(**VALID)).problems()
    assert problem.startswith("reward.group_fn=rubric: this algorithm rewards single responses")
    (problem,) = kind(rew=ModelSpec("r")).problems()
    assert problem.startswith("a reward model (rew, ensemble) in addition to reward.fn: use grpo")


def test_rows_without_a_verifier_need_a_prompt_only() -> None:
    experiment = GRPOExperiment(reward=RewardConfig(fn="none", group_fn="self_consistency"))
    assert experiment.task is Task.prompt and experiment.warnings() == [] and experiment.problems() == []
    (warning,) = GRPOExperiment(reward=RewardConfig(fn="none")).warnings()
    assert warning.startswith("reward.fn=none without reward.group_fn or a reward model")
    assert GRPOExperiment(reward=RewardConfig(fn="none"), rew=ModelSpec("r")).warnings() == []


def test_range_of_scores() -> None:
    weighted = RewardConfig(group_fn="diversity", group_weight=-0.5)
    assert score_range(weighted) == (-1.5, 1.0)
    assert score_range(RewardConfig(fn="none", group_fn="pairwise")) == (0.0, 1.0)
    assert score_range(RewardConfig(fn="none", group_fn="f.py:f", group_weight=0.0)) == (0.0, 0.0)


def test_a_reward_model_beside_the_verifier() -> None:
    experiment = GRPOExperiment(rew=ModelSpec("r"))
    graph = experiment.graph()
    assert [mfc.name for mfc in graph.mfcs] == ["actor_gen", "rew_0_inf", "rew_inf", "ref_inf", "actor_train"]
    model, verifier = graph["rew_0_inf"], graph["rew_inf"]
    assert (model.role, model.outputs) == ("rew", ("model_scores",))
    assert (verifier.role, verifier.inputs) == (None, ("tokens", "prompt_mask", "row", "model_scores"))
    assert experiment.problems() == [] and experiment.roles()["rew"].scalar_head
    assert set(experiment.placements()) == {mfc.name for mfc in graph.mfcs}
    ensemble = GRPOExperiment(ensemble=EnsembleConfig(["a", "b"])).graph()
    assert [mfc.name for mfc in ensemble.mfcs][1:5] == ["rew_0_inf", "rew_1_inf", "rew_2_inf", "rew_inf"]
    held_out = GRPOExperiment(rew=ModelSpec("r"), dataset=DatasetConfig(eval_fraction=0.1)).graph().evaluation
    assert [mfc.name for mfc in held_out] == ["eval_gen", "eval_rew_0", "eval_rew"]
    plain = PPOExperiment(ppo=PPOConfig(gen=GenerationConfig()))
    assert "rew_0_inf" not in {mfc.name for mfc in plain.graph().mfcs}


def test_a_reward_model_of_episodes_is_for_ppo(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("class Env: ...\n")
    experiment = GRPOExperiment(rew=ModelSpec("r"), env=EnvConfig(cls=f"{tmp_path}/env.py:Env"))
    assert any("use the experiment ppo" in line for line in experiment.problems())
