"""Generation: samples responses to every prompt of a file, and verifies them on request."""

from dataclasses import dataclass

from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.api.config import GenerationConfig, MFCConfig, ModelSpec, RewardConfig
from realhf.api.config.option import COUNT_OR_ALL, opt
from realhf.api.experiment import Experiment, RoleSpec, Task
from realhf.api.graph import Graph
from realhf.experiments.options.checks import reward_problems, sampling_problems
from realhf.experiments.options.models import reward_task, sampling_call, verifier_call


@dataclass
class GenerationExperiment(Experiment):
    """Sample responses to the prompts of a file; they are written to generations/."""

    model: ModelSpec = opt(ModelSpec, "the model")
    gen: MFCConfig = opt(MFCConfig, "generation call")
    sampling: GenerationConfig = opt(GenerationConfig, "sampling")
    n_logged_generations: int = opt(-1, "number of rows written to generations/ per step, -1 for all", COUNT_OR_ALL)
    judge: bool = opt(False, "verify the responses")
    reward: RewardConfig = opt(RewardConfig, "the verifier (judge=True)")
    rew_inf: MFCConfig = opt(MFCConfig, "verifier call")

    @property
    def task(self) -> Task:
        return reward_task(self.reward) if self.judge else Task.prompt

    def graph(self) -> Graph:
        batch = self.dataset.train_bs_n_seqs
        mfcs = [sampling_call("gen", "model", self.sampling, batch)]
        if self.judge:
            mfcs.append(verifier_call("rew_inf", self.reward, PPOConfig(), batch))
        return Graph(tuple(mfcs))

    def roles(self) -> dict[str, RoleSpec]:
        return {"model": RoleSpec(self.model)}

    def sampling_options(self) -> GenerationConfig | None:
        return self.sampling

    def samples_per_prompt(self) -> int:
        return self.sampling.n

    def problems(self) -> list[str]:
        return sampling_problems("sampling", self.sampling) + (
            reward_problems(self.reward, self.sampling.n) if self.judge else []
        )
