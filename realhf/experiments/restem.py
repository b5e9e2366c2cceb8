"""ReST-EM: sample answers, keep the right ones, fit the initial model to them, and sample from the result again."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from realhf.api.config import DatasetConfig, ExperimentControl, GenerationConfig, ModelSpec, RewardConfig, opt
from realhf.api.multi_stage import MultiStageExperiment, Stage
from realhf.base.errors import RunFailed
from realhf.experiments.gen import GenerationExperiment
from realhf.experiments.options.sampling import sampling_problems
from realhf.experiments.options.verifier import reward_problems
from realhf.experiments.sft import SFTExperiment


class Choice(Enum):
    """Which round's model is the result: the last before the first that is no better, or the best of all."""

    first_drop = "first_drop"
    best = "best"


@dataclass(frozen=True)
class Round:
    """What a round came to. ``accuracy`` is the mean reward of the validation answers of the model it fitted."""

    number: int
    n_answers: int
    n_kept: int
    prompts_solved: int
    prompts_full: int
    accuracy: float
    model: str


@dataclass
class RestEMExperiment(MultiStageExperiment):
    """Expectation and maximisation by sampling (Singh et al. 2023, arXiv 2312.06585)."""

    model: ModelSpec = opt(ModelSpec, "the initial model: every round starts from it")
    sampling: GenerationConfig = opt(
        lambda: GenerationConfig(n=8, temperature=0.6, top_p=0.9), "sampling to learn from"
    )
    validation: GenerationConfig = opt(
        lambda: GenerationConfig(n=16, temperature=0.35), "sampling on validation prompts"
    )
    valid_path: str = opt("", "validation prompts (default: those of dataset.path)")
    reward: RewardConfig = opt(lambda: RewardConfig(wrong_reward=0.0), "the verifier")
    n_rounds: int = opt(10, "rounds of sampling and fitting")
    threshold: float = opt(1.0, "answers with at least this reward are kept")
    max_per_prompt: int = opt(10, "answers kept per prompt at the most, in the order of sampling; -1 for all")
    choice: Choice = opt(Choice.first_drop, "which round's model is the result: first_drop or best")
    epochs: int = opt(8, "passes over what was kept")
    fit_batch: int = opt(64, "answers per optimizer step")

    @property
    def config(self) -> MultiStageExperiment:
        return self

    def problems(self) -> list[str]:
        checks = [
            (self.n_rounds >= 1, f"n_rounds must be positive, got {self.n_rounds}"),
            (
                self.max_per_prompt >= 1 or self.max_per_prompt == -1,
                f"max_per_prompt={self.max_per_prompt}: 1 or more, or -1",
            ),
            (self.epochs >= 1, f"epochs must be positive, got {self.epochs}"),
            (self.fit_batch >= 1, f"fit_batch must be positive, got {self.fit_batch}"),
            (bool(self.model.path), "model.path is not set (a Hugging Face folder): rounds start from its weights"),
        ]
        wrong = [line for holds, line in checks if not holds] + sampling_problems("sampling", self.sampling)
        return wrong + sampling_problems("validation", self.validation) + reward_problems(self.reward)

    def stages(self, root: Path) -> Iterator[Stage]:
        policy, rounds = self.model.path or "", list[Round]()
        for number in range(1, self.n_rounds + 1):
            yield self.sample(f"round{number}-sample", policy, self.dataset, self.sampling, self.seed + 2 * number)
            answers = list(read_generations(root / f"round{number}-sample"))
            kept = kept_answers(answers, self.threshold, self.max_per_prompt)
            if not kept:
                raise RunFailed(f"round {number}: none of {len(answers)} answers has a reward of {self.threshold:g} "
                                "or more; draw more of them (sampling.n), or start from a better model")  # fmt: skip
            data = root / f"round{number}-kept.jsonl"
            rows = ({"prompt": row["prompt"], "answer": row["response"]} for row in kept)
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            yield self.fit(f"round{number}-fit", data, len(kept))
            policy = str(newest_model(root / f"round{number}-fit"))
            where = replace(self.dataset, path=self.valid_path or self.dataset.path)
            yield self.sample(f"round{number}-valid", policy, where, self.validation, self.seed + 2 * number + 1)
            valid = [row["rewards"] for row in read_generations(root / f"round{number}-valid")]
            rounds.append(summary(number, answers, kept, self.max_per_prompt, sum(valid) / len(valid), policy))
            chosen = chosen_round([r.accuracy for r in rounds], self.choice)
            result = {
                "rounds": [asdict(r) for r in rounds],
                "chosen": rounds[chosen].number,
                "model": rounds[chosen].model,
            }
            (root / "restem.json").write_text(json.dumps(result, indent=1))
            print(f"round   {number}: {len(kept)} of {len(answers)} answers kept, accuracy {rounds[-1].accuracy:.3f}; "
                  f"the result is round {rounds[chosen].number}")  # fmt: skip

    def sample(self, name: str, policy: str, data: DatasetConfig, how: GenerationConfig, seed: int) -> Stage:
        """Answer every prompt once per ``how.n``, in the order of the file."""
        whole = replace(data, shuffle=False)
        config = self.inherit(GenerationExperiment, model=replace(self.model, path=policy), sampling=how, judge=True,
                              reward=self.reward, dataset=whole, seed=seed, n_logged_generations=-1,
                              exp_ctrl=self.control(1))  # fmt: skip
        return Stage(name, "gen", config)

    def fit(self, name: str, data: Path, n_kept: int) -> Stage:
        rows = replace(
            self.dataset, path=str(data), train_bs_n_seqs=min(self.fit_batch, n_kept), prompt_template="{prompt}"
        )
        config = self.inherit(SFTExperiment, model=self.model, dataset=rows, save_roles=[],
                              exp_ctrl=self.control(self.epochs))  # fmt: skip
        return Stage(name, "sft", config)

    def control(self, epochs: int) -> ExperimentControl:
        """Return the length of a stage; its checkpoints are those that the campaign asks for."""
        checkpoints = {name: value for name, value in vars(self.exp_ctrl).items() if name.startswith("ckpt_")}
        return ExperimentControl(total_train_epochs=epochs, keep_last=self.exp_ctrl.keep_last, **checkpoints)


