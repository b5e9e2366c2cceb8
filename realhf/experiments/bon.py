"""Best of n: proxy and gold scores of the best of n responses, written to bon.json."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from realhf.api.config import DatasetConfig, GenerationConfig
from realhf.api.config.option import COUNT, opt
from realhf.api.config.preference import EnsembleConfig, Objective
from realhf.api.experiment import MultiStageExperiment, Stage
from realhf.base.best_of_n import Entry, curve
from realhf.base.errors import RunFailed, UserError
from realhf.data.files import read_raw_rows
from realhf.experiments.restem import read_generations
from realhf.experiments.scoring import ScoreExperiment, Scoring
from realhf.ops.ensemble import combine

RESULT = "bon.json"
Responses = list[dict[str, Any]]


@dataclass
class BestOfNExperiment(Scoring, MultiStageExperiment):
    """Best-of-n curves of reward models (Coste et al. 2024, arXiv 2310.02743), by the unbiased estimator."""

    sampling: GenerationConfig = opt(lambda: GenerationConfig(n=16), "sampling, with policy.path")
    n_grid: list[int] = opt(list, "values of n (default: powers of two, and the number of responses)", COUNT)

    def stages(self, root: Path) -> Iterator[Stage]:
        """Score all responses in one run, then compute the curves.

        Responses are sampled, or read from a file with rows of ``prompt``, ``answers`` and, without a gold model or
        verifier, ``gold_scores``.
        """
        options = {field.name: vars(self)[field.name] for field in fields(Scoring)}
        data = self.dataset if self.is_sampled else write_single_answers(self.dataset, root / "answers.jsonl")
        options |= {"dataset": data, "n_logged_generations": -1}
        if not self.is_sampled:
            options["sampling"] = GenerationConfig()
        yield Stage("scored", "score", ScoreExperiment(**options))
        rows = list(read_generations(root / "scored"))
        prompts = by_prompt(filter(self.is_scored, rows))
        failed = 1 - sum(map(len, prompts)) / len(rows)
        if not prompts:
            raise RunFailed(f"none of {len(rows)} responses has a score; see {root}/scored")
        result = {**best_of_n(prompts, self.ensemble, self.n_grid), "gold_failed": failed}
        (root / RESULT).write_text(json.dumps(result, indent=1) + "\n")
        print(f"bon     {len(prompts)} prompts, {result['n_answers']} responses each: {root / RESULT}")
        if failed:
            print(f"bon     scoring failed for {failed:.1%} of the responses, which are left out; see {root}/scored")

    def is_scored(self, row: dict[str, Any]) -> bool:
        """Return True if the reward model, and the gold model or verifier, have scored a response."""
        return "rewards" in row and ("gold" in row or not (self.judge or self.has_gold_model))


def write_single_answers(data: DatasetConfig, path: Path) -> DatasetConfig:
    """Write a file with one row per answer of ``data`` and return its config; UserError for an invalid row."""
    lines: list[str] = []
    for number, raw in enumerate(read_raw_rows(data.path, data.columns)):
        at, row = f"{data.path}:{raw.line}", raw.value
        if raw.problem or not isinstance(row, dict):
            raise UserError(f"{at}: {raw.problem or 'the row must be a JSON object'}")
        answers, golds = row.get("answers"), row.get("gold_scores")
        if not isinstance(answers, list) or not answers:
            raise UserError(f"{at}: 'answers' must be a non-empty list of texts; to sample responses set policy.path")
        if golds is not None and (not isinstance(golds, list) or len(golds) != len(answers)):
            raise UserError(f"{at}: 'gold_scores' must be a number for each of the {len(answers)} 'answers'")
        others = {key: value for key, value in row.items() if key not in ("answers", "gold_scores")}
        for i, answer in enumerate(answers):
            gold = {"gold": golds[i]} if golds is not None else {}
            lines.append(json.dumps({**others, "prompt_number": number, "answer": answer, **gold}) + "\n")
    path.write_text("".join(lines))
    return replace(data, path=str(path), columns={}, shuffle=False)


def by_prompt(rows: Iterable[dict[str, Any]]) -> list[Responses]:
    """Return the scored responses of each prompt, in the order of samples."""
    prompts: dict[int, Responses] = {}
    for row in sorted(rows, key=lambda row: (row["prompt_id"], row["sample"])):
        prompts.setdefault((row["fields"] or {}).get("prompt_number", row["prompt_id"]), []).append(row)
    return list(prompts.values())


def best_of_n(prompts: Sequence[Responses], ensemble: EnsembleConfig, grid: Sequence[int]) -> dict[str, Any]:
    """Return the curve of the reward, and for an ensemble the curves of each member and objective.

    With gold scores, the curve ``gold`` selects by them, which is the upper bound of all proxies.
    """
    golds = gold_scores(prompts)
    curve_of = partial(curve, golds=golds, grid=grid)
    rewards = [[row["rewards"] for row in responses] for responses in prompts]
    curves: dict[str, list[Entry]] = {}
    if members := ensemble.members:
        keys = [f"score_{i}" for i in range(len(members))]
        scores = [np.array([[row[key] for row in responses] for key in keys]) for responses in prompts]
        curves |= {f"member_{i}": curve_of([some[i] for some in scores]) for i in range(len(members))}
        for objective in Objective:
            config = replace(ensemble, objective=objective)
            curves[objective.name] = curve_of([combine(some, config) for some in scores])
    if golds is not None:
        curves["gold"] = curve_of(golds)
    return {"n_prompts": len(prompts), "n_answers": min(map(len, prompts)), "members": list(members),
            "entries": curve_of(rewards), "curves": curves}  # fmt: skip


def gold_scores(prompts: Sequence[Responses]) -> list[ArrayLike] | None:
    """Return the gold scores of the responses of each prompt, or None; UserError if only some responses have one."""
    scores = [[row.get("gold", (row["fields"] or {}).get("gold")) for row in responses] for responses in prompts]
    n_missing = sum(score is None for some in scores for score in some)
    if n_missing == sum(map(len, scores)):
        return None
    if n_missing:
        raise UserError(f"{n_missing} answers have no gold score, others do: set 'gold_scores' in all rows or in none")
    return [np.array(some, np.float64) for some in scores]
