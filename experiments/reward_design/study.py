"""Rewards of a process reward model that can be gamed by repeating steps, with Clip and Delta: PPO on sums.

    python -m experiments.reward_design.study [FOLDER] [--jobs N]

Runs in FOLDER (default: reward-design-run; finished runs are kept), writes results.json, table.md and figure.svg.
"""

from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.reward_design.task import make_task
from experiments.studies import Results, Study, Verdict, cell, markdown, mean_and_error, standard_error, verdict_of
from experiments.sums import StudyOptions, curve, metrics, run

HERE = Path(__file__).parent
HIDDEN, SFT_STEPS, STEPS, PROMPTS, GROUP, EVAL_EVERY, LAST = 64, 120, 100, 32, 4, 20, 10
SEEDS = (1, 2, 3, 4, 5)
PRM = ("ppo.prm.alpha=1.0",)
REWARDS = {
    "success": (),
    "success, PRM": PRM,
    "success, PRM, Clip": (*PRM, "ppo.prm.clip=True"),
    "success, PRM, Delta": (*PRM, "ppo.prm.delta=paper"),
    "success, PRM, Clip and Delta": (*PRM, "ppo.prm.clip=True", "ppo.prm.delta=paper"),
}
LONGER = 2.0
OPTIONS = (f"ppo.group_size={GROUP}", "ppo.kl_ctl=0.01", "ppo.gen.max_new_tokens=160", "ppo.max_reward_clip=100",
           "ppo.adv_norm=True", "actor.optimizer.lr=3e-4", "critic.optimizer.lr=1e-3",
           "actor.optimizer.lr_scheduler_type=constant", f"dataset.train_bs_n_seqs={PROMPTS}",
           f"exp_ctrl.total_train_steps={STEPS}", "exp_ctrl.total_train_epochs=100",
           f"exp_ctrl.eval_freq_steps={EVAL_EVERY}", "evaluation.n=4", "evaluation.greedy=False")  # fmt: skip
Run = dict[str, list[float]]


def trained(folder: Path, name: str, experiment: str, steps: int, *options: str) -> Path:
    run(folder, name, experiment, "model.optimizer.lr=3e-3", "model.optimizer.lr_scheduler_type=constant",
        "dataset.train_bs_n_seqs=64", f"exp_ctrl.total_train_steps={steps}", "exp_ctrl.total_train_epochs=100",
        *options)  # fmt: skip
    return folder / "sums" / name / "models" / "model" / f"step_{steps}"


def start(folder: Path) -> tuple[Path, Path]:
    """Return the initial policy and the process reward model, which starts from it."""
    task = folder / "task"
    if not (task / "done").exists():
        make_task(task, HIDDEN)
    scratch = (f"dataset.path={task}/sft.jsonl", "model.init_from_scratch=True", f"model.config={task}/model",
               f"model.tokenizer={task}/tokenizer")  # fmt: skip
    policy = trained(folder, "start", "sft", SFT_STEPS, *scratch)
    rewards = (f"dataset.path={task}/steps.jsonl", f"model.path={policy}", "rw.type=process")
    return policy, trained(folder, "prm", "rw", 300, *rewards, "model.optimizer.lr=1e-3")


def train(folder: Path, policy: Path, prm: Path, case: str, seed: int) -> Run:
    """Return held-out accuracy at each evaluation, and the mean response length of every step."""
    task, name = folder / "task", "-".join(case.replace(",", "").split())
    members = (f"prm.path={prm}", *REWARDS[case]) if REWARDS[case] else ()
    root = run(folder, f"{name}-{seed}", "ppo-math", f"dataset.path={task}/train.jsonl", f"actor.path={policy}",
               f"dataset.eval_path={task}/valid.jsonl", *OPTIONS, *members, f"seed={seed}")  # fmt: skip
    lengths = [line["tokens/generated"] / (PROMPTS * GROUP) for line in metrics(root) if "tokens/generated" in line]
    accuracy = [value for _, value in curve(root)]
    print(f"{case} seed {seed}: accuracy {accuracy[-1]:.3f}, {fmean(lengths[-LAST:]):.1f} tokens", flush=True)
    return {"accuracy": accuracy, "length": lengths}


def ends(results: Results, case: str) -> tuple[list[float], list[float]]:
    """Return the accuracy at the end and the length over the last steps, by seed."""
    runs = results["runs"][case]
    return [one["accuracy"][-1] for one in runs], [fmean(one["length"][-LAST:]) for one in runs]


def verdict(results: Results) -> Verdict:
    plain, naive, *fixed = (ends(results, case) for case in REWARDS)
    first = fmean(fmean(one["length"][:LAST]) for one in results["runs"]["success, PRM"])
    least = fmean(plain[0]) - standard_error(plain[0])
    falls = fmean(naive[0]) + standard_error(naive[0]) < least
    conditions = [fmean(naive[1]) >= LONGER * first, falls, all(fmean(some[0]) >= least for some in fixed)]
    figures = (f"success {cell(plain[0])}; with PRM {cell(naive[0])}, length {first:.0f} to {fmean(naive[1]):.0f}; "
               f"Clip, Delta, both: {', '.join(cell(some[0]) for some in fixed)}")  # fmt: skip
    return verdict_of(conditions, figures)


def table(results: Results) -> str:
    rows = [[case, *(cell(some, digits) for some, digits in zip(ends(results, case), (3, 1), strict=True))]
            for case in REWARDS]  # fmt: skip
    return markdown(["reward", "held-out accuracy", "tokens per response"], rows)


def draw(results: Results, figure: Figure) -> None:
    panels = figure.subplots(1, 2)
    for case, runs in results["runs"].items():
        for panel, key, every in zip(panels, ("accuracy", "length"), (EVAL_EVERY, 1), strict=True):
            means, errors = zip(*map(mean_and_error, zip(*(one[key] for one in runs), strict=True)), strict=True)
            steps = [i * every for i in range(len(means))]
            panel.plot(steps, means, label=case)
            panel.fill_between(steps, [m - e for m, e in zip(means, errors, strict=True)],
                               [m + e for m, e in zip(means, errors, strict=True)], alpha=0.25)  # fmt: skip
    panels[0].set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    panels[1].set(xlabel="step", ylabel="tokens per response", ylim=(0, None))
    panels[0].legend(fontsize=7)


def collect(options: StudyOptions) -> Results:
    policy, prm = start(options.folder)
    found = options.map(partial(train, options.folder, policy, prm), list(REWARDS), SEEDS)
    return {"runs": {case: runs for (case,), runs in found.items()}}


STUDY = Study(HERE, __doc__ or "", collect, verdict, table, draw, (9, 3.6))

if __name__ == "__main__":
    STUDY.main()
