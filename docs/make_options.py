"""Writes docs/options.md: every option of every experiment, from the code."""

from pathlib import Path

from realhf.apps.prepare.options import options_of
from realhf.experiments import EXPERIMENTS, experiment_class


def main() -> None:
    lines = [
        "# Options",
        "",
        "Made by `make docs` from the config dataclasses. `realhf quickstart ppo --help` prints the same.",
        "",
    ]
    for name in EXPERIMENTS:
        cls = experiment_class(name)
        lines += [
            f"## {name}",
            "",
            (cls.__doc__ or "").strip(),
            "",
            "| option | type | range | default | |",
            "|---|---|---|---|---|",
        ]
        for option in options_of(cls):
            kind = option.type.replace("|", "\\|")
            lines.append(f"| `{option.key}` | {kind} | {option.range} | `{option.default}` | {option.help} |")
        lines.append("")
    (Path(__file__).parent / "options.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
