"""Generation alone: every prompt of a file gets its answers, written to generations/."""

from dataclasses import dataclass

from realhf.api.codec import to_plain
from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec, opt
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.experiments.sampling import sampling_problems


@dataclass
class GenerationExperiment(ExperimentConfig):
    """Sample answers to the prompts of a file."""

    model: ModelSpec = opt(ModelSpec, "the model")
    gen: MFCConfig = opt(MFCConfig, "generation call")
    sampling: GenerationConfig = opt(GenerationConfig, "how answers are sampled")
    n_logged_generations: int = opt(-1, "rows written to generations/ per step, -1 for all")

    task = Task.prompt

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        interface = InterfaceSpec("generation", to_plain(self.sampling))
        outputs = ("tokens", "prompt_mask", "truncated")
        batch = self.dataset.train_bs_n_seqs
        return Graph((MFC("gen", "model", Kind.GENERATE, interface, ("prompts", "row"), outputs, batch),))

    def roles(self) -> dict[str, RoleSpec]:
        return {"model": RoleSpec(self.model)}

    def placements(self) -> dict[str, MFCConfig]:
        return {"gen": self.gen}

    def sampling_options(self) -> GenerationConfig | None:
        return self.sampling

    def samples_per_prompt(self) -> int:
        return self.sampling.n

    def problems(self) -> list[str]:
        return sampling_problems("sampling", self.sampling)
