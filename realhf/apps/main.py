"""The command ``realhf``: dispatches to its subcommands. Imports only what a subcommand needs."""

import importlib
import os
import select
import sys
from typing import NoReturn

from realhf.base.errors import InfeasibleError, RunFailed, RunStopped, UserError, did_you_mean
from realhf.base.process import interrupt_once
from realhf.base.version import __version__

COMMANDS = {
    "quickstart": ("EXPERIMENT [key=value ...]", "plan, check, launch and follow a run"),
    "resume": ("RUN_DIR [key=value ...]", "resume a run from its last checkpoint"),
    "report": ("RUN_DIR [RUN_DIR ...] [--out FILE.html | --follow]", "show runs in one HTML page, also while they run"),
    "stop": ("RUN_DIR", "end a run after its current step, with a checkpoint"),
    "master": ("RUN_DIR", "run the master for a prepared run directory (used by SLURM)"),
    "plan": ("EXPERIMENT [key=value ...]", "everything except launching: graph, layouts, program"),
    "profile": ("[model=FOLDER,...] [key=value ...]", "profile this machine for predictions"),
    "model": ("check FOLDER [key=value ...]", "compare a model with transformers: rows, generation, layouts"),
    "verifier": ("serve [key=value ...]", "score math and code answers over HTTP"),
    "demo": ("[--dir DIR]", "train a random model with SFT and PPO on a small arithmetic task"),
    "env": ("", "print versions, devices and extras"),
    "completion": ("bash|zsh|fish", "print a script that completes commands and options in a shell"),
}
"""Arguments and description of every command, which is ``main`` in its module of ``apps/commands``."""

OWN_HELP = ("quickstart", "plan", "profile", "model", "verifier", "report")
"""Commands whose ``main`` answers ``--help``, with their options."""

EXIT_USER, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 1, 130, 141


def usage() -> str:
    width = max(len(f"{name} {args}") for name, (args, _) in COMMANDS.items())
    lines = [f"  realhf {f'{name} {args}':<{width}}  {text}" for name, (args, text) in COMMANDS.items()]
    return "\n".join(["usage: realhf COMMAND ...", "", *lines, "",
                      "realhf COMMAND --help explains a command, realhf quickstart --help lists the experiments,",
                      "realhf quickstart ppo --help the options of one.",
                      "--traceback prints the traceback of an error."])  # fmt: skip


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code.

    0: done; 1: the run failed; 2: invalid input, nothing was launched; 130: interrupted or stopped; 141: broken pipe.
    ``realhf plan`` returns 1 for an infeasible plan.
    """
    if arguments[:1] == ["help"] and arguments[1:2] and arguments[1] in COMMANDS:
        arguments = [*arguments[1:], "--help"]
    show_traceback = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_USER
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if sys.platform != "linux":
        print(f"error: realhf runs on Linux, this is {sys.platform}; use a container: Dockerfile", file=sys.stderr)
        return EXIT_USER
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        from realhf.experiments import EXPERIMENTS

        hint = f"; use realhf quickstart {command}" if command in EXPERIMENTS else did_you_mean(command, COMMANDS)
        print(f"error: unknown command '{command}'{hint}; realhf --help lists the commands", file=sys.stderr)
        return EXIT_USER
    if command not in OWN_HELP and {"-h", "--help"} & set(rest):
        args, text = COMMANDS[command]
        print(f"usage: realhf {command} {args}".rstrip() + f"\n\n{text}")
        return 0
    try:
        importlib.import_module(f"realhf.apps.commands.{command}").main(rest)
        return 0
    except (UserError, RunFailed) as error:
        if show_traceback:
            raise
        print(describe(error), file=sys.stderr)
        is_infeasible = command == "plan" and isinstance(error, InfeasibleError)
        return EXIT_FAILED if is_infeasible or isinstance(error, RunFailed) else EXIT_USER
    except RunStopped as stopped:
        print(stopped)
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("interrupted: workers are stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        poll = select.poll()
        poll.register(1, select.POLLOUT)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):  # not the pipe of standard output
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for unflushed output
        return EXIT_BROKEN_PIPE


def describe(error: UserError | RunFailed) -> str:
    """Format an error: its problems as a numbered list, or the cause of a failed run."""
    if isinstance(error, RunFailed):
        return f"{error.traceback_text}error: {error}"
    if len(error.problems) == 1:
        return f"error: {error.problems[0]}"
    lines = [f"  {i}. {problem}" for i, problem in enumerate(error.problems, 1)]
    return "\n".join([f"error: {len(lines)} problems; nothing was launched", *lines])


def console(arguments: list[str] | None = None) -> NoReturn:
    """Run the command of this process, by default that of its command line, and exit."""
    interrupt_once()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
