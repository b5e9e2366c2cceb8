"""A reward model, from pairs of answers, ranked lists, labelled answers or labelled steps."""

from dataclasses import dataclass, replace

from realhf.api.codec import to_plain
from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec, opt
from realhf.api.config.preference import RewardModelType, RWConfig
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind

READ = {RewardModelType.outcome: ("tokens", "label"), RewardModelType.process: ("tokens", "step_labels")}


@dataclass
class RewardModelExperiment(ExperimentConfig):
    """Reward model: a scalar head at the last token, or at the end of every step."""

    model: ModelSpec = opt(ModelSpec, "the model; the head of a language model is replaced by a scalar one")
    rw: RWConfig = opt(RWConfig, "what is learned")
    rw_train: MFCConfig = opt(MFCConfig, "training call")
    is_reward_model: bool = opt(False, "model.path already ends in a scalar head: go on training it")

    @property
    def task(self) -> Task:
        return Task[self.rw.type.name]

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        interface, batch = InterfaceSpec("reward_model", to_plain(self.rw)), self.dataset.train_bs_n_seqs
        read = READ.get(self.rw.type, ("tokens", "prompt_mask"))
        trial = MFC("rw_eval", "model", Kind.INFERENCE, interface, read, (), batch)
        return Graph(
            (MFC("rw_train", "model", Kind.TRAIN, interface, read, (), batch),),
            evaluation=(trial,) if self.dataset.holds_out else (),
        )

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
        reg = self.rw.score_l2_reg
        pairs = self.dataset.max_pairs_per_prompt
        checks = [
            (pairs >= 1, f"dataset.max_pairs_per_prompt must be positive, got {pairs}"),
            (reg >= 0, f"rw.score_l2_reg must not be negative, got {reg}"),
            (reg == 0 or self.rw.type not in READ, f"rw.score_l2_reg={reg} is for scores that are compared, "
             f"not for rw.type={self.rw.type.name}"),
        ]  # fmt: skip
        return [line for holds, line in checks if not holds]
