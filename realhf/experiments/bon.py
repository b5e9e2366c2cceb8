"""Best of n: answers are scored by proxies and by the truth, and bon.json says what the best of n has of both."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from realhf.api.config import DatasetConfig, GenerationConfig, opt
from realhf.api.config.ensemble import EnsembleConfig, Objective
from realhf.api.multi_stage import MultiStageExperiment, Stage
from realhf.base.best_of_n import Entry, curve
from realhf.base.errors import UserError
from realhf.data.files import read_raw_rows
from realhf.experiments.restem import read_generations
from realhf.experiments.scoring import ScoreExperiment, Scoring
from realhf.ops.ensemble import combine

RESULT = "bon.json"
Answers = list[dict[str, Any]]


@dataclass
class BestOfNExperiment(Scoring, MultiStageExperiment):
    """Best-of-n curves of reward models (Coste et al. 2024, arXiv 2310.02743), by the unbiased estimator."""

    sampling: GenerationConfig = opt(lambda: GenerationConfig(n=16), "how answers are sampled, with policy.path")
    n_grid: list[int] = opt(list, "the n of best of n (default: powers of two, and all answers)")

    @property
    def config(self) -> MultiStageExperiment:
        return self

    def problems(self) -> list[str]:
        wrong = [f"n_grid must hold positive numbers, got {n}" for n in self.n_grid if n < 1]
        return wrong + self.scoring_problems(self.dataset.path)

    def stages(self, root: Path) -> Iterator[Stage]:
        """Score everything in one run, and then estimate.

        Answers are sampled, or those of a file with rows of ``prompt``, ``answers`` and, where neither gold model nor
        verifier is named, ``gold_scores``.
        """
        options = {field.name: vars(self)[field.name] for field in fields(Scoring)}
        data = self.dataset if self.is_sampled else written_singly(self.dataset, root / "answers.jsonl")
        if not self.is_sampled:
            options["sampling"] = GenerationConfig()
        yield Stage("scored", "score", self.inherit(ScoreExperiment, **options, dataset=data, n_logged_generations=-1))
        prompts = by_prompt(read_generations(root / "scored"))
        failed = failed_share(root / "scored") if self.judge else 0.0
        result = {**best_of_n(prompts, self.ensemble, self.n_grid), "gold_failed": failed}
        (root / RESULT).write_text(json.dumps(result, indent=1) + "\n")
        print(f"bon     {len(prompts)} prompts, {result['n_answers']} answers each: {root / RESULT}")
        if failed:
            print(f"bon     the verifier failed at {failed:.1%} of the answers, which count as wrong; "
                  "see gold_inf/verifier_* in scored/metrics.jsonl")  # fmt: skip


def written_singly(data: DatasetConfig, path: Path) -> DatasetConfig:
    """Write a row for every answer of a file whose rows have many, and return where it is; UserError for a bad row."""
    lines: list[str] = []
    for number, raw in enumerate(read_raw_rows(data.path)):
        at, row = f"{data.path}:{raw.line}", raw.value
        if raw.problem or not isinstance(row, dict):
            raise UserError(f"{at}: {raw.problem or 'the row must be an object with keys'}")
        answers, golds = row.get("answers"), row.get("gold_scores")
        if not isinstance(answers, list) or not answers:
            raise UserError(f"{at}: 'answers' must be a list of texts; to sample answers set policy.path")
        if golds is not None and (not isinstance(golds, list) or len(golds) != len(answers)):
            raise UserError(f"{at}: 'gold_scores' must be a number for each of the {len(answers)} 'answers'")
        others = {key: value for key, value in row.items() if key not in ("answers", "gold_scores")}
        for i, answer in enumerate(answers):
            gold = {"gold": golds[i]} if golds is not None else {}
            lines.append(json.dumps({**others, "prompt_number": number, "answer": answer, **gold}) + "\n")
    path.write_text("".join(lines))
    return replace(data, path=str(path), shuffle=False)


def by_prompt(rows: Iterable[dict[str, Any]]) -> list[Answers]:
    """Return the scored answers to every prompt, in the order in which they were sampled or given."""
    prompts: dict[int, Answers] = {}
    for row in sorted(rows, key=lambda row: (row["prompt_id"], row["sample"])):
        prompts.setdefault((row["fields"] or {}).get("prompt_number", row["prompt_id"]), []).append(row)
    return list(prompts.values())


def failed_share(run: Path) -> float:
    """Return the share of answers at which the verifier of a run failed, as its metrics have it, step by step."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return sum(step["gold_inf/verifier_error"] + step["gold_inf/verifier_timeout"] for step in steps) / len(steps)


def best_of_n(prompts: Sequence[Answers], ensemble: EnsembleConfig, grid: Sequence[int]) -> dict[str, Any]:
    """Return the curve by the reward, and of an ensemble those by each member and by every objective.

    Where there is a true score, curve ``gold`` chooses by it: no proxy can be better.
    """
    golds = true_scores(prompts)

    def chosen_by(proxies: Sequence[ArrayLike]) -> list[Entry]:
        return curve(proxies, golds, grid)

    rewards = [[row["rewards"] for row in answers] for answers in prompts]
    curves: dict[str, list[Entry]] = {}
    if members := ensemble.members:
        keys = [f"score_{i}" for i in range(len(members))]
        scores = [np.array([[row[key] for row in answers] for key in keys]) for answers in prompts]
        curves |= {f"member_{i}": chosen_by([some[i] for some in scores]) for i in range(len(members))}
        for objective in Objective:
            how = replace(ensemble, objective=objective)
            curves[objective.name] = chosen_by([combine(some, how) for some in scores])
    if golds is not None:
        curves["gold"] = chosen_by(golds)
    return {"n_prompts": len(prompts), "n_answers": min(map(len, prompts)), "members": list(members),
            "entries": chosen_by(rewards), "curves": curves}  # fmt: skip


def true_scores(prompts: Sequence[Answers]) -> list[ArrayLike] | None:
    """Return the gold scores of the answers to every prompt, made in the run or given; None where there are none.

    UserError where some answers have one and others do not.
    """
    scores = [[row.get("gold", (row["fields"] or {}).get("gold")) for row in answers] for answers in prompts]
    n_missing = sum(score is None for some in scores for score in some)
    if n_missing == sum(map(len, scores)):
        return None
    if n_missing:
        raise UserError(f"{n_missing} answers have no gold score, others do: give 'gold_scores' in all rows or in none")
    return [np.array(some, np.float64) for some in scores]
