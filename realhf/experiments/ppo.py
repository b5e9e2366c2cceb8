"""PPO with a reward model: six calls on four models."""

from dataclasses import dataclass, replace

from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import EvaluationConfig, ExperimentConfig, GenerationConfig, KLPlace, MFCConfig, ModelSpec, opt
from realhf.api.config.ensemble import EnsembleConfig
from realhf.api.config.preference import RewardModelType, ScoreConfig
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind, Sync
from realhf.experiments.options.ppo import eval_problems, eval_sampling, ppo_problems, ppo_warnings
from realhf.experiments.options.reward_models import RewardModels

LEARNED = ("rewards", "step_rewards", "ref_logprobs", "prox_logprobs", "values", "baseline", "advantages")
"""Keys that training reads beside those of the rollout, where they are made."""


@dataclass
class PPOExperiment(ExperimentConfig):
    """PPO against a reward model."""

    actor: ModelSpec = opt(ModelSpec, "the policy")
    critic: ModelSpec = opt(ModelSpec, "the value model (default: the actor's weights with a new scalar head)")
    ref: ModelSpec = opt(ModelSpec, "the reference (default: the actor as it starts)")
    rew: ModelSpec = opt(ModelSpec, "the reward model")
    score: ScoreConfig = opt(ScoreConfig, "how it scores")
    ensemble: EnsembleConfig = opt(EnsembleConfig, "several reward models instead of rew")
    prm: ModelSpec = opt(ModelSpec, "a process reward model, whose rewards of steps are added (ppo.prm)")
    actor_gen: MFCConfig = opt(MFCConfig, "rollout")
    rew_inf: MFCConfig = opt(MFCConfig, "rewards")
    prm_inf: MFCConfig = opt(MFCConfig, "rewards of steps")
    ref_inf: MFCConfig = opt(MFCConfig, "reference log-probs")
    critic_inf: MFCConfig = opt(MFCConfig, "values")
    actor_inf: MFCConfig = opt(MFCConfig, "old log-probs of the actor (ppo.recompute_logprobs)")
    actor_train: MFCConfig = opt(MFCConfig, "actor training")
    critic_train: MFCConfig = opt(MFCConfig, "critic training")
    ppo: PPOConfig = opt(PPOConfig, "the algorithm")
    evaluation: EvaluationConfig = opt(EvaluationConfig, "how held-out prompts are answered")

    task = Task.prompt

    @property
    def config(self) -> ExperimentConfig:
        return self

    def reward_mfcs(self) -> list[MFC]:
        """The calls that make ``rewards``, the last of which is ``rew_inf``."""
        return self._reward_models.calls(self.ppo, self._batch)

    @property
    def _reward_models(self) -> RewardModels:
        return RewardModels(self.rew, self.score, self.ensemble)

    @property
    def _batch(self) -> int:
        return self.dataset.train_bs_n_seqs

    @property
    def drops_rows(self) -> bool:
        """Whether the reward call keeps only some of the answers."""
        ppo = self.ppo
        return (ppo.generation_size or ppo.group_size) > ppo.group_size or ppo.dynamic_sampling

    @property
    def has_reference(self) -> bool:
        return self.ppo.kl_in is not KLPlace.none

    def graph(self) -> Graph:
        actor, critic = (InterfaceSpec(name, to_plain(self.ppo)) for name in ("ppo_actor", "ppo_critic"))
        # only rows that were kept, those with a reward, are worth a forward pass
        rows = ("tokens", "rewards") if self.drops_rows else ("tokens",)
        made = ("tokens", "prompt_mask", "logprobs", "truncated")
        batch, minibatches = self._batch, self.ppo.ppo_n_minibatches
        resamples = self.ppo.max_resamples if self.ppo.dynamic_sampling else 0
        mfcs = [MFC("actor_gen", "actor", Kind.GENERATE, actor, ("prompts", "row"), made, batch), *self.reward_mfcs()]
        mfcs[-1] = replace(mfcs[-1], resamples=max(resamples, 0))
        if _is_given(self.prm):
            score = ScoreConfig(RewardModelType.process, step_splitter=self.ppo.prm.step_splitter)
            steps = InterfaceSpec("labelled_rw", {"ppo": to_plain(PPOConfig()), "score": to_plain(score)})
            mfcs.append(MFC("prm_inf", "prm", Kind.INFERENCE, steps, ("prompt_mask", *rows), ("step_rewards",), batch))
        if self.has_reference:
            mfcs.append(MFC("ref_inf", "ref", Kind.INFERENCE, actor, rows, ("ref_logprobs",), batch))
        if self.ppo.recompute_logprobs:
            mfcs.append(MFC("actor_inf", "actor", Kind.INFERENCE, actor, rows, ("prox_logprobs",), batch))
        if not self.ppo.disable_value:
            mfcs.append(MFC("critic_inf", "critic", Kind.INFERENCE, critic, rows, ("values",), batch))
        mfcs += self.more_mfcs()
        learned = (*made, *(key for mfc in mfcs[1:] for key in mfc.outputs if key in LEARNED))
        if not self.ppo.disable_value:
            mfcs.append(MFC("critic_train", "critic", Kind.TRAIN, critic, learned, (), batch, minibatches))
        mfcs.append(MFC("actor_train", "actor", Kind.TRAIN, actor, learned, (), batch, minibatches))
        eta = self.ppo.ref_ema_eta
        syncs = () if eta is None else (Sync("actor_train", "actor", "ref", eta),)
        return Graph(tuple(mfcs), syncs, self._offloaded, tuple(self.eval_mfcs()))

    def more_mfcs(self) -> list[MFC]:
        """Calls that an algorithm adds between rewards and training."""
        return []

    def eval_mfcs(self) -> list[MFC]:
        """The calls on held-out prompts, if there are any: ``eval_gen``, and ``eval_rew`` as the last."""
        if not self.dataset.holds_out:
            return []
        how = InterfaceSpec("generation", to_plain(eval_sampling(self.ppo.gen, self.evaluation)))
        made = ("tokens", "prompt_mask", "truncated")
        answer = MFC("eval_gen", "actor", Kind.GENERATE, how, ("prompts", "row"), made, self._batch)
        judged = (replace(mfc, name=f"eval_{mfc.name.removesuffix('_inf')}") for mfc in self.as_judge().reward_mfcs())
        return [answer, *judged]

    def as_judge(self) -> "PPOExperiment":
        """Return the experiment with options under which every answer gets its reward, and none is dropped."""
        return replace(self, ppo=replace(self.ppo, generation_size=None, dynamic_sampling=False))

    @property
    def _offloaded(self) -> tuple[str, ...]:
        resting = {"ref", "prm", *self.reward_roles()}
        return tuple(role for role, model in self.roles().items() if role in resting and model.spec.offload)

    def reward_roles(self) -> dict[str, RoleSpec]:
        return self._reward_models.roles()

    def roles(self) -> dict[str, RoleSpec]:
        found = {"actor": RoleSpec(self.actor)}
        if self.has_reference:
            like_actor = replace(self.actor, gradient_checkpointing=False, offload=self.ref.offload)
            found["ref"] = RoleSpec(self.ref) if _is_given(self.ref) else RoleSpec(like_actor, starts_as="actor")
        found |= self.reward_roles()
        if _is_given(self.prm):
            found["prm"] = RoleSpec(self.prm, scalar_head=True)
        if self.ppo.disable_value:
            return found
        critic = self.critic
        if not _is_given(critic):
            like = self.actor
            critic = replace(critic, path=like.path, config=like.config, init_from_scratch=like.init_from_scratch,
                             init_critic_from_actor=not like.init_from_scratch)  # fmt: skip
        return {**found, "critic": RoleSpec(critic, scalar_head=True)}

    def placements(self) -> dict[str, MFCConfig]:
        calls = {
            **{mfc.name: self.rew_inf for mfc in self.reward_mfcs()},
            "actor_gen": self.actor_gen,
            "ref_inf": self.ref_inf,
            "critic_inf": self.critic_inf,
            "actor_inf": self.actor_inf,
            "prm_inf": self.prm_inf,
            "actor_train": self.actor_train,
            "critic_train": self.critic_train,
        }
        known = {m.name for m in self.graph().mfcs}
        return {name: options for name, options in calls.items() if name in known}

    def sampling_options(self) -> GenerationConfig | None:
        return self.ppo.gen

    def samples_per_prompt(self) -> int:
        return self.ppo.generation_size or self.ppo.group_size

    def problems(self) -> list[str]:
        checks = [
            (self.ppo.ref_ema_eta is None or not self.ref.offload,
             "ref.offload=True and ppo.ref_ema_eta: a reference that follows the actor does not rest"),
            (self.has_reference or self.ref == ModelSpec(), "ref has options, but with ppo.kl_in=none there is none"),
            (_is_given(self.ref) or replace(self.ref, offload=False) == ModelSpec(),
             "ref has options, but neither ref.path nor ref.config says which model it is"),
            (_is_given(self.critic) or not self.critic.init_from_scratch,
             "critic.init_from_scratch=True needs critic.config=FOLDER_OR_JSON"),
            (self.ppo.advantage is not Advantage["process"] or _is_given(self.prm),
             "ppo.advantage=process needs a process reward model: set prm.path"),
            (self.max_staleness >= 0, f"max_staleness must not be negative, got {self.max_staleness}"),
        ]  # fmt: skip
        wrong = [line for holds, line in checks if not holds]
        wrong += ppo_problems(self.ppo, self._batch) + eval_problems(self.evaluation, self.dataset.holds_out)
        return wrong + self._reward_models.problems()

    def warnings(self) -> list[str]:
        return ppo_warnings(self.ppo, self.max_staleness)


def _is_given(spec: ModelSpec) -> bool:
    return spec.path is not None or spec.config is not None
