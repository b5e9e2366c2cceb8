"""Preference learning without a reward model."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import MFCConfig, ModelSpec, opt
from realhf.api.config.preference import KTO_KL_KEYS, DPOConfig, PreferenceLoss
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.experiments.options.checks import unmet
from realhf.experiments.options.models import reference_problems, reference_role

REF = "ref_logprob_sums"
KL_REF = f"kl_{REF}"


@dataclass
class DPOExperiment(Experiment):
    """Direct preference optimisation and related algorithms: DPO-Positive, IPO, KTO, ORPO, SimPO."""

    actor: ModelSpec = opt(ModelSpec, "the policy")
    ref: ModelSpec = opt(ModelSpec, "the reference (default: the initial actor)")
    ref_inf: MFCConfig = opt(MFCConfig, "reference log-probs")
    actor_train: MFCConfig = opt(MFCConfig, "training call")
    dpo: DPOConfig = opt(DPOConfig, "the algorithm")

    shared_options = {"ref_kl_inf": "ref_inf"}

    @property
    def task(self) -> Task:
        return Task.outcome if self.dpo.unpaired else Task.pairs

    def graph(self) -> Graph:
        train, evaluate = (InterfaceSpec(name, to_plain(self.dpo)) for name in ("dpo", "dpo_evaluation"))
        text, batch, loss = ("tokens", "prompt_mask"), self.dataset.train_bs_n_seqs, self.dpo.loss
        inputs = (*text, *(("label",) if self.dpo.unpaired else ()), *((REF,) if loss.needs_ref else ()))
        inputs += (*KTO_KL_KEYS, KL_REF) if loss is PreferenceLoss.kto else ()
        ref_inf = MFC("ref_inf", "ref", Kind.INFERENCE, train, text, (REF,), batch)
        refs = [ref_inf] if loss.needs_ref else []
        if loss is PreferenceLoss.kto:
            aliases = (*KTO_KL_KEYS.items(), (KL_REF, REF))
            kl = replace(ref_inf, name="ref_kl_inf", inputs=tuple(KTO_KL_KEYS), outputs=(KL_REF,), aliases=aliases)
            refs.append(kl)
        steps = (*refs, MFC("actor_train", "actor", Kind.TRAIN, train, inputs, (), batch))
        evaluation = (*(replace(ref, name=ref.name.replace("_inf", "_eval")) for ref in refs),
                      MFC("actor_eval", "actor", Kind.INFERENCE, evaluate, inputs, (), batch))  # fmt: skip
        offloaded = ("ref",) if self.ref.offload and loss.needs_ref else ()
        return Graph(steps, (), offloaded, evaluation if self.dataset.holds_out else ())

    def roles(self) -> dict[str, RoleSpec]:
        ref = {"ref": reference_role(self.ref, self.actor)} if self.dpo.loss.needs_ref else {}
        return {"actor": RoleSpec(self.actor), **ref}

    def problems(self) -> list[str]:
        dpo, loss = self.dpo, self.dpo.loss
        smoothed = (PreferenceLoss.sigmoid, PreferenceLoss.positive)
        return unmet([
            (dpo.label_smoothing == 0 or loss in smoothed,
             f"dpo.label_smoothing is for dpo.loss=sigmoid and positive, not for {loss.name}"),
            (dpo.desirable_weight > 0 or dpo.undesirable_weight > 0,
             "dpo.desirable_weight and dpo.undesirable_weight must not both be 0"),
            (not dpo.unpaired or loss is PreferenceLoss.kto,
             f"dpo.unpaired=True is for dpo.loss=kto; {loss.name} compares two responses"),
            (loss.needs_ref or self.ref == ModelSpec(), f"ref has options, but dpo.loss={loss.name} uses no reference"),
        ]) + (reference_problems(self.ref, self.actor) if loss.needs_ref else [])  # fmt: skip
