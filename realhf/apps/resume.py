"""``realhf resume``: goes on from a run's last checkpoint, also with other layouts or on another number of workers."""

from collections.abc import Callable
from pathlib import Path

from realhf.api.config import ExperimentConfig, RecoverMode
from realhf.api.experiment import Experiment
from realhf.apps.launching import as_experiment, launch, read_run, write_run
from realhf.apps.options import load_experiment, override
from realhf.apps.preflight import preflight
from realhf.base.errors import RunFailed, UserError
from realhf.base.paths import RunDir
from realhf.experiments import experiment_class
from realhf.system.recovery import Manifest, flat_options, newest, rewind
from realhf.system.run import RunSpec

USAGE = "usage: realhf resume RUN_DIR [key=value ...]"
FREE = ("experiment_name", "trial_name", "fileroot", "overwrite", "mode", "device", "n_nodes", "n_gpus_per_node",
        "allocation_mode", "threads_per_worker", "startup_timeout", "call_timeout", "heartbeat_timeout",
        "channel_address", "verify_reallocation",
        "n_logged_generations", "save_roles", "recover_mode", "recover_retries", "exp_ctrl.", "planner.", "wandb.",
        "tensorboard.", "slurm.", "ray.", "dataset.path")  # fmt: skip
"""Options that may differ from those of the checkpoint: they change neither data nor mathematics. The data file is
compared by what it holds."""
FREE_PARTS = (".device_mesh", ".parallel.", ".mb_spec.", ".offload", ".gradient_checkpointing", ".sequence_parallel")


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    paths = RunDir(Path(arguments[0]))
    if not paths.config.is_file() or not paths.plan.is_file():
        raise UserError(
            f"{paths.root} holds no run: {paths.config.name} and {paths.plan.name} are not both there\n{USAGE}"
        )
    name = read_run(paths.root).experiment
    config = load_experiment(experiment_class(name), paths.config)
    resume(name, as_experiment(override(config, arguments[1:])), paths)


def resumable(paths: RunDir) -> bool:
    """Tell whether there is a checkpoint to go on from; ``UserError`` for a damaged one."""
    return newest(paths.checkpoints) is not None


def retried(run: Callable[[], None], again: Callable[[], None], config: ExperimentConfig, paths: RunDir) -> None:
    """Call ``run``, and ``again`` after failures, as often as the options allow and where a checkpoint is."""
    left = config.recover_retries
    while True:
        try:
            return run()
        except RunFailed as error:
            if config.recover_mode not in (RecoverMode.fault, RecoverMode.auto) or not left or not resumable(paths):
                raise
            left -= 1
            print(f"failed  {str(error).splitlines()[0]}\nresume  from the last checkpoint; {left} restarts are left")
            run = again


def resume(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Go on from the last checkpoint; ``UserError`` where data or options are not what they were."""
    last = newest(paths.checkpoints)
    if last is None:
        raise UserError(f"{paths.checkpoints} holds no checkpoint (exp_ctrl.ckpt_freq_steps writes them); "
                        "start the run again with overwrite=True")  # fmt: skip
    run = read_run(paths.root)  # with the plan that it had
    if flat_options(run.config) != flat_options(experiment.config):
        run = preflight(name, experiment, paths, resuming=True)
    if problems := differences(run, last[1]):
        raise UserError([*problems, f"the checkpoint {last[0]} was taken with other data or options; start a new run"])
    rewind(paths, last[1].step)
    write_run(run, keep=True)
    print(f"resume  {last[0]}: {last[1].step} of {run.length.n_steps} steps are done")
    launch(run, last)


def differences(run: RunSpec, manifest: Manifest) -> list[str]:
    """Return what differs between a run and a checkpoint and may not."""
    problems = []
    if run.data_digest != manifest.data:
        problems.append(f"{run.config.dataset.path} has changed: its SHA-256 was {manifest.data[:12]}..., "
                        f"it is {run.data_digest[:12]}...")  # fmt: skip
    now = flat_options(run.config)
    for key in sorted({*now, *manifest.options}):
        if key.startswith(FREE) or any(part in f".{key}" for part in FREE_PARTS):
            continue
        before, after = manifest.options.get(key, "(not there)"), now.get(key, "(not there)")
        if before != after:
            problems.append(f"{key}: {before} at the checkpoint, {after} now")
    return problems
