"""Reward models from pairs of responses, ranked lists, labelled responses or labelled steps."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import MFCConfig, ModelSpec, opt
from realhf.api.config.preference import RewardModelType, RWConfig
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.experiments.options.checks import unmet

LABEL_INPUTS = {RewardModelType.outcome: ("tokens", "label"), RewardModelType.process: ("tokens", "step_labels")}


@dataclass
class RewardModelExperiment(Experiment):
    """Reward model: a scalar head at the last token, or at the end of every step."""

    model: ModelSpec = opt(ModelSpec, "the model; the head of a language model is replaced by a scalar head")
    rw: RWConfig = opt(RWConfig, "the loss")
    rw_train: MFCConfig = opt(MFCConfig, "training call")
    is_reward_model: bool = opt(False, "model.path already has a scalar head, which is trained further")

    @property
    def task(self) -> Task:
        return Task[self.rw.type.name]

    def graph(self) -> Graph:
        interface, batch = InterfaceSpec("reward_model", to_plain(self.rw)), self.dataset.train_bs_n_seqs
        inputs = LABEL_INPUTS.get(self.rw.type, ("tokens", "prompt_mask"))
        train = MFC("rw_train", "model", Kind.TRAIN, interface, inputs, (), batch)
        evaluation = MFC("rw_eval", "model", Kind.INFERENCE, interface, inputs, (), batch)
        return Graph((train,), evaluation=(evaluation,) if self.dataset.holds_out else ())

    def roles(self) -> dict[str, RoleSpec]:
        fresh_head = not self.is_reward_model and not self.model.init_from_scratch
        return {"model": RoleSpec(replace(self.model, init_critic_from_actor=fresh_head), scalar_head=True)}

    def problems(self) -> list[str]:
        reg = self.rw.score_l2_reg
        return unmet([
            (reg == 0 or self.rw.type not in LABEL_INPUTS,
             f"rw.score_l2_reg={reg} is for pairs and ranked lists, not for rw.type={self.rw.type.name}"),
        ])  # fmt: skip
