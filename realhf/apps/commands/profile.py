"""``realhf profile``: measures models, links and algorithms on this machine for predictions and plan search."""

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from realhf.api.codec import from_json, to_plain
from realhf.api.config import Device, ExperimentConfig
from realhf.api.config.option import COUNT, SECONDS, opt
from realhf.api.model_config import ModelConfig
from realhf.apps.prepare.option_help import options_help
from realhf.apps.prepare.options import updated
from realhf.apps.prepare.preflight import Findings, pick_device
from realhf.apps.view.console import open_console
from realhf.arch.hf_config import read_hf_config
from realhf.base.atomic_io import atomic_write
from realhf.base.errors import UserError
from realhf.plan.cost.profile import Fit, Profile

USAGE = """usage: realhf profile [model=FOLDER_OR_CONFIG[,...]] [key=value ...]

Takes about a minute and a half per model on an otherwise idle machine. Results are added to an existing profile.
"""


@dataclass
class ProfileOptions:
    model: str = opt(
        "", "comma-separated Hugging Face folders or config.json files; the number of layers does not matter"
    )
    n_gpus_per_node: int = opt(1, "number of workers; collectives are measured for 2, 4, ... up to this number", COUNT)
    device: Device = opt(Device.auto, "cpu, cuda, or auto for cuda if available")
    bf16: bool = opt(False, "measure the models in bfloat16")
    threads_per_worker: int = opt(1, "CPU threads per worker", COUNT)
    seconds: float = opt(90.0, "time per model; less gives a rough profile", SECONDS)
    out: str = opt("runs/profile.json", "output file")


def main(arguments: list[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        print(options_help(ProfileOptions))
        return
    options = updated(ProfileOptions(), arguments)
    device, models, previous = check(options)
    from realhf.system.profiler.profiler import ProfileJob, n_gpus, take_profile, this_machine

    machine = this_machine(device, options.threads_per_worker)
    if previous is not None and previous.machine != machine:
        raise UserError(f"out={options.out} is the profile of another machine ({previous.machine}; this is {machine}); "
                        "choose another file")  # fmt: skip
    if device == "cuda" and options.n_gpus_per_node > n_gpus():
        raise UserError(f"n_gpus_per_node={options.n_gpus_per_node}, but this machine has {n_gpus()} GPUs")
    job = ProfileJob(device, options.n_gpus_per_node, options.threads_per_worker, options.bf16, models, options.seconds)
    start, out = time.monotonic(), open_console()
    profile = take_profile(job, lambda text: out.print(f"{time.monotonic() - start:6.1f} s  {text}"))
    profile = previous + profile if previous else profile
    write(profile, Path(options.out))
    out.print(table(profile))
    out.print(f"{profile.machine}\nprofile  {options.out}, {time.monotonic() - start:.0f} s")


def check(options: ProfileOptions) -> tuple[str, tuple[ModelConfig, ...], Profile | None]:
    """Return the device, the models, and the existing profile, if any; UserError lists all problems."""
    findings, paths = Findings(), filter(None, options.model.split(","))
    models = [findings.attempt(partial(read_hf_config, path, scalar_head=False), "model: ") for path in paths]
    device = findings.attempt(lambda: pick_device(ExperimentConfig(device=options.device)))
    out, previous = Path(options.out), None
    if out.is_dir():
        findings.invalid.append(f"out={options.out} is a folder, not a file")
    elif out.exists():
        try:
            previous = from_json(out.read_text(), Profile)
        except Exception as error:  # arbitrary file content
            findings.invalid.append(f"out={options.out} exists and is not a profile ({type(error).__name__}: {error}); "
                                    "remove it or choose another file")  # fmt: skip
    findings.report()
    assert device
    return device, tuple(model for model in models if model), previous


def write(profile: Profile, path: Path) -> None:
    """Write a profile atomically, with one line per fit and per point."""
    plain = to_plain(profile)
    fits = ",\n".join(f" {json.dumps(name)}: {_fit_lines(fit)}" for name, fit in plain.pop("fits").items())
    text = json.dumps(plain)[:-1] + f', "fits": {{\n{fits}\n}}}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)


def _fit_lines(fit: dict) -> str:
    points = ",\n".join(f"   {json.dumps(point)}" for point in fit["points"])
    return f'{{"coefficients": {json.dumps(fit["coefficients"])}, "points": [\n{points}\n  ]}}'


def table(profile: Profile) -> Table:
    """Return a table of all fits: number of points, error, spread of repeated measurements, largest coefficients."""
    result = Table(box=None, pad_edge=False)
    for head in ("measured", "points", "error", "spread", "coefficients"):
        result.add_column(head, justify="right" if head in ("points", "error", "spread") else "left")
    for name, fit in sorted(profile.fits.items()):
        unit = "B" if name.endswith("_bytes") else "s"
        error, spread = f"{100 * fit.error:.1f}%", f"{100 * fit.spread:.0f}%"
        result.add_row(name, str(len(fit.points)), error, spread, _largest_terms(fit, unit))
    return result


def _largest_terms(fit: Fit, unit: str) -> str:
    largest = fit.points[-1].counts
    names = sorted(fit.coefficients, key=lambda name: -fit.coefficients[name] * largest.get(name, 0.0))
    return ", ".join(f"{name} {_scaled(fit.coefficients[name], unit)}" for name in names[:4] if fit.coefficients[name])


def _scaled(value: float, unit: str) -> str:
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value / 1e-12:.3g} p{unit}"
