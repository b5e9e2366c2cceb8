"""Goes on from a run's last checkpoint: by itself after a failure, or with other layouts, or with other workers."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from realhf.api.config import RecoverMode
from realhf.api.experiment import Experiment
from realhf.apps.prepare.launching import as_experiment, launch, read_run, write_run
from realhf.apps.prepare.options import override
from realhf.apps.prepare.preflight import preflight
from realhf.apps.prepare.run_dir_checks import running_message
from realhf.base.atomic_io import is_locked
from realhf.base.errors import RunFailed, UserError
from realhf.base.paths import RunDir
from realhf.launch.elastic import ElasticRestart, failed_permanently, plan_restart
from realhf.plan.run_spec import RunSpec
from realhf.system.checkpoint.manifest import Manifest, flat_options, newest, rewind

FREE = ("experiment_name", "trial_name", "fileroot", "overwrite", "mode", "device", "n_nodes", "n_gpus_per_node",
        "allocation_mode", "threads_per_worker", "startup_timeout", "call_timeout", "heartbeat_timeout",
        "channel_address", "verify_reallocation",
        "n_logged_generations", "save_roles", "recover_", "exp_ctrl.", "planner.", "wandb.",
        "vllm.", "logprob_diff_warning",
        "tensorboard.", "slurm.", "ray.", "dataset.path")  # fmt: skip
"""Options that may differ from those of the checkpoint: they change neither data nor mathematics. The data file is
compared by what it holds."""
FREE_PARTS = (".device_mesh", ".parallel.", ".mb_spec.", ".offload", ".gradient_checkpointing", ".sequence_parallel")


def resumable(paths: RunDir) -> bool:
    """Tell whether there is a checkpoint to go on from; ``UserError`` for a damaged one."""
    return newest(paths.checkpoints) is not None


def retried(run: Callable[[], None], paths: RunDir) -> None:
    """Call ``run``, and go on from the last checkpoint after failures, as often as its options allow.

    Where workers are lost for good, what is left goes on: under a plan for them, if the planner may make it.
    """
    deaths, restarts, first = Counter[int](), 0, None
    while True:
        try:
            return run()
        except RunFailed as failed:
            deaths.update(failed.lost)
            config = read_run(paths.root).config
            may = config.recover_mode in (RecoverMode.fault, RecoverMode.auto) and restarts < config.recover_retries
            way, experiment = _way_on(failed, deaths, paths)
            if way is None:
                raise
            if not may or way.refusal:
                raise _with_hint(failed, way, paths) from failed
            restarts, first = restarts + 1, failed
            print(f"failed  {str(failed).splitlines()[0]}\nresume  from the last checkpoint; "
                  f"{config.recover_retries - restarts} restarts are left")  # fmt: skip
            if way.overrides:
                deaths.clear()  # ranks are new ones
                before = config.n_nodes * config.n_gpus_per_node
                print(f"lost    {way.lost}; {way.workers} of {before} workers go on, under a plan for them: "
                      f"{' '.join(way.overrides)}")  # fmt: skip
            run = partial(resume, read_run(paths.root).experiment, experiment, paths)
        except UserError as error:
            if first is None:
                raise
            raise RunFailed(f"{first}\nit cannot go on with what is left: {error}") from error


def _way_on(failed: RunFailed, deaths: Counter[int], paths: RunDir) -> tuple[ElasticRestart | None, Experiment]:
    """Return how to go on, if there is anything to go on with and from, and the experiment that would."""
    run = read_run(paths.root)
    experiment = as_experiment(run.config)
    try:
        if failed.n_nodes is None or not resumable(paths):
            return None, experiment
    except UserError as error:
        print(f"damaged {error}")
        return None, experiment
    gone = failed_permanently(run.config, deaths)
    way = plan_restart(run.config, experiment.placements(), run.device, failed.n_nodes, gone)
    return way, as_experiment(override(run.config, way.overrides)) if way else experiment


def _with_hint(failed: RunFailed, way: ElasticRestart, paths: RunDir) -> RunFailed:
    """Return a failure with the command that would go on."""
    why = f"\nit does not go on by itself: {way.refusal}; recover_allocation=heuristic allows it" if way.refusal else ""
    command = " ".join(["realhf resume", str(paths.root), *way.overrides])
    return RunFailed(f"{failed}{why}\ngo on with: {command}", failed.traceback_text)


def resume(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Go on from the last checkpoint; ``UserError`` where data or options are not what they were."""
    if is_locked(paths.lock):
        raise UserError(running_message(paths))
    last = newest(paths.checkpoints)
    if last is None:
        raise UserError(f"{paths.checkpoints} holds no checkpoint (exp_ctrl.ckpt_freq_steps writes them); "
                        "start the run again with overwrite=True")  # fmt: skip
    run = read_run(paths.root)  # with the plan that it had
    if flat_options(run.config) != flat_options(experiment.config):
        run = preflight(name, experiment, paths, resuming=True)
    if problems := differences(run, last[1]):
        raise UserError([*problems, f"the checkpoint {last[0]} was taken with other data or options; start a new run"])
    step, done = last[1].step, rewind(paths, last[1].step)
    write_run(run, keep=True)
    print(f"resume  {last[0]}: {step} of {run.schedule.n_steps} steps are done")
    if done > step:
        n_prompts = run.schedule.span(done - 1).stop - run.schedule.span(step).start
        print(f"again   steps {step + 1} to {done} ({n_prompts} prompts), which no checkpoint holds, and what was done "
              f"of step {done + 1}; no prompt is left out")  # fmt: skip
    launch(run, last)


def differences(run: RunSpec, manifest: Manifest) -> list[str]:
    """Return what differs between a run and a checkpoint and may not."""
    problems = []
    if run.data_digest != manifest.data:
        problems.append(f"{run.config.dataset.path} has changed: its SHA-256 was {manifest.data[:12]}..., "
                        f"it is {run.data_digest[:12]}...")  # fmt: skip
    return problems + changes(manifest.options, flat_options(run.config))


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return which options were changed that may not be."""
    keys = [k for k in sorted({*now, *before}) if not k.startswith(FREE) and not any(p in f".{k}" for p in FREE_PARTS)]
    pairs = {key: (before.get(key, "(not there)"), now.get(key, "(not there)")) for key in keys}
    return [f"{key}: {old} at the checkpoint, {new} now" for key, (old, new) in pairs.items() if old != new]
