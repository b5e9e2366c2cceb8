"""Learning from preferences without a reward model: reference log-probabilities, then a step of the policy."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec, opt
from realhf.api.config.preference import KTO_KL_KEYS, DPOConfig, PreferenceLoss
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind

REF = "ref_logprob_sums"
KL_REF = f"kl_{REF}"


@dataclass
class DPOExperiment(ExperimentConfig):
    """Direct preference optimisation and its kin: DPO-Positive, IPO, KTO, ORPO, SimPO."""

    actor: ModelSpec = opt(ModelSpec, "the policy")
    ref: ModelSpec = opt(ModelSpec, "the reference (default: the actor as it starts)")
    ref_inf: MFCConfig = opt(MFCConfig, "reference log-probs")
    actor_train: MFCConfig = opt(MFCConfig, "training call")
    dpo: DPOConfig = opt(DPOConfig, "the algorithm")

    @property
    def task(self) -> Task:
        return Task.outcome if self.dpo.unpaired else Task.pairs

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        train, trial = (InterfaceSpec(name, to_plain(self.dpo)) for name in ("dpo", "dpo_evaluation"))
        text, batch = ("tokens", "prompt_mask"), self.dataset.train_bs_n_seqs
        read = (*text, *(("label",) if self.dpo.unpaired else ()), *((REF,) if self.dpo.loss.needs_ref else ()))
        read += (*KTO_KL_KEYS, KL_REF) if self.dpo.loss is PreferenceLoss.kto else ()
        steps = [MFC("actor_train", "actor", Kind.TRAIN, train, read, (), batch)]
        trials = [MFC("actor_eval", "actor", Kind.INFERENCE, trial, read, (), batch)]
        if self.dpo.loss.needs_ref:
            ref_inf = MFC("ref_inf", "ref", Kind.INFERENCE, train, text, (REF,), batch)
            steps.insert(0, ref_inf)
            trials.insert(0, replace(ref_inf, name="ref_eval"))
        if self.dpo.loss is PreferenceLoss.kto:
            known_as = (*KTO_KL_KEYS.items(), (KL_REF, REF))
            ref_kl = replace(ref_inf, name="ref_kl_inf", inputs=tuple(KTO_KL_KEYS), outputs=(KL_REF,), aliases=known_as)
            steps.insert(1, ref_kl)
            trials.insert(1, replace(ref_kl, name="ref_kl_eval"))
        return Graph(tuple(steps), (), self._offloaded, tuple(trials) if self.dataset.holds_out else ())

    @property
    def _offloaded(self) -> tuple[str, ...]:
        return ("ref",) if self.ref.offload and self.dpo.loss.needs_ref else ()

    def roles(self) -> dict[str, RoleSpec]:
        actor = RoleSpec(self.actor)
        if not self.dpo.loss.needs_ref:
            return {"actor": actor}
        if self.ref.path is not None or self.ref.config is not None:
            return {"actor": actor, "ref": RoleSpec(self.ref)}
        like_actor = replace(self.actor, gradient_checkpointing=False, offload=self.ref.offload)
        return {"actor": actor, "ref": RoleSpec(like_actor, starts_as="actor")}

    def placements(self) -> dict[str, MFCConfig]:
        calls = {"ref_inf": self.ref_inf, "ref_kl_inf": self.ref_inf, "actor_train": self.actor_train}
        return {mfc.name: calls[mfc.name] for mfc in self.graph().mfcs}

    def sampling_options(self) -> GenerationConfig | None:
        return None

    def samples_per_prompt(self) -> int:
        return 1

    def problems(self) -> list[str]:
        dpo, loss = self.dpo, self.dpo.loss
        smoothed = (PreferenceLoss.sigmoid, PreferenceLoss.positive)
        given = self.ref.path is not None or self.ref.config is not None
        checks = [
            (dpo.beta > 0, f"dpo.beta must be positive, got {dpo.beta}"),
            (0 <= dpo.label_smoothing < 0.5,
             f"dpo.label_smoothing must be at least 0 and below 0.5, got {dpo.label_smoothing}"),
            (dpo.label_smoothing == 0 or loss in smoothed,
             f"dpo.label_smoothing is for dpo.loss=sigmoid and positive, not for {loss.name}"),
            (dpo.positive_lambda >= 0, f"dpo.positive_lambda must not be negative, got {dpo.positive_lambda}"),
            (min(dpo.desirable_weight, dpo.undesirable_weight) >= 0 < dpo.desirable_weight + dpo.undesirable_weight,
             f"dpo.desirable_weight={dpo.desirable_weight} and dpo.undesirable_weight={dpo.undesirable_weight} "
             "must not be negative, nor both be 0"),
            (not dpo.unpaired or loss is PreferenceLoss.kto,
             f"dpo.unpaired=True is for dpo.loss=kto; {loss.name} compares two answers"),
            (loss.needs_ref or self.ref == ModelSpec(),
             f"ref has options, but dpo.loss={loss.name} needs no reference"),
            (not loss.needs_ref or given or replace(self.ref, offload=False) == ModelSpec(),
             "ref has options, but neither ref.path nor ref.config says which model it is"),
        ]  # fmt: skip
        return [line for holds, line in checks if not holds]
