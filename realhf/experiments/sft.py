"""Supervised fine-tuning: one model, one call."""

from dataclasses import dataclass

from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec, opt
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind


@dataclass
class SFTExperiment(ExperimentConfig):
    """Supervised fine-tuning on prompt and answer."""

    model: ModelSpec = opt(ModelSpec, "the model")
    sft_train: MFCConfig = opt(MFCConfig, "training call")
    seq_mean: bool = opt(False, "average over the tokens of an answer first, then over answers")

    task = Task.sft

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        interface = InterfaceSpec("sft", {"seq_mean": self.seq_mean})
        read, batch = ("tokens", "prompt_mask"), self.dataset.train_bs_n_seqs
        trial = MFC("sft_eval", "model", Kind.INFERENCE, interface, read, (), batch)
        return Graph(
            (MFC("sft_train", "model", Kind.TRAIN, interface, read, (), batch),),
            evaluation=(trial,) if self.dataset.holds_out else (),
        )

    def roles(self) -> dict[str, RoleSpec]:
        return {"model": RoleSpec(self.model)}

    def placements(self) -> dict[str, MFCConfig]:
        return {"sft_train": self.sft_train}

    def sampling_options(self) -> GenerationConfig | None:
        return None

    def samples_per_prompt(self) -> int:
        return 1

    def problems(self) -> list[str]:
        return []
