"""PPO with a reward model: six calls on four models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from realhf.algorithms.distillation.options import PLACEHOLDER, Distillation, template_problems
from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import EnvConfig, EvaluationConfig, GenerationConfig, KLPlace, MFCConfig, ModelSpec, opt
from realhf.api.config.choices import Backend
from realhf.api.config.option import FINITE, FRACTION
from realhf.api.config.preference import EnsembleConfig, RewardModelType, ScoreConfig
from realhf.api.curriculum import CurriculumRules
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind, Sync
from realhf.api.machine import EnvironmentLoad
from realhf.api.model_config import ModelConfig
from realhf.environments.loading import is_async_class
from realhf.experiments.options.checks import (
    env_problems,
    env_warnings,
    eval_problems,
    ppo_problems,
    ppo_warnings,
    truncation_warnings,
    unmet,
)
from realhf.experiments.options.models import (
    COMPARED,
    TEACHER_KEYS,
    RewardModels,
    episode_call,
    episode_rewards,
    has_model,
    reference_problems,
    reference_role,
    sampling_call,
    teacher_call,
    teacher_problems,
)

TRAINING_KEYS = ("rewards", "reward_parts", "step_rewards", "ref_logprobs", "prox_logprobs", "values", "baseline",
                 "advantages", *TEACHER_KEYS)  # fmt: skip
"""Keys that training reads, in addition to those of the rollout, if an MFC produces them."""

AVERAGE, EXPERTS = "actor_ema", "routed_experts"


@dataclass
class PPOExperiment(Experiment):
    """PPO against a reward model."""

    actor: ModelSpec = opt(ModelSpec, "the policy")
    critic: ModelSpec = opt(ModelSpec, "the value model (default: the actor's weights with a new scalar head)")
    ref: ModelSpec = opt(ModelSpec, "the reference (default: the initial actor)")
    rew: ModelSpec = opt(ModelSpec, "the reward model")
    score: ScoreConfig = opt(ScoreConfig, "scoring with the reward model")
    ensemble: EnsembleConfig = opt(EnsembleConfig, "several reward models instead of rew")
    teacher: ModelSpec = opt(ModelSpec, "a teacher, whose log-probs the actor learns from (ppo.distill)")
    prm: ModelSpec = opt(ModelSpec, "a process reward model, whose step rewards are added (ppo.prm)")
    actor_gen: MFCConfig = opt(MFCConfig, "rollout")
    rew_inf: MFCConfig = opt(MFCConfig, "rewards")
    prm_inf: MFCConfig = opt(MFCConfig, "step rewards")
    ref_inf: MFCConfig = opt(MFCConfig, "reference log-probs")
    teacher_inf: MFCConfig = opt(MFCConfig, "log-probs of the teacher")
    critic_inf: MFCConfig = opt(MFCConfig, "values")
    actor_inf: MFCConfig = opt(MFCConfig, "old log-probs of the actor (ppo.recompute_logprobs)")
    actor_train: MFCConfig = opt(MFCConfig, "actor training")
    critic_train: MFCConfig = opt(MFCConfig, "critic training")
    ppo: PPOConfig = opt(PPOConfig, "the algorithm")
    dataset_filter_threshold: float = opt(100.0, "prompts with a larger mean reward can leave the data", FINITE)
    dataset_max_filter_percentage: float = opt(0.0, "largest fraction of the prompts that leave the data before a new "
                                                    "epoch, highest mean reward first; 0: none", FRACTION)  # fmt: skip
    env: EnvConfig = opt(EnvConfig, "an environment: multi-turn rollouts with its rewards")
    evaluation: EvaluationConfig = opt(EvaluationConfig, "sampling on held-out prompts")

    @property
    def task(self) -> Task:  # type: ignore[override]
        return Task.episode if self.env.cls else Task.prompt

    def reward_mfcs(self) -> list[MFC]:
        """Return the calls that produce ``rewards``, ``rew_inf`` last."""
        if not self.env.cls:
            return self._reward_models.calls(self.ppo, self._batch)
        calls = self._reward_models.score_calls(self._batch)
        return [*calls, episode_rewards("rew_inf", self.ppo, self._batch, calls[-1].outputs)]

    @property
    def _reward_models(self) -> RewardModels:
        return RewardModels(self.rew, self.score, self.ensemble)

    @property
    def _batch(self) -> int:
        return self.dataset.train_bs_n_seqs

    @property
    def drops_rows(self) -> bool:
        """Whether the reward call selects responses."""
        return bool(self.env.cls) or self.samples_per_prompt() > self.ppo.group_size or self.ppo.dynamic_sampling

    @property
    def has_reference(self) -> bool:
        return self.ppo.kl_in is not KLPlace.none

    @property
    def _replayed(self) -> tuple[str, ...]:
        return (EXPERTS,) if self.ppo.router_replay else ()

    @property
    def teacher_role(self) -> str | None:
        """The role of the teacher: with a prompt of its own and no model, the actor."""
        return "teacher" if has_model(self.teacher) else "actor" if self.ppo.distill.prompt else None

    def graph(self) -> Graph:
        ppo, batch = self.ppo, self._batch
        actor, critic = (InterfaceSpec(name, to_plain(ppo)) for name in ("ppo_actor", "ppo_critic"))
        # reading 'rewards' restricts a call to the selected rows
        rows = ("tokens", "rewards") if self.drops_rows else ("tokens",)
        resamples = ppo.max_resamples if ppo.dynamic_sampling else 0
        *rewards, rew_inf = self.reward_mfcs()
        actor_gen = self.rollout_mfc()
        rollout = tuple(key for key in actor_gen.outputs if key not in ("scores", EXPERTS))
        mfcs = [actor_gen, *rewards, replace(rew_inf, resamples=resamples)]
        if has_model(self.prm):
            score = ScoreConfig(RewardModelType.process, step_splitter=ppo.prm.step_splitter)
            steps = InterfaceSpec("labelled_rw", {"ppo": to_plain(PPOConfig()), "score": to_plain(score)})
            mfcs.append(MFC("prm_inf", "prm", Kind.INFERENCE, steps, ("prompt_mask", *rows), ("step_rewards",), batch))
        if self.has_reference:
            mfcs.append(MFC("ref_inf", "ref", Kind.INFERENCE, actor, (*rows, "prompt_mask"), ("ref_logprobs",), batch))
        if ppo.recompute_logprobs:
            keys = (*rows, "prompt_mask", *self._replayed)
            mfcs.append(MFC("actor_inf", "actor", Kind.INFERENCE, actor, keys, ("prox_logprobs",), batch))
        if self.teacher_role:
            mfcs.append(teacher_call(self.teacher_role, ppo, rows, batch))
        if not ppo.disable_value:
            mfcs.append(MFC("critic_inf", "critic", Kind.INFERENCE, critic, rows, ("values",), batch))
        mfcs += self.more_mfcs()
        inputs = (*rollout, *(key for mfc in mfcs[1:] for key in mfc.outputs if key in TRAINING_KEYS))
        if not ppo.disable_value:
            mfcs.append(MFC("critic_train", "critic", Kind.TRAIN, critic, inputs, (), batch, ppo.ppo_n_minibatches))
        keys = (*inputs, *self._replayed)
        mfcs.append(MFC("actor_train", "actor", Kind.TRAIN, actor, keys, (), batch, ppo.ppo_n_minibatches))
        averages = {"ref": ppo.ref_ema_eta, "teacher": ppo.distill.ema_eta, AVERAGE: ppo.actor_ema_eta}
        syncs = tuple(Sync("actor_train", "actor", role, eta) for role, eta in averages.items() if eta is not None)
        frozen = {"ref", "teacher", "prm", *self.reward_roles()}
        offloaded = tuple(role for role, model in self.roles().items() if role in frozen and model.spec.offload)
        return Graph(tuple(mfcs), syncs, offloaded, tuple(self.eval_mfcs()))

    def rollout_mfc(self) -> MFC:
        actor = InterfaceSpec("ppo_actor", to_plain(self.ppo))
        outputs = (*("tokens", "prompt_mask", "logprobs", "truncated"), *self._replayed)
        if self.env.cls:
            return episode_call("actor_gen", "actor", self.env, self.ppo.gen, self.samples_per_prompt(), self._batch)
        return MFC("actor_gen", "actor", Kind.GENERATE, actor, ("prompts", "row"), outputs, self._batch)

    def eval_rollout_mfc(self, sampling: GenerationConfig) -> MFC:
        role = "actor" if self.ppo.actor_ema_eta is None else AVERAGE
        if self.env.cls:
            env = replace(self.env, partial_tokens=None)
            return episode_call("eval_gen", role, env, sampling, sampling.n, self._batch)
        return sampling_call("eval_gen", role, sampling, self._batch)

    def more_mfcs(self) -> list[MFC]:
        """Return the calls that an algorithm adds between rewards and training."""
        return []

    def eval_mfcs(self) -> list[MFC]:
        """Return the calls on held-out prompts: ``eval_gen`` first, ``eval_rew`` last."""
        if not self.dataset.holds_out:
            return []
        sampling = replace(self.ppo.gen.without_rounding(), keep_first=None, **vars(self.evaluation))
        gen = self.eval_rollout_mfc(sampling)
        rewards = self.without_selection().reward_mfcs()
        return [gen, *(replace(mfc, name=f"eval_{mfc.name.removesuffix('_inf')}") for mfc in rewards)]

    def without_selection(self) -> "PPOExperiment":
        """Return the experiment with options under which the reward call keeps all responses."""
        return replace(self, ppo=replace(self.ppo, generation_size=None, dynamic_sampling=False))

    def reward_roles(self) -> dict[str, RoleSpec]:
        return self._reward_models.roles()

    def roles(self) -> dict[str, RoleSpec]:
        roles = {"actor": RoleSpec(self.actor)}
        if self.ppo.actor_ema_eta is not None:
            roles[AVERAGE] = RoleSpec(replace(self.actor, gradient_checkpointing=False), starts_as="actor")
        if self.has_reference:
            roles["ref"] = reference_role(self.ref, self.actor)
        roles |= self.reward_roles()
        if self.teacher_role == "teacher":
            roles["teacher"] = RoleSpec(self.teacher)
        if has_model(self.prm):
            roles["prm"] = RoleSpec(self.prm, scalar_head=True)
        if self.ppo.disable_value:
            return roles
        critic, actor = self.critic, self.actor
        if not has_model(critic):
            critic = replace(critic, path=actor.path, config=actor.config, text_only=actor.text_only,
                             rotary_length=actor.rotary_length,
                             init_from_scratch=actor.init_from_scratch,
                             init_critic_from_actor=not actor.init_from_scratch)  # fmt: skip
        return {**roles, "critic": RoleSpec(critic, scalar_head=True)}

    def curriculum_rules(self) -> CurriculumRules:
        return replace(super().curriculum_rules(), filter_threshold=self.dataset_filter_threshold,
                       max_filtered=self.dataset_max_filter_percentage)  # fmt: skip

    def sampling_options(self) -> GenerationConfig | None:
        return self.ppo.gen

    def planned_sampling(self) -> GenerationConfig:
        if not self.env.cls:
            return self.ppo.gen
        return replace(self.ppo.gen, max_new_tokens=self.env.max_len(0, self.ppo.gen.max_new_tokens))

    def expected_new_tokens(self) -> float | None:
        if not self.env.cls:
            return super().expected_new_tokens()
        turns = self.planner.env_turns or self.env.max_turns
        return self.planner.new_tokens or 2 * turns * self.ppo.gen.max_new_tokens

    def max_episodes(self) -> int:
        return (self.env.max_episodes or 2 * self.ppo.gen.max_num_seqs) if self.env.cls else 0

    def environment_load(self) -> EnvironmentLoad | None:
        env, planner = self.env, self.planner
        if not env.cls or not planner.env_latency:
            return None
        per_process = env.max_concurrency if is_async_class(env.cls) else 1
        turns = planner.env_turns or env.max_turns
        return EnvironmentLoad(turns, planner.env_latency, env.workers, per_process, self.max_episodes())

    def samples_per_prompt(self) -> int:
        return self.ppo.generation_size or self.ppo.group_size

    def score_range(self) -> tuple[float, float]:
        """Return the lowest and the highest score of a response."""
        return (-inf, inf) if self.env.cls or self.score.type in COMPARED else (0.0, 1.0)

    def n_rewards(self) -> int:
        """Return the number of rewards of which advantages may read each by itself."""
        return 1

    def problems(self) -> list[str]:
        problems = unmet([
            (self.ppo.advantage is not Advantage["gdpo"] or self.n_rewards() > 1,
             "ppo.advantage=gdpo normalises each of several rewards: set reward.fns, or reward.fn and reward.group_fn"),
            (self.ppo.ref_ema_eta is None or not self.ref.offload,
             "ref.offload=True and ppo.ref_ema_eta: an updated reference cannot be offloaded"),
            (self.ppo.ref_ema_eta is None or not self.actor.lora.rank,
             "ppo.ref_ema_eta and actor.lora.rank: an average needs weights of its own, the reference is the base"),
            (self.has_reference or self.ref == ModelSpec(), "ref has options, but ppo.kl_in=none uses no reference"),
            (has_model(self.critic) or not self.critic.init_from_scratch,
             "critic.init_from_scratch=True needs critic.config=FOLDER_OR_JSON"),
            (not self.ppo.router_replay or self.actor_gen.backend is not Backend.vllm,
             "ppo.router_replay needs actor_gen.backend=native: vLLM does not return the experts of tokens here"),
            (self.dataset_max_filter_percentage or self.dataset_filter_threshold == 100.0,
             f"dataset_filter_threshold={self.dataset_filter_threshold} needs dataset_max_filter_percentage"),
            (self.ppo.advantage is not Advantage["process"] or has_model(self.prm),
             "ppo.advantage=process needs a process reward model: set prm.path"),
        ])  # fmt: skip
        if self.env.cls:
            is_plain = type(self).more_mfcs is PPOExperiment.more_mfcs
            problems += env_problems(self.env, self.ppo, self.max_staleness)
            problems += unmet([(is_plain, "env.cls: this algorithm is for single responses; use grpo, rloo, "
                                          "reinforce-pp, ppo-math or ppo")])  # fmt: skip
        problems += reference_problems(self.ref, self.actor)
        problems += teacher_problems(self.teacher, self.ppo, bool(self.env.cls), self.actor)
        problems += ppo_problems(self.ppo, self._batch) + eval_problems(self.evaluation, self.dataset.holds_out)
        return problems + self._reward_models.problems()

    def warnings(self) -> list[str]:
        env = env_warnings(self.env, self.ppo) if self.env.cls else []
        return ppo_warnings(self.ppo, self.max_staleness) + truncation_warnings(self.ppo, self.score_range()) + env

    def model_problems(self, models: Mapping[str, ModelConfig]) -> list[str]:
        actor = models.get("actor")
        return unmet([
            (not self.ppo.router_replay or actor is None or actor.n_experts,
             "ppo.router_replay=True needs a model with routed experts; those of actor.path are dense"),
        ])  # fmt: skip

    def row_problems(self, fields: Mapping[str, Any]) -> list[str]:
        template = self.ppo.distill.prompt
        return template_problems(template, fields) if template.count(PLACEHOLDER) == 1 else []

    def tokenizer_problems(self, n_tokens: int) -> list[str]:
        distill = self.ppo.distill
        is_valid = distill.objective is not Distillation.forward_kl or distill.top_k <= n_tokens
        return unmet([
            (is_valid, f"ppo.distill.top_k={distill.top_k} is larger than the tokenizer's {n_tokens} tokens"),
        ])  # fmt: skip
