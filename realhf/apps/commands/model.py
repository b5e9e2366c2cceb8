"""``realhf model check``: compares a model of a Hugging Face folder with transformers."""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from realhf.api.config.option import COUNT, Range, opt
from realhf.api.layout import ParallelStrategy
from realhf.apps.prepare.option_help import options_help
from realhf.apps.prepare.options import updated
from realhf.apps.view.console import open_console
from realhf.arch.hf_config import read_hf_config
from realhf.base.errors import RunFailed, UserError
from realhf.plan.compile.check import strategy_problems

USAGE = """usage: realhf model check FOLDER [key=value ...]

Compares the model of a Hugging Face folder with transformers: log-probabilities of random rows, greedy generation,
saved tensors, and layouts on several processes. A folder without weights, or layers=N, stands for a random model of
its configuration. Everything is computed on the CPU in float32, with two copies of the model in memory.
"""


@dataclass
class ModelCheckOptions:
    layers: int = opt(0, "check a random model with this number of layers (0: the folder's weights)", Range(0, 1000))
    layouts: str = opt("t2,p2,t2p2", "comma-separated tensor- and pipeline-parallel layouts; those that do not fit the "
                                     "model are left out")  # fmt: skip
    rows: int = opt(4, "number of random rows", COUNT)
    longest: int = opt(48, "tokens of the longest row", Range(8, 1 << 20))
    seed: int = opt(1, "seed of rows and random models", Range(0, 1 << 31))


def main(arguments: list[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        print(options_help(ModelCheckOptions))
        return
    if arguments[:1] != ["check"] or len(arguments) < 2:
        raise UserError("usage: realhf model check FOLDER [key=value ...]")
    folder, options = Path(arguments[1]), updated(ModelCheckOptions(), arguments[2:])
    strategies = check_options(folder, options)
    from realhf.system.model_check.model_check import ModelCheck  # after the options are valid: it imports torch

    start, out, failed = time.monotonic(), open_console(), 0
    with tempfile.TemporaryDirectory(prefix="realhf-model-") as work:
        sizes = options.layers, options.rows, options.longest, options.seed
        for result in ModelCheck(folder, Path(work), *sizes).run(strategies):
            failed += not result.passed
            out.print(f"{'ok    ' if result.passed else 'FAILED'} {result.name:<10} {result.text}")
    if failed:
        raise RunFailed(f"{failed} checks of '{folder}' failed")
    out.print(f"the model equals that of transformers ({time.monotonic() - start:.0f} s)")


def check_options(folder: Path, options: ModelCheckOptions) -> list[ParallelStrategy]:
    """Return the layouts to check; UserError for a model or options that are not supported."""
    problems: list[str] = []
    strategies: list[ParallelStrategy] = []
    try:
        config = read_hf_config(folder, scalar_head=False)
    except ValueError as error:
        raise UserError(str(error)) from error
    if options.layers > config.n_layers:
        problems.append(f"layers={options.layers}: the model has {config.n_layers}")
    config = replace(config, n_layers=options.layers or config.n_layers)
    for text in filter(None, options.layouts.split(",")):
        try:
            strategy = ParallelStrategy.parse(text)
        except ValueError as error:
            problems.append(f"layouts={options.layouts}: {error}")
            continue
        if strategy.dp > 1:
            problems.append(f"layouts={options.layouts}: {text} has data parallelism; only tp and pp are checked")
        elif not strategy_problems(config, strategy):  # others cannot be used for this model
            strategies.append(strategy)
    if problems:
        raise UserError(problems)
    return strategies
