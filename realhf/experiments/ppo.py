"""PPO with a reward model: six calls on four models."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec, PPOConfig, opt
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind, Sync
from realhf.experiments.sampling import sampling_problems


@dataclass
class PPOExperiment(ExperimentConfig):
    """PPO against a reward model."""

    actor: ModelSpec = opt(ModelSpec, "the policy")
    critic: ModelSpec = opt(ModelSpec, "the value model (default: the actor's weights with a new scalar head)")
    ref: ModelSpec = opt(ModelSpec, "the reference (default: the actor as it starts)")
    rew: ModelSpec = opt(ModelSpec, "the reward model")
    actor_gen: MFCConfig = opt(MFCConfig, "rollout")
    rew_inf: MFCConfig = opt(MFCConfig, "rewards")
    ref_inf: MFCConfig = opt(MFCConfig, "reference log-probs")
    critic_inf: MFCConfig = opt(MFCConfig, "values")
    actor_train: MFCConfig = opt(MFCConfig, "actor training")
    critic_train: MFCConfig = opt(MFCConfig, "critic training")
    ppo: PPOConfig = opt(PPOConfig, "the algorithm")

    task = Task.prompt

    @property
    def config(self) -> ExperimentConfig:
        return self

    def reward_mfc(self) -> MFC:
        interface = InterfaceSpec("paired_rw", to_plain(self.ppo))
        return MFC("rew_inf", "rew", Kind.INFERENCE, interface, ("tokens", "prompt_mask"), ("rewards",), self._batch)

    @property
    def _batch(self) -> int:
        return self.dataset.train_bs_n_seqs

    @property
    def best_of_n(self) -> bool:
        return (self.ppo.generation_size or self.ppo.group_size) > self.ppo.group_size

    def graph(self) -> Graph:
        actor, critic = (InterfaceSpec(name, to_plain(self.ppo)) for name in ("ppo_actor", "ppo_critic"))
        # with best-of-n only the rows that were kept, those with a reward, are worth a forward pass
        rows = ("tokens", "rewards") if self.best_of_n else ("tokens",)
        made = ("tokens", "prompt_mask", "logprobs", "truncated")
        learned: tuple[str, ...] = (*made, "rewards", "ref_logprobs")
        batch, minibatches = self._batch, self.ppo.ppo_n_minibatches
        mfcs = [
            MFC("actor_gen", "actor", Kind.GENERATE, actor, ("prompts",), made, batch),
            self.reward_mfc(),
            MFC("ref_inf", "ref", Kind.INFERENCE, actor, rows, ("ref_logprobs",), batch),
        ]
        if not self.ppo.disable_value:
            learned = (*learned, "values")
            mfcs += [
                MFC("critic_inf", "critic", Kind.INFERENCE, critic, rows, ("values",), batch),
                MFC("critic_train", "critic", Kind.TRAIN, critic, learned, (), batch, minibatches),
            ]
        mfcs.append(MFC("actor_train", "actor", Kind.TRAIN, actor, learned, (), batch, minibatches))
        eta = self.ppo.ref_ema_eta
        syncs = () if eta is None else (Sync("actor_train", "actor", "ref", eta),)
        return Graph(tuple(mfcs), syncs, self._offloaded)

    @property
    def _offloaded(self) -> tuple[str, ...]:
        resting = {"ref": self.ref, **({"rew": self.rew} if "rew" in self.reward_roles() else {})}
        return tuple(role for role, spec in resting.items() if spec.offload)

    def reward_roles(self) -> dict[str, RoleSpec]:
        return {"rew": RoleSpec(self.rew, scalar_head=True)}

    def roles(self) -> dict[str, RoleSpec]:
        ref = RoleSpec(self.ref)
        if not _is_given(self.ref):
            like_actor = replace(self.actor, gradient_checkpointing=False, offload=self.ref.offload)
            ref = RoleSpec(like_actor, starts_as="actor")
        found = {"actor": RoleSpec(self.actor), "ref": ref, **self.reward_roles()}
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
            "actor_gen": self.actor_gen,
            "rew_inf": self.rew_inf,
            "ref_inf": self.ref_inf,
            "critic_inf": self.critic_inf,
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
        ppo = self.ppo
        checks = [
            (ppo.group_size >= 1, f"ppo.group_size must be positive, got {ppo.group_size}"),
            (ppo.generation_size is None or ppo.generation_size >= ppo.group_size,
             f"ppo.generation_size={ppo.generation_size} is smaller than ppo.group_size={ppo.group_size}"),
            (not ppo.group_adv_norm or ppo.group_size > 1, "ppo.group_adv_norm needs ppo.group_size > 1"),
            (1 <= ppo.ppo_n_minibatches <= self._batch,
             f"ppo.ppo_n_minibatches={ppo.ppo_n_minibatches} does not fit dataset.train_bs_n_seqs={self._batch}"),
            (0 <= ppo.discount <= 1, f"ppo.discount must be in [0, 1], got {ppo.discount}"),
            (0 <= ppo.gae_lambda <= 1, f"ppo.gae_lambda must be in [0, 1], got {ppo.gae_lambda}"),
            (ppo.ref_ema_eta is None or 0 <= ppo.ref_ema_eta <= 1,
             f"ppo.ref_ema_eta must be in [0, 1], got {ppo.ref_ema_eta}"),
            (ppo.ref_ema_eta is None or not self.ref.offload,
             "ref.offload=True and ppo.ref_ema_eta: a reference that follows the actor does not rest"),
            (ppo.eps_clip > 0, f"ppo.eps_clip must be positive, got {ppo.eps_clip}"),
            (ppo.value_eps_clip > 0, f"ppo.value_eps_clip must be positive, got {ppo.value_eps_clip}"),
            (ppo.kl_ctl >= 0, f"ppo.kl_ctl must not be negative, got {ppo.kl_ctl}"),
            (ppo.value_loss_type in ("mse", "huber"),
             f"ppo.value_loss_type must be mse or huber, got {ppo.value_loss_type}"),
            (ppo.gen.n == 1, f"ppo.gen.n={ppo.gen.n} is for the experiment gen; set ppo.group_size"),
            (_is_given(self.ref) or replace(self.ref, offload=False) == ModelSpec(),
             "ref has options, but neither ref.path nor ref.config says which model it is"),
            (_is_given(self.critic) or not self.critic.init_from_scratch,
             "critic.init_from_scratch=True needs critic.config=FOLDER_OR_JSON"),
        ]  # fmt: skip
        return [line for holds, line in checks if not holds] + sampling_problems("ppo.gen", ppo.gen)


def _is_given(spec: ModelSpec) -> bool:
    return spec.path is not None or spec.config is not None
