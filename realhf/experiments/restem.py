"""ReST-EM: rounds of sampling responses and fine-tuning the initial model on the right ones."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from realhf.api.config import DatasetConfig, ExperimentControl, GenerationConfig, LoraOptions, ModelSpec, RewardConfig
from realhf.api.config.option import COUNT, COUNT_OR_ALL, DATA, FINITE, opt
from realhf.api.experiment import MultiStageExperiment, Stage
from realhf.base.errors import RunFailed
from realhf.experiments.gen import GenerationExperiment
from realhf.experiments.options.checks import reward_problems, sampling_problems, unmet, unused_curriculum
from realhf.experiments.sft import SFTExperiment


class Choice(Enum):
    """Which round's model is the result: the one before accuracy first stops rising, or the best."""

    first_drop = "first_drop"
    best = "best"


@dataclass
class RestEMExperiment(MultiStageExperiment):
    """Expectation maximisation by sampling (Singh et al. 2023, arXiv 2312.06585)."""

    model: ModelSpec = opt(ModelSpec, "the initial model, from which every round starts")
    sampling: GenerationConfig = opt(
        lambda: GenerationConfig(n=8, temperature=0.6, top_p=0.9), "sampling of training data"
    )
    validation: GenerationConfig = opt(
        lambda: GenerationConfig(n=16, temperature=0.35), "sampling on validation prompts"
    )
    valid_path: str = opt("", "validation prompts (default: those of dataset.path)", DATA)
    reward: RewardConfig = opt(lambda: RewardConfig(wrong_reward=0.0), "the verifier")
    n_rounds: int = opt(10, "number of rounds", COUNT)
    threshold: float = opt(1.0, "minimum reward of the responses to train on", FINITE)
    max_per_prompt: int = opt(10, "maximum number of responses per prompt to train on, -1 for all", COUNT_OR_ALL)
    choice: Choice = opt(Choice.first_drop, "round whose model is the result: first_drop or best")
    epochs: int = opt(8, "number of training epochs per round", COUNT)
    fit_batch: int = opt(64, "number of responses per optimizer step", COUNT)

    def problems(self) -> list[str]:
        problems = unmet([
            (self.max_per_prompt != 0, "max_per_prompt must be positive or -1, got 0"),
            (bool(self.model.path), "model.path is not set (a Hugging Face folder): rounds start from its weights"),
        ])  # fmt: skip
        problems += unused_curriculum(self.dataset, "restem")
        problems += sampling_problems("sampling", self.sampling) + sampling_problems("validation", self.validation)
        return problems + reward_problems(self.reward, min(self.sampling.n, self.validation.n))

    def stages(self, root: Path) -> Iterator[Stage]:
        policy, rounds = self.model.path or "", list[dict[str, Any]]()
        for number in range(1, self.n_rounds + 1):
            yield self.sample(f"round{number}-sample", policy, self.dataset, self.sampling, self.seed + 2 * number)
            responses = read_scored(root / f"round{number}-sample")
            kept = select_responses(responses, self.threshold, self.max_per_prompt)
            if not kept:
                raise RunFailed(
                    f"round {number}: none of {len(responses)} responses has a reward of {self.threshold:g} or more; "
                    "increase sampling.n, or start from a better model"
                )
            data = root / f"round{number}-kept.jsonl"
            rows = ({"prompt": row["prompt"], "answer": row["response"]} for row in kept)
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            yield self.fit(f"round{number}-fit", data, len(kept))
            policy = str(newest_model(root / f"round{number}-fit"))
            prompts = replace(self.dataset, path=self.valid_path or self.dataset.path)
            yield self.sample(f"round{number}-valid", policy, prompts, self.validation, self.seed + 2 * number + 1)
            valid = [row["rewards"] for row in read_scored(root / f"round{number}-valid")]
            accuracy = sum(valid) / max(len(valid), 1)
            rounds.append(summary(number, responses, kept, self.max_per_prompt, accuracy, policy))
            best = rounds[chosen_round([r["accuracy"] for r in rounds], self.choice)]
            result = {"rounds": rounds, "chosen": best["number"], "model": best["model"]}
            (root / "restem.json").write_text(json.dumps(result, indent=1))
            print(f"round   {number}: {len(kept)} of {len(responses)} responses selected, accuracy "
                  f"{rounds[-1]['accuracy']:.3f}; the result is round {best['number']}")  # fmt: skip

    def sample(self, name: str, policy: str, data: DatasetConfig, sampling: GenerationConfig, seed: int) -> Stage:
        """Return the stage that samples ``sampling.n`` responses per prompt, in the order of the file."""
        is_initial = policy == self.model.path
        model = self.model if is_initial else replace(self.model, path=policy, lora=LoraOptions())  # saved merged
        config = self.inherit(GenerationExperiment, model=model, sampling=sampling,
                              judge=True, reward=self.reward, dataset=replace(data, shuffle=False), seed=seed % 2**63,
                              n_logged_generations=-1, exp_ctrl=self.control(1))  # fmt: skip
        return Stage(name, "gen", config)

    def fit(self, name: str, data: Path, n_kept: int) -> Stage:
        batch = min(self.fit_batch, n_kept)
        rows = replace(self.dataset, path=str(data), columns={}, train_bs_n_seqs=batch, prompt_template="{prompt}")
        model = replace(self.model, lora=replace(self.model.lora, merge_on_save=self.model.lora.rank > 0))
        config = self.inherit(SFTExperiment, model=model, dataset=rows, save_roles=[],
                              exp_ctrl=self.control(self.epochs))  # fmt: skip
        return Stage(name, "sft", config)

    def control(self, epochs: int) -> ExperimentControl:
        """Return the length of a stage, with the checkpoint options of this experiment."""
        checkpoints = {name: value for name, value in vars(self.exp_ctrl).items() if name.startswith("ckpt_")}
        return ExperimentControl(total_train_epochs=epochs, keep_last=self.exp_ctrl.keep_last, **checkpoints)


