"""The reward model or ensemble of an experiment: roles, and the calls that produce ``rewards``."""

from dataclasses import dataclass, replace

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import ModelSpec
from realhf.api.config.preference import EnsembleConfig, Objective, ScoreConfig
from realhf.api.experiment import RoleSpec
from realhf.api.graph import MFC, InterfaceSpec, Kind
from realhf.experiments.options.score import score_interface, score_problems

RESPONSE = ("tokens", "prompt_mask")


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
            interface = score_interface(self.score, self.rew, ppo)
            return [MFC("rew_inf", "rew", Kind.INFERENCE, interface, RESPONSE, ("rewards",), batch)]
        members = [
            MFC(f"{role}_inf", role, Kind.INFERENCE, score_interface(self.score, spec, PPOConfig()), RESPONSE,
                (f"score_{i}",), batch, aliases=((f"score_{i}", "rewards"),))
            for i, (role, spec) in enumerate(self.specs.items())
        ]  # fmt: skip
        combine = InterfaceSpec("ensemble", {"ensemble": to_plain(self.ensemble), "ppo": to_plain(ppo)})
        scores = tuple(key for mfc in members for key in mfc.outputs)
        return [*members, MFC("rew_inf", None, Kind.INFERENCE, combine, ("prompt_mask", *scores), ("rewards",), batch)]

    def problems(self) -> list[str]:
        ensemble, rew = self.ensemble, self.rew.path or self.rew.config
        duplicates = sorted({path for path in ensemble.members if ensemble.members.count(path) > 1})
        checks = [
            (not (ensemble.members and rew), f"rew is {rew}, but rewards come from ensemble.members"),
            (not duplicates, f"ensemble.members has duplicates: {', '.join(duplicates)}"),
            (ensemble.members or ensemble.objective is Objective.mean,
             f"ensemble.objective={ensemble.objective.name}, but ensemble.members is empty"),
            (ensemble.uwo_weight >= 0, f"ensemble.uwo_weight must not be negative, got {ensemble.uwo_weight}"),
        ]  # fmt: skip
        scores = [line for spec in self.specs.values() for line in score_problems(self.score, spec)]
        return [line for holds, line in checks if not holds] + scores
