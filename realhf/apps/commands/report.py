"""``realhf report``: one HTML page about one or several runs, written to a file or served while they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realhf.apps.view.console import write_out
from realhf.apps.view.report.run_set import RunSet
from realhf.base.errors import UserError, did_you_mean

USAGE = """usage: realhf report RUN_DIR [RUN_DIR ...] [--out FILE.html]     (default: RUN_DIR/report.html)
       realhf report RUN_DIR [RUN_DIR ...] --follow [--port N]   (default: any free port)

Writes one self-contained HTML page about a run, or a comparison of several runs. A multi-stage experiment is one page
with all stages. With --follow the page is served on the loopback interface and updated until Ctrl-C."""
FLAGS = ("--out", "--follow", "--port")


@dataclass(frozen=True)
class ReportArguments:
    roots: list[Path]
    out: Path | None = None
    follow: bool = False
    port: int = 0


def main(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        return print(USAGE)
    asked = parse(arguments)
    try:
        runs = RunSet(asked.roots)
        runs.update()
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    if asked.follow:
        from realhf.apps.view.report.server import serve

        return serve(runs, asked.port)
    write_out(asked.out or asked.roots[0] / "report.html", report(runs))


def parse(arguments: Sequence[str]) -> ReportArguments:
    """Return the arguments; ``UserError`` for unknown or incomplete ones."""
    words, flags, rest = [], dict[str, str](), iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--follow":
            flags[name] = "yes"
        elif name in ("--out", "--port"):
            flags[name] = value if equals else next(rest, "")
            if not flags[name]:
                raise UserError(f"invalid arguments: {name} needs a value\n{USAGE}")
        elif word.startswith("-"):
            raise UserError(f"invalid arguments: unknown flag {word}{did_you_mean(name, FLAGS)}\n{USAGE}")
        else:
            words.append(word)
    if not words:
        raise UserError(f"missing RUN_DIR\n{USAGE}")
    port = flags.get("--port", "0")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise UserError(f"invalid arguments: --port {port} is not a number from 0 to 65535\n{USAGE}")
    if "--follow" in flags and "--out" in flags:
        raise UserError(f"invalid arguments: --follow writes no file; leave out --out\n{USAGE}")
    if "--port" in flags and "--follow" not in flags:
        raise UserError(f"invalid arguments: --port needs --follow\n{USAGE}")
    out = Path(flags["--out"]) if "--out" in flags else None
    return ReportArguments([Path(word) for word in words], out, "--follow" in flags, int(port))


def report(runs: RunSet) -> str:
    """Return the page of the runs as they were read."""
    from realhf.apps.view.report.page import render
    from realhf.apps.view.report.page_data import page_content

    return render(page_content(runs.readers, runs.title))
