"""Supervised fine-tuning."""

from dataclasses import dataclass

from realhf.api.config import MFCConfig, ModelSpec, opt
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind


@dataclass
class SFTExperiment(Experiment):
    """Supervised fine-tuning on prompt and answer."""

    model: ModelSpec = opt(ModelSpec, "the model")
    sft_train: MFCConfig = opt(MFCConfig, "training call")
    seq_mean: bool = opt(False, "average over the tokens of each response, then over responses")

    task = Task.sft

    def graph(self) -> Graph:
        interface = InterfaceSpec("sft", {"seq_mean": self.seq_mean})
        inputs, batch = ("tokens", "prompt_mask"), self.dataset.train_bs_n_seqs
        train = MFC("sft_train", "model", Kind.TRAIN, interface, inputs, (), batch)
        evaluation = MFC("sft_eval", "model", Kind.INFERENCE, interface, inputs, (), batch)
        return Graph((train,), evaluation=(evaluation,) if self.dataset.holds_out else ())

    def roles(self) -> dict[str, RoleSpec]:
        return {"model": RoleSpec(self.model)}
