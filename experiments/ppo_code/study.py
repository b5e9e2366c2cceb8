"""Best-of-n selection, filtered prompts and no critic, each on and off: PPO on programs of a small stack language.

    python -m experiments.ppo_code.study [FOLDER] [--jobs N]

Runs in FOLDER (default: ppo-code-run; finished runs are kept), writes results.json, table.md and figure.svg.
"""

from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.ppo_code.task import make_task
from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, standard_error, verdict_of
from experiments.sums import Curve, StudyOptions, curve, run

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, PROMPTS, GROUP, EVAL_EVERY, TOKENS = 64, 150, 32, 4, 4, 60_000
SEEDS = (1, 2, 3, 4, 5)
SWITCHES = {
    "selection": ("ppo.generation_size=8",),
    "filter": ("ppo.dynamic_sampling=True", "ppo.max_resamples=3"),
    "no critic": ("ppo.disable_value=True", "ppo.group_adv_norm=True"),
}
NO_PENALTY = {"no KL penalty": ("ppo.kl_in=none",)}
ABLATIONS = [("no critic", "no KL penalty"), ("selection", "no critic", "no KL penalty")]
"""Not registered: they test whether the normalised KL penalty explains the results without a critic and a filter."""
CRITIC = ("critic.optimizer.lr=1e-3", "critic.optimizer.lr_scheduler_type=constant")
METHODS = [tuple(name for name, is_on in zip(SWITCHES, on, strict=True) if is_on)
           for on in product((True, False), repeat=3)]  # fmt: skip
STEPS = {(True, True): 24, (True, False): 64, (False, True): 60, (False, False): 130}
"""Upper bounds of the steps that sample ``TOKENS`` tokens, by selection and filter."""
OPTIONS = (f"reward.fn={HERE / 'language.py'}:passes", f"ppo.group_size={GROUP}", "ppo.kl_ctl=0.01",
           "ppo.gen.max_new_tokens=16", "ppo.ppo_n_minibatches=2", "actor.optimizer.lr=1e-3",
           "actor.optimizer.lr_scheduler_type=constant", f"dataset.train_bs_n_seqs={PROMPTS}",
           "exp_ctrl.total_train_epochs=100", f"exp_ctrl.eval_freq_steps={EVAL_EVERY}", "evaluation.n=4",
           "evaluation.greedy=False", "exp_ctrl.eval_at_start=True")  # fmt: skip
Runs = list[dict[str, list[float]]]


def start(folder: Path) -> Path:
    """Return the initial policy, trained on demonstrations with mistakes."""
    task = folder / "task"
    if not (task / "done").exists():
        make_task(task, HIDDEN)
    run(folder, "start", "sft", f"dataset.path={task}/sft.jsonl", "model.init_from_scratch=True",
        f"model.config={task}/model", f"model.tokenizer={task}/tokenizer", "model.optimizer.lr=3e-3",
        "model.optimizer.lr_scheduler_type=constant", "dataset.train_bs_n_seqs=64",
        f"exp_ctrl.total_train_steps={SFT_STEPS}", "exp_ctrl.total_train_epochs=100")  # fmt: skip
    return folder / "sums" / "start" / "models" / "model" / f"step_{SFT_STEPS}"


def label(method: tuple[str, ...]) -> str:
    return ", ".join(method) or "none"


def train(folder: Path, policy: Path, method: tuple[str, ...], seed: int) -> dict[str, list[float]]:
    """Return sampled tokens and the fraction of programs that pass at each evaluation."""
    task, name = folder / "task", "-".join(label(method).replace(",", "").split())
    switches = [option for switch in method for option in {**SWITCHES, **NO_PENALTY}[switch]]
    steps = STEPS["selection" in method, "filter" in method]
    root = run(folder, f"{name}-{seed}", "ppo-math", f"dataset.path={task}/train.jsonl", f"actor.path={policy}",
               f"dataset.eval_path={task}/valid.jsonl", f"exp_ctrl.total_train_steps={steps}", *OPTIONS,
               *switches, *(() if "no critic" in method else CRITIC), f"seed={seed}")  # fmt: skip
    points = curve(root, "eval/reward")
    print(f"{label(method)}, seed {seed}: {points[-1][0]:.0f} tokens, {at(points):.3f}", flush=True)
    return {"tokens": [tokens for tokens, _ in points], "passed": [passed for _, passed in points]}


def at(points: Curve, tokens: float = TOKENS) -> float:
    """Return the fraction after so many sampled tokens, between two evaluations."""
    return float(np.interp(tokens, [x for x, _ in points], [y for _, y in points]))


def ends(runs: Runs, tokens: float = TOKENS) -> list[float]:
    return [at(list(zip(one["tokens"], one["passed"], strict=True)), tokens) for one in runs]


def effects(results: Results, switch: str) -> list[float]:
    """Return, for every seed, the mean difference that a switch makes, over the settings of the other two."""
    runs = results["runs"]
    pairs = [(method, tuple(name for name in method if name != switch)) for method in METHODS if switch in method]
    found = [np.subtract(ends(runs[label(on)]), ends(runs[label(off)])) for on, off in pairs]
    return [float(x) for x in np.mean(found, axis=0)]


def verdict(results: Results) -> Verdict:
    found = {switch: effects(results, switch) for switch in SWITCHES}
    helps = [np.mean(some) > 2 * standard_error(some) for some in found.values()]
    figures = "; ".join(
        f"{switch} {np.mean(some):+.3f} +- {standard_error(some):.3f}" for switch, some in found.items()
    )
    return verdict_of(helps, f"effects at {TOKENS:,} tokens: {figures}")


def table(results: Results) -> str:
    rows = [[method, *(cell(ends(runs, share * TOKENS)) for share in (0.25, 0.5, 1))]
            for method, runs in results["runs"].items()]  # fmt: skip
    return markdown(["switches", *(f"{share * TOKENS:,.0f} tokens" for share in (0.25, 0.5, 1))], rows)


def draw(results: Results, figure: Figure) -> None:
    panel, grid = figure.subplots(), np.linspace(0, TOKENS, 41)
    for method, runs in results["runs"].items():
        means, errors = (np.array(x) for x in zip(*(mean_and_error(ends(runs, t)) for t in grid), strict=True))
        panel.plot(grid, means, label=method)
        panel.fill_between(grid, means - errors, means + errors, alpha=0.25)
    panel.set(xlabel="sampled tokens", ylabel="programs that pass held-out tests", ylim=(0, 1))
    panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def collect(options: StudyOptions) -> Results:
    policy = start(options.folder)
    found = options.map(partial(train, options.folder, policy), METHODS + ABLATIONS, SEEDS)
    return {"runs": {label(method): runs for (method,), runs in found.items()}}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (8, 3.6))

if __name__ == "__main__":
    STUDY.main()
