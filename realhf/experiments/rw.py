"""A Bradley-Terry reward model from pairs of answers."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec, PPOConfig, opt
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind


@dataclass
class RewardModelExperiment(ExperimentConfig):
    """Paired reward model: a scalar head at the last token."""

    model: ModelSpec = opt(ModelSpec, "the model; the head of a language model is replaced by a scalar one")
    rw_train: MFCConfig = opt(MFCConfig, "training call")
    is_reward_model: bool = opt(False, "model.path already ends in a scalar head: go on training it")

    task = Task.pairs

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        interface = InterfaceSpec("paired_rw", to_plain(PPOConfig()))
        batch = self.dataset.train_bs_n_seqs
        return Graph((MFC("rw_train", "model", Kind.TRAIN, interface, ("tokens", "prompt_mask"), batch_size=batch),))

    def roles(self) -> dict[str, RoleSpec]:
        fresh_head = not self.is_reward_model and not self.model.init_from_scratch
        return {"model": RoleSpec(replace(self.model, init_critic_from_actor=fresh_head), scalar_head=True)}

    def placements(self) -> dict[str, MFCConfig]:
        return {"rw_train": self.rw_train}

    def sampling_options(self) -> GenerationConfig | None:
        return None

    def samples_per_prompt(self) -> int:
        return 1

    def problems(self) -> list[str]:
        pairs = self.dataset.max_pairs_per_prompt
        return [f"dataset.max_pairs_per_prompt must be positive, got {pairs}"] if pairs < 1 else []
