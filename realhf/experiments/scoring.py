"""Scoring of responses, sampled or from a file, by reward models and by a gold model or a verifier."""

from dataclasses import dataclass, replace
from pathlib import Path

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import GenerationConfig, MFCConfig, ModelSpec, RewardConfig
from realhf.api.config.option import COUNT_OR_ALL, opt
from realhf.api.config.preference import EnsembleConfig, ScoreConfig
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import MFC, Graph
from realhf.data.files import read_raw_rows
from realhf.experiments.options.checks import reward_problems, sampling_problems, unmet, unused_curriculum
from realhf.experiments.options.models import RewardModels, reward_task, sampling_call, score_call, verifier_call

SOLUTIONS = {Task.math: ("solutions",), Task.code: ("input_output", "test")}
"""Dataset keys of which a built-in verifier needs one."""


@dataclass
class Scoring(Experiment):
    """Options of experiments that score responses."""

    policy: ModelSpec = opt(ModelSpec, "samples responses to the prompts of the file (default: the file has answers)")
    sampling: GenerationConfig = opt(GenerationConfig, "sampling, with policy.path")
    rew: ModelSpec = opt(ModelSpec, "the reward model")
    score: ScoreConfig = opt(ScoreConfig, "scoring with the reward model")
    ensemble: EnsembleConfig = opt(lambda: EnsembleConfig(uwo_weight=0.5), "several reward models instead of rew")
    gold: ModelSpec = opt(ModelSpec, "a reward model that gives the gold scores")
    judge: bool = opt(False, "a verifier gives the gold scores")
    reward: RewardConfig = opt(lambda: RewardConfig(wrong_reward=0.0), "the verifier (judge=True)")
    gen: MFCConfig = opt(MFCConfig, "sampling call")
    rew_inf: MFCConfig = opt(MFCConfig, "scoring calls")
    gold_inf: MFCConfig = opt(MFCConfig, "gold call")

    @property
    def reward_models(self) -> RewardModels:
        return RewardModels(self.rew, self.score, self.ensemble)

    @property
    def is_sampled(self) -> bool:
        return self.policy != ModelSpec()

    @property
    def has_gold_model(self) -> bool:
        return self.gold != ModelSpec()

    def problems(self) -> list[str]:
        problems = unmet([
            (not (self.judge and self.has_gold_model),
             "gold has options, but judge=True: gold scores come from one of them"),
            (self.judge or replace(self.reward, wrong_reward=0.0) == RewardConfig(wrong_reward=0.0),
             "reward has options, but judge=False uses no verifier"),
            (self.is_sampled or self.sampling == type(self)().sampling,
             "sampling has options, but without policy.path no responses are sampled"),
        ])  # fmt: skip
        problems += self.reward_models.problems() + unused_curriculum(self.dataset, "scoring")
        if self.judge:
            problems += reward_problems(self.reward, self.sampling.n if self.is_sampled else 1)
            problems += [] if self.is_sampled else self._solution_problems()
        return problems + sampling_problems("sampling", self.sampling)

    def _solution_problems(self) -> list[str]:
        """Return a problem if the first row of the file has no solution for the verifier."""
        needed, data = SOLUTIONS.get(reward_task(self.reward), ()), self.dataset.path
        if not needed or not Path(data).is_file():
            return []
        row = next(read_raw_rows(data, self.dataset.columns)).value
        keys = {**(row.get("fields") or {}), **row}.keys() if isinstance(row, dict) else {}
        if set(needed) & set(keys):
            return []
        return [f"judge=True: rows of {data} have no {' or '.join(map(repr, needed))} (keys: {', '.join(keys)})"]


@dataclass
class ScoreExperiment(Scoring):
    """Score responses with reward models; prompts, responses and scores are written to generations/."""

    n_logged_generations: int = opt(-1, "number of rows written to generations/ per step, -1 for all", COUNT_OR_ALL)

    @property
    def task(self) -> Task:
        if self.is_sampled:
            return reward_task(self.reward) if self.judge else Task.prompt
        return Task.answer

    def graph(self) -> Graph:
        batch, mfcs = self.dataset.train_bs_n_seqs, list[MFC]()
        *members, rew_inf = self.reward_models.calls(PPOConfig(), batch)
        if self.is_sampled:
            mfcs.append(sampling_call("gen", "policy", self.sampling, batch))
        else:
            rew_inf = replace(rew_inf, inputs=(*rew_inf.inputs, "row"))  # inputs are written to generations/
        mfcs += [*members, rew_inf, *self._gold_calls(batch)]
        return Graph(tuple(mfcs), (), tuple(role for role, spec in self.roles().items() if spec.spec.offload))

    def _gold_calls(self, batch: int) -> list[MFC]:
        if self.judge:
            call = verifier_call("gold_inf", self.reward, PPOConfig(), batch)
        elif self.has_gold_model:
            call = score_call("gold", ScoreConfig(), self.gold, PPOConfig(), batch)
        else:
            return []
        return [replace(call, outputs=("gold",), aliases=(("gold", "rewards"),))]

    def roles(self) -> dict[str, RoleSpec]:
        policy = {"policy": RoleSpec(self.policy)} if self.is_sampled else {}
        gold = {"gold": RoleSpec(self.gold, scalar_head=True)} if self.has_gold_model and not self.judge else {}
        return {**policy, **self.reward_models.roles(), **gold}

    def sampling_options(self) -> GenerationConfig | None:
        return self.sampling if self.is_sampled else None

    def samples_per_prompt(self) -> int:
        return self.sampling.n if self.is_sampled else 1
