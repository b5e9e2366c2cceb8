"""Why Delta alone fails on sums: with a smaller weight, and with differences that do not reward going on.

    python -m experiments.reward_design.ablation [FOLDER] [--jobs N]

Added after the results of study.py, whose folder it continues. Writes ablation.md.
"""

from functools import partial

from experiments.reward_design.study import HERE, PRM, REWARDS, ends, start, train
from experiments.studies import cell, load_results, markdown
from experiments.sums import study_options

SEEDS = (1, 2, 3)
DELTA = "success, PRM, Delta"
CASES = {
    "success, PRM of weight 0.1, Delta": ("ppo.prm.alpha=0.1", "ppo.prm.delta=paper"),
    "success, PRM of weight 0.1": ("ppo.prm.alpha=0.1",),
    "success, PRM, Delta as a potential": (*PRM, "ppo.prm.delta=potential"),
}


def main() -> None:
    options = study_options(__doc__, "reward-design-run", jobs=2)
    policy, prm = start(options.folder)
    REWARDS.update(CASES)
    found = options.map(partial(train, options.folder, policy, prm), list(CASES), SEEDS)
    runs = {DELTA: load_results(HERE)["runs"][DELTA], **{case: some for (case,), some in found.items()}}
    rows = [[case, *(cell(some, digits) for some, digits in zip(ends({"runs": runs}, case), (3, 1), strict=True))]
            for case in runs]  # fmt: skip
    (HERE / "ablation.md").write_text(markdown(["reward", "held-out accuracy", "tokens per response"], rows))
    print((HERE / "ablation.md").read_text())


if __name__ == "__main__":
    main()
