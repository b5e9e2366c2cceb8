"""``realhf profile``: measure models, links and algorithms on this machine, for ``realhf plan`` and plan search."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from realhf.api.codec import from_json, to_plain
from realhf.api.config import Device, ExperimentConfig, opt
from realhf.api.model_config import ModelConfig
from realhf.apps.prepare.options import options_of, read_options
from realhf.apps.prepare.preflight import pick_device
from realhf.apps.view.console import open_console
from realhf.arch.hf_config import read_hf_config
from realhf.base.errors import UserError
from realhf.plan.cost.profile import Fit, Profile

USAGE = """usage: realhf profile [model=FOLDER_OR_CONFIG[,...]] [key=value ...]

Takes about a minute and a half per model, on a machine with nothing else to do. What is measured is added to the
profile that is there already.
"""


@dataclass
class ProfileOptions:
    """What can be said after ``realhf profile``."""

    model: str = opt("", "Hugging Face folders or config.json files, separated by commas; depth does not matter")
    n_gpus_per_node: int = opt(1, "workers: what they do together is measured for 2, 4, ... up to as many")
    device: Device = opt(Device.auto, "cpu, cuda, or what the machine has")
    bf16: bool = opt(False, "measure the models in bfloat16")
    threads_per_worker: int = opt(1, "CPU threads of one worker")
    seconds: float = opt(90.0, "time for each model; less gives a rough profile")
    out: str = opt("runs/profile.json", "where the profile goes")


@dataclass(frozen=True)
class Wanted:
    """The options, read and checked."""

    device: str
    models: tuple[ModelConfig, ...]
    before: Profile | None


def main(arguments: list[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        for option in options_of(ProfileOptions):
            print(f"  {option.key + ': ' + option.type:<28} {option.help} [{option.default}]")
        return
    options = read_options(ProfileOptions, arguments, option_problems)
    wanted = check(options)
    from realhf.system.profiler.profiler import ProfileJob, n_gpus, take_profile, this_machine

    machine = this_machine(wanted.device, options.threads_per_worker)
    if wanted.before is not None and wanted.before.machine != machine:
        raise UserError(f"out={options.out} is of another machine, {wanted.before.machine}; this one is {machine}. "
                        "Give another file")  # fmt: skip
    if wanted.device == "cuda" and options.n_gpus_per_node > n_gpus():
        raise UserError(f"n_gpus_per_node={options.n_gpus_per_node}, but there are {n_gpus()} GPUs here")
    job = ProfileJob(
        wanted.device,
        options.n_gpus_per_node,
        options.threads_per_worker,
        options.bf16,
        wanted.models,
        options.seconds,
    )
    began, out = time.monotonic(), open_console()
    profile = take_profile(job, lambda text: out.print(f"{time.monotonic() - began:6.1f} s  {text}"))
    profile = wanted.before + profile if wanted.before else profile
    write(profile, Path(options.out))
    out.print(table(profile))
    out.print(f"{profile.machine}\nprofile  {options.out}, {time.monotonic() - began:.0f} s")


def option_problems(options: ProfileOptions) -> list[str]:
    positive = ("n_gpus_per_node", "threads_per_worker", "seconds")
    return [f"{key} must be positive, got {getattr(options, key)}" for key in positive if getattr(options, key) <= 0]


def check(options: ProfileOptions) -> Wanted:
    """Read the models and the profile that is there; ``UserError`` lists all that cannot be used."""
    problems, models = [], []
    for path in filter(None, options.model.split(",")):
        try:
            models.append(read_hf_config(path, scalar_head=False))
        except ValueError as error:
            problems.append(f"model: {error}")
    device = ""
    try:
        device = pick_device(ExperimentConfig(device=options.device))
    except UserError as error:
        problems += error.problems
    out, before = Path(options.out), None
    if out.is_dir():
        problems.append(f"out={options.out} is a folder; give a file")
    elif out.exists():
        try:
            before = from_json(out.read_text(), Profile)
        except Exception as error:  # whatever is in a file that is no profile
            problems.append(f"out={options.out} is there and no profile ({type(error).__name__}: {error}); remove it, "
                            "or give another file")  # fmt: skip
    if problems:
        raise UserError(problems)
    return Wanted(device, tuple(models), before)


def write(profile: Profile, path: Path) -> None:
    """Write a profile, a line for each fit and each point: all of it or nothing."""
    plain = to_plain(profile)
    fits = ",\n".join(f" {json.dumps(name)}: {_fit_lines(fit)}" for name, fit in plain.pop("fits").items())
    text = json.dumps(plain)[:-1] + f', "fits": {{\n{fits}\n}}}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text)
    aside.replace(path)


def _fit_lines(fit: dict) -> str:
    points = ",\n".join(f"   {json.dumps(point)}" for point in fit["points"])
    return f'{{"coefficients": {json.dumps(fit["coefficients"])}, "points": [\n{points}\n  ]}}'


def table(profile: Profile) -> Table:
    """Show every fit: from how many points, how well it fits, how much they varied, and where most of the time goes."""
    shown = Table(box=None, pad_edge=False)
    for head in ("measured", "points", "error", "spread", "coefficients"):
        shown.add_column(head, justify="right" if head in ("points", "error", "spread") else "left")
    for name, fit in sorted(profile.fits.items()):
        unit = "B" if name.endswith("_bytes") else "s"
        row = (
            name,
            str(len(fit.points)),
            f"{100 * fit.error:.1f}%",
            f"{100 * fit.spread:.0f}%",
            _main_parts(fit, unit),
        )
        shown.add_row(*row)
    return shown


def _main_parts(fit: Fit, unit: str) -> str:
    largest = fit.points[-1].counts
    parts = sorted(fit.coefficients, key=lambda name: -fit.coefficients[name] * largest.get(name, 0.0))
    return ", ".join(f"{name} {_scaled(fit.coefficients[name], unit)}" for name in parts[:4] if fit.coefficients[name])


def _scaled(value: float, unit: str) -> str:
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value / 1e-12:.3g} p{unit}"