def read_generations(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of generations/ of a run, in the order of steps."""
    files = (run / "generations").glob("step_*.jsonl")
    for file in sorted(files, key=lambda path: int(path.stem.rpartition("_")[2])):
        with file.open() as lines:
            yield from map(json.loads, lines)


def read_scored(run: Path) -> list[dict[str, Any]]:
    """Return the rows of generations/ that have a reward."""
    return [row for row in read_generations(run) if "rewards" in row]


def newest_model(run: Path) -> Path:
    return max((run / "models").glob("*/step_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def select_responses(rows: Iterable[dict[str, Any]], threshold: float, max_per_prompt: int) -> list[dict[str, Any]]:
    """Return the rows with at least reward ``threshold``, the first ``max_per_prompt`` of each prompt (-1: all)."""
    kept: list[dict[str, Any]] = []
    counts = Counter[int]()
    for row in rows:
        if row["rewards"] >= threshold and not row["truncated"] and counts[row["prompt_id"]] != max_per_prompt:
            counts[row["prompt_id"]] += 1
            kept.append(row)
    return kept


def chosen_round(accuracies: Sequence[float], choice: Choice) -> int:
    """Return the index of the chosen round, the first of equal ones."""
    if choice is Choice.best:
        return max(range(len(accuracies)), key=lambda i: (accuracies[i], -i))
    drops = (i for i in range(1, len(accuracies)) if accuracies[i] <= accuracies[i - 1])
    return next(drops, len(accuracies)) - 1


def summary(
    number: int, responses: Sequence[dict], kept: Sequence[dict], max_per_prompt: int, accuracy: float, model: str
) -> dict[str, Any]:
    """Return the result of a round. ``accuracy`` is the mean reward of the fitted model on validation prompts."""
    counts = Counter(row["prompt_id"] for row in kept)
    full = sum(count == max_per_prompt for count in counts.values())
    return {"number": number, "n_answers": len(responses), "n_kept": len(kept), "prompts_solved": len(counts),
            "prompts_full": full, "accuracy": accuracy, "model": model}  # fmt: skip
