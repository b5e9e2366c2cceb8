"""References, reward models and verifiers: roles, calls that produce ``rewards``, and normalisation of scores."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from realhf.algorithms.distillation.options import PLACEHOLDER, Distillation, DistillConfig
from realhf.algorithms.policy_gradient.config import Advantage, PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import EnvConfig, GenerationConfig, ModelSpec, RewardConfig
from realhf.api.config.preference import EnsembleConfig, Objective, RewardModelType, ScoreConfig
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.base.errors import damage_reported
from realhf.experiments.options.checks import unmet
from realhf.rewards.registry import VERIFIERS, builtin_verifier, fns_of

COMPARED = (RewardModelType.pairs, RewardModelType.ranked)
RESPONSE = ("tokens", "prompt_mask")
TEACHER_KEYS = ("teacher_logprobs", "teacher_top_logprobs")
STATISTICS = "evaluation.json"


def has_model(spec: ModelSpec) -> bool:
    return spec.path is not None or spec.config is not None


def reference_role(ref: ModelSpec, actor: ModelSpec) -> RoleSpec:
    """Return the role of the reference model, by default a copy of the initial actor."""
    if has_model(ref):
        return RoleSpec(ref)
    initial = replace(actor, gradient_checkpointing=False, offload=ref.offload)
    return RoleSpec(initial, starts_as="actor", is_base=bool(actor.lora.rank) and not actor.lora.init_from)


def teacher_call(role: str, ppo: PPOConfig, rows: tuple[str, ...], batch: int) -> MFC:
    """Return the call that computes log-probabilities of the teacher on the keys ``rows`` of responses."""
    distill, gen = ppo.distill, ppo.gen
    temperature = 1.0 if gen.greedy else gen.temperature or 1.0
    interface = InterfaceSpec("teacher", {"distill": to_plain(distill), "temperature": temperature})
    output = TEACHER_KEYS[distill.objective is Distillation.forward_kl]
    inputs = (*rows, "prompt_mask", *(("row",) if distill.prompt else ()))
    return MFC("teacher_inf", role, Kind.INFERENCE, interface, inputs, (output,), batch)


def teacher_problems(teacher: ModelSpec, ppo: PPOConfig, has_env: bool, actor: ModelSpec) -> list[str]:
    distill = ppo.distill
    if not has_model(teacher) and not distill.prompt:
        return unmet([
            (distill == DistillConfig(), "ppo.distill has options, but there is no teacher: set teacher.path"),
            (teacher == ModelSpec(), "teacher has options, but teacher.path and teacher.config are not set"),
        ])  # fmt: skip
    return unmet([
        (distill.objective is not Distillation.reverse_kl_reward or ppo.advantage.value == "gae",
         f"ppo.distill.objective=reverse_kl_reward is a reward of tokens, which ppo.advantage={ppo.advantage.value} "
         "does not read; use ppo.advantage=gae"),
        (distill.ema_eta is None or (has_model(teacher) and not teacher.offload and not actor.lora.rank),
         "ppo.distill.ema_eta needs weights of its own: teacher.path, without teacher.offload or actor.lora"),
        (not (distill.prompt and has_env), "ppo.distill.prompt is for single responses; not with env.cls"),
        (not distill.prompt or distill.prompt.count(PLACEHOLDER) == 1,
         f"ppo.distill.prompt={distill.prompt!r} must contain {PLACEHOLDER} once"),
    ])  # fmt: skip


def reference_problems(ref: ModelSpec, actor: ModelSpec) -> list[str]:
    """Return a problem if the default reference has options other than ``offload``, or a base of adapters has that."""
    if not has_model(ref) and ref.offload and actor.lora.rank:
        return ["ref.offload=True and actor.lora.rank: the reference is the base of the actor, which is in use"]
    if has_model(ref) or replace(ref, offload=False) == ModelSpec():
        return []
    return ["ref has options, but ref.path and ref.config are not set"]


@dataclass(frozen=True)
class RewardModels:
    """The options ``rew``, ``score`` and ``ensemble`` of an experiment."""

    rew: ModelSpec
    score: ScoreConfig
    ensemble: EnsembleConfig

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """The model of each role: ``rew``, or ``rew_0``, ``rew_1``, ... with the options of ``rew``."""
        members = self.ensemble.members
        return {f"rew_{i}": replace(self.rew, path=path) for i, path in enumerate(members)} or {"rew": self.rew}

    def roles(self) -> dict[str, RoleSpec]:
        return {role: RoleSpec(spec, scalar_head=True) for role, spec in self.specs.items()}

    def calls(self, ppo: PPOConfig, batch: int) -> list[MFC]:
        """Return ``rew_inf``, preceded by ``rew_i_inf`` for every member.

        Bias, scaling and selection of ``ppo`` apply to ``rew_inf``; members return scores, normalised with
        ``score.normalise``.
        """
        if not self.ensemble.members:
            return [score_call("rew", self.score, self.rew, ppo, batch)]
        calls = [score_call(role, self.score, spec, PPOConfig(), batch) for role, spec in self.specs.items()]
        scores = tuple(f"score_{i}" for i in range(len(calls)))
        members = [replace(call, outputs=(key,), aliases=((key, "rewards"),))
                   for call, key in zip(calls, scores, strict=True)]  # fmt: skip
        combine = InterfaceSpec("ensemble", {"ensemble": to_plain(self.ensemble), "ppo": to_plain(ppo)})
        return [*members, MFC("rew_inf", None, Kind.INFERENCE, combine, ("prompt_mask", *scores), ("rewards",), batch)]

    @property
    def is_set(self) -> bool:
        return has_model(self.rew) or bool(self.ensemble.members)

    def score_calls(self, batch: int) -> list[MFC]:
        """Return the calls that end with one whose output is ``model_scores``, to which another call adds its own."""
        *members, last = self.calls(PPOConfig(), batch)
        key = "model_scores"
        return [*members, replace(last, name=f"rew_{len(members)}_inf", outputs=(key,), aliases=((key, "rewards"),))]

    def problems(self) -> list[str]:
        ensemble, rew = self.ensemble, self.rew.path or self.rew.config
        duplicates = sorted({path for path in ensemble.members if ensemble.members.count(path) > 1})
        problems = unmet([
            (not (ensemble.members and rew), f"rew is {rew}, but rewards come from ensemble.members"),
            (not duplicates, f"ensemble.members has duplicates: {', '.join(duplicates)}"),
            (ensemble.members or ensemble.objective is Objective.mean,
             f"ensemble.objective={ensemble.objective.name}, but ensemble.members is empty"),
        ])  # fmt: skip
        return problems + [line for spec in self.specs.values() for line in score_problems(self.score, spec)]


def score_call(role: str, score: ScoreConfig, rew: ModelSpec, ppo: PPOConfig, batch: int) -> MFC:
    """Return the call that scores responses with the reward model ``rew``."""
    interface = InterfaceSpec("labelled_rw", {"ppo": to_plain(ppo), "score": to_plain(score)})
    if score.type in COMPARED:
        moments = score_moments(rew) if score.normalise else None
        interface = InterfaceSpec("paired_rw", to_plain(normalised(ppo, *moments) if moments else ppo))
    return MFC(f"{role}_inf", role, Kind.INFERENCE, interface, RESPONSE, ("rewards",), batch)


def normalised(ppo: PPOConfig, mean: float, std: float) -> PPOConfig:
    """Return the options with bias and scaling applied to ``(score - mean) / std``."""
    bias, scaling = mean + ppo.reward_output_bias * std, ppo.reward_output_scaling / std
    return replace(ppo, reward_output_bias=bias, reward_output_scaling=scaling)


def score_moments(rew: ModelSpec) -> tuple[float, float] | None:
    """Return the mean and the unbiased standard deviation of a model's scores on held-out rows, or None.

    ``rw`` writes them to the folder of the model if it has held-out rows.
    """
    file = Path(rew.path or "") / STATISTICS
    if not file.is_file():
        return None
    with damage_reported(file, "evaluate the reward model again, or remove the file"):
        stored = json.loads(file.read_text())
        mean, square = (stored["metrics"].get(f"rw_eval/{name}") for name in ("score", "score_sq"))
        count = stored["counts"].get("rw_eval/score", 0.0)
    if mean is None or square is None or count < 2 or square <= mean**2:
        return None
    return mean, ((square - mean**2) * count / (count - 1)) ** 0.5


def score_problems(score: ScoreConfig, rew: ModelSpec) -> list[str]:
    if not score.normalise:
        return []
    if score.type not in COMPARED:
        return [f"score.normalise=True is for unbounded scores; score.type={score.type.name} returns probabilities"]
    if score_moments(rew) is None:
        file = Path(rew.path or "") / STATISTICS
        advice = "train the reward model with dataset.eval_path or dataset.eval_fraction"
        return [f"score.normalise=True: no scores of held-out rows in {file}; {advice}"]
    return []


def reward_task(reward: RewardConfig) -> Task:
    """Return the kind of dataset rows that the rewards need; of several, code has priority over math."""
    tasks = [VERIFIERS[name].task for fn in fns_of(reward) if (name := builtin_verifier(fn))]
    return min(tasks, key=(Task.code, Task.math, Task.prompt).index, default=Task.prompt)


def sampling_call(name: str, role: str, sampling: GenerationConfig, batch: int) -> MFC:
    interface = InterfaceSpec("generation", to_plain(sampling))
    return MFC(name, role, Kind.GENERATE, interface, ("prompts", "row"), (*RESPONSE, "truncated"), batch)


def episode_call(name: str, role: str, env: EnvConfig, gen: GenerationConfig, n: int, batch: int) -> MFC:
    """Return the call that plays ``n`` episodes per prompt."""
    interface = InterfaceSpec("episodes", {"env": to_plain(env), "gen": to_plain(gen), "n": n})
    outputs = (*RESPONSE, "logprobs", "turn_rewards", "episode", "truncated", "scores")
    call = MFC(name, role, Kind.GENERATE, interface, ("prompts", "row"), outputs, batch)
    return replace(call, outputs=(*outputs, "versions"), carried=("carried",)) if env.partial_tokens else call


def episode_rewards(name: str, ppo: PPOConfig, batch: int, model_scores: tuple[str, ...] = ()) -> MFC:
    """Return the call that adds ``model_scores``, of reward models, to the rewards of episodes."""
    interface = InterfaceSpec("episode_rewards", to_plain(ppo))
    inputs = ("prompt_mask", "episode", "scores", *model_scores)
    return MFC(name, None, Kind.INFERENCE, interface, inputs, ("rewards",), batch)


def verifier_call(
    name: str, reward: RewardConfig, ppo: PPOConfig, batch: int, model_scores: tuple[str, ...] = ()
) -> MFC:
    """Return the call that verifies responses, and adds ``model_scores`` of a reward model to the rewards."""
    interface = InterfaceSpec("verifier", {"reward": to_plain(reward), "ppo": to_plain(ppo)})
    outputs = ("rewards", "reward_parts") if ppo.advantage is Advantage["gdpo"] else ("rewards",)
    return MFC(name, None, Kind.INFERENCE, interface, (*RESPONSE, "row", *model_scores), outputs, batch)
