"""``realhf plan``: what a run would do, without launching it."""

from realhf.apps.console import open_console, plan_table
from realhf.apps.quickstart import prepare


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: realhf plan EXPERIMENT [--config FILE.yaml] [key=value ...]")
        return
    run = prepare(arguments[0], arguments[1:])
    out = open_console()
    out.print(f"{run.experiment}: {run.n_rows} rows, {run.length.n_steps} steps on {run.plan.n_workers} x {run.device}")
    out.print(plan_table(run))
    for name, steps in run.program.items():
        out.print(f"\n{name}")
        for step in steps:
            out.print(f"  {step}")
