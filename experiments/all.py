"""Lists the studies with their verdicts, or runs some and checks that their READMEs state the verdicts.

    python -m experiments.all --list
    python -m experiments.all --run NAME ... [--jobs N]

A study is a folder with README.md, whose title, registration and verdict a reader sees, and study.py, which writes
results.json, table.md and figure.svg, and whose verdict follows from the results.
"""

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from experiments.studies import Verdict, load_results, markdown

HERE = Path(__file__).parent


def studies() -> list[str]:
    """Return the names of studies that were registered before they ran."""
    return sorted(file.parent.name for file in HERE.glob("*/study.py") if "STUDY = Study(" in file.read_text())


def title(name: str) -> str:
    return (HERE / name / "README.md").read_text().splitlines()[0].removeprefix("# ")


def verdict(name: str) -> Verdict | None:
    """Return the verdict that follows from a study's results, if it has run."""
    if not (HERE / name / "results.json").exists():
        return None
    found: Verdict = import_module(f"experiments.{name}.study").STUDY.verdict(load_results(HERE / name))
    return found


def stated(name: str) -> str:
    """Return the first line of the verdict in a study's README."""
    lines = (HERE / name / "README.md").read_text().splitlines()
    return next((line for line in lines if line.startswith("**Verdict: ")), "")


def table() -> str:
    rows = []
    for name in studies():
        found = verdict(name)
        minutes = f"{load_results(HERE / name)['minutes']:g}" if found else ""
        rows.append([name, title(name), minutes, found.outcome.value if found else "not run"])
    return markdown(["study", "title", "minutes", "verdict"], rows)


def run(name: str, words: list[str]) -> str:
    """Run a study; return what is wrong with it, or nothing."""
    subprocess.run([sys.executable, "-m", f"experiments.{name}.study", *words], check=True)
    found = verdict(name)
    if found is None:
        return f"{name}: wrote no results.json"
    print(f"{name}: {found.line} {found.figures}")
    return "" if stated(name).startswith(found.line) else f"{name}: README.md does not state {found.line!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the studies")
    what.add_argument("--run", nargs="+", choices=studies(), metavar="NAME", help="run studies, one after the other")
    parser.add_argument("--jobs", type=int, help="number of concurrent runs of a study")
    args = parser.parse_args()
    if args.list:
        print(table(), end="")
        return
    words = ["--jobs", str(args.jobs)] if args.jobs else []
    problems = [problem for name in args.run if (problem := run(name, words))]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