def read_generations(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that a run wrote down, step by step."""
    files = (run / "generations").glob("step_*.jsonl")
    for file in sorted(files, key=lambda path: int(path.stem.rpartition("_")[2])):
        with file.open() as lines:
            yield from map(json.loads, lines)


def newest_model(run: Path) -> Path:
    """Return the last model that a run saved."""
    return max((run / "models").glob("*/step_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def kept_answers(rows: Iterable[dict[str, Any]], threshold: float, most: int) -> list[dict[str, Any]]:
    """Return the rows whose reward is at least ``threshold``, the first ``most`` of each prompt (-1: all)."""
    kept: list[dict[str, Any]] = []
    taken: dict[int, int] = {}
    for row in rows:
        n = taken.get(row["prompt_id"], 0)
        if row["rewards"] >= threshold and not row["truncated"] and n != most:
            taken[row["prompt_id"]] = n + 1
            kept.append(row)
    return kept


def chosen_round(accuracies: Sequence[float], choice: Choice) -> int:
    """Return the index of the chosen round; of equally good ones the first."""
    if choice is Choice.best:
        return max(range(len(accuracies)), key=lambda i: (accuracies[i], -i))
    for i in range(1, len(accuracies)):
        if accuracies[i] <= accuracies[i - 1]:
            return i - 1
    return len(accuracies) - 1


def summary(
    number: int, answers: Sequence[dict], kept: Sequence[dict], most: int, accuracy: float, model: str
) -> Round:
    counts: dict[int, int] = {}
    for row in kept:
        counts[row["prompt_id"]] = counts.get(row["prompt_id"], 0) + 1
    full = sum(count == most for count in counts.values())
    return Round(number, len(answers), len(kept), len(counts), full, accuracy, model)
