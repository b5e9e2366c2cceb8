"""Generation alone: every prompt of a file gets its answers, judged on request, written to generations/."""

from dataclasses import dataclass

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.codec import to_plain
from realhf.api.config import ExperimentConfig, GenerationConfig, MFCConfig, ModelSpec, RewardConfig, opt
from realhf.api.experiment import RoleSpec, Task
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.experiments.options.sampling import sampling_problems
from realhf.experiments.options.verifier import reward_problems, reward_task


@dataclass
class GenerationExperiment(ExperimentConfig):
    """Sample answers to the prompts of a file."""

    model: ModelSpec = opt(ModelSpec, "the model")
    gen: MFCConfig = opt(MFCConfig, "generation call")
    sampling: GenerationConfig = opt(GenerationConfig, "how answers are sampled")
    n_logged_generations: int = opt(-1, "rows written to generations/ per step, -1 for all")
    judge: bool = opt(False, "judge the answers")
    reward: RewardConfig = opt(RewardConfig, "the verifier, with judge=True")
    rew_inf: MFCConfig = opt(MFCConfig, "verifier call")

    @property
    def task(self) -> Task:
        return reward_task(self.reward) if self.judge else Task.prompt

    @property
    def config(self) -> ExperimentConfig:
        return self

    def graph(self) -> Graph:
        batch = self.dataset.train_bs_n_seqs
        answer = ("tokens", "prompt_mask")
        sampled = InterfaceSpec("generation", to_plain(self.sampling))
        mfcs = [MFC("gen", "model", Kind.GENERATE, sampled, ("prompts", "row"), (*answer, "truncated"), batch)]
        if self.judge:
            verified = InterfaceSpec("verifier", {"reward": to_plain(self.reward), "ppo": to_plain(PPOConfig())})
            mfcs.append(MFC("rew_inf", None, Kind.INFERENCE, verified, (*answer, "row"), ("rewards",), batch))
        return Graph(tuple(mfcs))

    def roles(self) -> dict[str, RoleSpec]:
        return {"model": RoleSpec(self.model)}

    def placements(self) -> dict[str, MFCConfig]:
        return {"gen": self.gen, **({"rew_inf": self.rew_inf} if self.judge else {})}

    def sampling_options(self) -> GenerationConfig | None:
        return self.sampling

    def samples_per_prompt(self) -> int:
        return self.sampling.n

    def problems(self) -> list[str]:
        return sampling_problems("sampling", self.sampling) + (reward_problems(self.reward) if self.judge else [])
