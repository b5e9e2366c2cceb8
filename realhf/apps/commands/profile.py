"""``realhf profile``: measures models, links and algorithms of machines for predictions and plan search."""

import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.table import Table

from realhf.api.config import Device, ExperimentConfig, Mode
from realhf.api.model_config import ModelConfig
from realhf.apps.prepare.launching import is_queued
from realhf.apps.prepare.option_help import options_help
from realhf.apps.prepare.options import updated
from realhf.apps.prepare.preflight import Findings, pick_device
from realhf.apps.profiles.profile_file import read_profile, update_profile
from realhf.apps.profiles.profile_job import ProfileOptions, lead, write_job
from realhf.apps.view.console import open_console
from realhf.arch.hf_config import read_hf_config
from realhf.base.errors import UserError
from realhf.base.paths import RunDir
from realhf.launch import launch_problems, missing
from realhf.launch.slurm_job import follow, log_file, script, submit
from realhf.plan.machines.profile import Fit, Profile

USAGE = """usage: realhf profile [model=FOLDER_OR_CONFIG[,...]] [key=value ...]

Takes about a minute and a half per model on an otherwise idle machine. Results are added to an existing profile.
With n_nodes=2 mode=slurm, a job of two nodes measures their links, too.
"""


def main(arguments: list[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        print(options_help(ProfileOptions))
        return
    options = updated(ProfileOptions(), arguments)
    device, models, previous = check(options)
    start, out = time.monotonic(), open_console()
    if options.mode is Mode.local:
        profile = measure_here(options, device, models, previous)
    else:
        profile = measure_elsewhere(options)
    out.print(table(profile))
    out.print(f"{profile.machine}\nprofile  {options.out}, {time.monotonic() - start:.0f} s")


def measure_here(
    options: ProfileOptions, device: str, models: tuple[ModelConfig, ...], previous: Profile | None
) -> Profile:
    """Measure this machine and return the updated profile."""
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
    return update_profile(Path(options.out), profile, "out")


def measure_elsewhere(options: ProfileOptions) -> Profile:
    """Measure in a job of SLURM, or on a Ray cluster, and return the updated profile.

    The directory of the job is beside the output file. It is removed if the job succeeds.
    """
    file = Path(options.out).resolve()
    models = ",".join(str(Path(path).resolve()) for path in options.model.split(",") if path)
    file.parent.mkdir(parents=True, exist_ok=True)
    paths = RunDir(Path(tempfile.mkdtemp(prefix=f"{file.stem}-", suffix=".job", dir=file.parent)))
    write_job(paths, replace(options, out=str(file), model=models))
    try:
        queue(paths, options.launch_config()) if is_queued(options.launch_config()) else lead(paths)
    except (KeyboardInterrupt, UserError):
        shutil.rmtree(paths.root)
        raise
    shutil.rmtree(paths.root)
    return read_profile(file, "out")


def queue(paths: RunDir, config: ExperimentConfig) -> None:
    """Submit a job to SLURM and follow it to its end."""
    paths.job_script.write_text(script([paths.root], config, config.device.value, paths.root, ""))
    job = submit(paths.job_script, 1)
    print(f"job     {job.number}: {paths.job_script}; Ctrl-C cancels it", flush=True)
    follow(job, [log_file(paths.root)], [paths.root])


def check(options: ProfileOptions) -> tuple[str, tuple[ModelConfig, ...], Profile | None]:
    """Return the device, the models, and the existing profile, if any; UserError lists all problems."""
    findings, paths = Findings(), filter(None, options.model.split(","))
    models = [findings.attempt(partial(read_hf_config, path, scalar_head=False), "model: ") for path in paths]
    config = options.launch_config()
    device = findings.attempt(lambda: pick_device(config))
    findings.invalid += launch_problems(config) + missing(config)
    if options.mode is Mode.inline:
        findings.invalid.append("mode=inline: profiles are measured in worker processes; set mode=local")
    if options.mode is Mode.ray and options.device is Device.auto:
        findings.invalid.append("mode=ray: set device=cuda or device=cpu")
    if options.slurm.array_seeds:
        findings.invalid.append("slurm.array_seeds is for training runs; omit it")
    out, previous = Path(options.out), None
    if out.is_dir():
        findings.invalid.append(f"out={options.out} is a folder, not a file")
    elif out.exists():
        previous = findings.attempt(lambda: read_profile(out, "out"))
    findings.report()
    assert device
    return device, tuple(model for model in models if model), previous


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
