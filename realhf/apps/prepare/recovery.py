"""Resumes runs from their last checkpoint: after a failure, with other layouts, or with other workers."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from realhf.api.config import RecoverMode
from realhf.api.experiment import Experiment
from realhf.apps.prepare.hub import with_snapshots
from realhf.apps.prepare.launching import is_queued, launch, locked, queue, read_run, write_run
from realhf.apps.prepare.options import updated
from realhf.apps.prepare.preflight import preflight
from realhf.base.errors import RunFailed, UserError
from realhf.base.paths import RunDir
from realhf.launch.elastic import ElasticRestart, failed_permanently, plan_restart
from realhf.plan.fingerprint import LR_SCHEDULE, fingerprint_changes, lr_changes
from realhf.plan.run_spec import RunSpec
from realhf.system.checkpoint.manifest import Manifest, flat_options, is_resumable, newest, rewind

MUTABLE = ("experiment_name", "trial_name", "fileroot", "overwrite", "mode", "device", "n_nodes", "n_gpus_per_node",
           "allocation_mode", "threads_per_worker", "startup_timeout", "call_timeout", "heartbeat_timeout",
           "channel_address", "verify_reallocation", "n_logged_generations", "save_roles", "recover_",
           "max_device_failures", "exp_ctrl.", "planner.", "wandb.", "vllm.", "logprob_diff_warning", "tensorboard.",
           "slurm.", "ray.", "resume.", "dataset.path", "dataset.eval_path", "reward.max_failures",
           *(f"reward.judge.{name}" for name in ("base_url", "api_key_env", "max_concurrency", "retries", "timeout",
                                                 "cache", "budget")))  # fmt: skip
"""Options that may change on resume: data and numerics are unaffected, or ``check_unchanged`` compares their effect."""
LENGTHS = ("exp_ctrl.total_train_steps", "exp_ctrl.total_train_epochs")
MUTABLE_PARTS = (".device_mesh", ".parallel.", ".mb_spec.", ".offload", ".zero_stage", ".gradient_checkpointing",
                 ".recompute_granularity", ".overlap_grad_reduce", ".tp_overlap", ".sequence_parallel")  # fmt: skip


def retried(run: Callable[[], None], paths: RunDir) -> None:
    """Call ``run``, and resume it from the last checkpoint after failures, as often as its options allow.

    After a permanent loss of workers the run continues on the remaining ones, if its options allow another plan.
    """
    deaths, restarts, first = Counter[int](), 0, None
    while True:
        try:
            return run()
        except RunFailed as failed:
            deaths.update(failed.lost)
            possible = _plan_restart(failed, deaths, paths)
            if possible is None:
                raise
            spec, restart = possible
            config = spec.config
            may = config.recover_mode in (RecoverMode.fault, RecoverMode.auto) and restarts < config.recover_retries
            if not may or restart.refusal:
                raise _with_hint(failed, restart, paths) from failed
            restarts, first = restarts + 1, failed
            print(f"failed  {str(failed).splitlines()[0]}\nresume  from the last checkpoint; "
                  f"{config.recover_retries - restarts} restarts are left")  # fmt: skip
            if restart.overrides:
                deaths.clear()  # ranks change
                before = config.n_nodes * config.n_gpus_per_node
                print(f"lost    {restart.lost}; continuing on {restart.workers} of {before} workers with "
                      f"{' '.join(restart.overrides)}")  # fmt: skip
            run = partial(resume, spec.experiment, updated(config, restart.overrides), paths)
        except UserError as error:
            if first is None:
                raise
            raise RunFailed(f"{first}\nthe run cannot be resumed: {error}") from error


def _plan_restart(failed: RunFailed, deaths: Counter[int], paths: RunDir) -> tuple[RunSpec, ElasticRestart] | None:
    """Return the run and its possible restart, None without workers or a checkpoint."""
    try:
        if failed.n_nodes is None or not is_resumable(paths.checkpoints):
            return None
        run = read_run(paths.root)
    except UserError as error:
        print(f"damaged {error}")
        return None
    lost = failed_permanently(run.config, deaths)
    restart = plan_restart(run.config, run.config.placements(), run.device, failed.n_nodes, lost)
    return (run, restart) if restart else None


def _with_hint(failed: RunFailed, restart: ElasticRestart, paths: RunDir) -> RunFailed:
    refusal = restart.refusal and f"\nno automatic restart: {restart.refusal}; recover_allocation=heuristic allows it"
    command = " ".join(["realhf resume", str(paths.root), *restart.overrides])
    return RunFailed(f"{failed}{refusal}\nresume with: {command}", failed.traceback_text)


def resume(name: str, experiment: Experiment, paths: RunDir) -> None:
    """Resume from the last checkpoint; ``UserError`` if files or options have changed."""
    with locked(paths):
        run, checkpoint = _prepare_resume(name, experiment, paths)
        if not is_queued(run.config):
            return launch(paths, checkpoint)
    queue([run], run.config, paths)


def _prepare_resume(name: str, experiment: Experiment, paths: RunDir) -> tuple[RunSpec, tuple[Path, Manifest]]:
    """Return the run and its last checkpoint, and remove later output."""
    last = newest(paths.checkpoints)
    if last is None:
        raise UserError(f"{paths.checkpoints} contains no checkpoint (exp_ctrl.ckpt_freq_steps writes them); "
                        "start the run again with overwrite=True")  # fmt: skip
    folder, manifest = last
    run = read_run(paths.root)  # keeps its plan unless options change
    experiment = with_snapshots(experiment, pinned=run.config.snapshots)
    if (experiment.snapshots != run.config.snapshots
            or not flat_options(run.config) == flat_options(experiment) == manifest.options):  # fmt: skip
        run = preflight(name, experiment, paths, resuming=True)
    accepted = check_unchanged(run, folder, manifest)
    step, done = manifest.step, rewind(paths, manifest.step)
    write_run(run)
    print(f"resume  {folder}: {step} of {run.schedule.n_steps} steps are done")
    if done > step:
        n_prompts = run.schedule.span(done - 1).stop - run.schedule.span(step).start
        print(f"repeat  steps {step + 1} to {done} ({n_prompts} prompts), completed after the checkpoint, and the "
              f"unfinished step {done + 1}")  # fmt: skip
    return run, (folder, replace(manifest, accepted=[*manifest.accepted, *((step, part) for part in accepted)]))


def check_unchanged(run: RunSpec, folder: Path, manifest: Manifest) -> list[str]:
    """Return the accepted differences of a run from its checkpoint; ``UserError`` for all others."""
    options = flat_options(run.config)
    differences = fingerprint_changes(manifest.fingerprint, run.fingerprint)
    trained = {role: spec for role, spec in run.roles.items() if run.graph.trainer(role)}
    n_steps = run.schedule.n_steps
    if n_steps != manifest.n_steps and (roles := lr_changes(trained, manifest.step, manifest.n_steps, n_steps)):
        causes = [f"{key} {manifest.options.get(key)} -> {options[key]}" for key in LENGTHS
                  if options[key] != manifest.options.get(key)] or ["another number of rows"]  # fmt: skip
        differences[LR_SCHEDULE] = (f"{', '.join(causes)} changes the learning-rate schedule of {', '.join(roles)}: "
                                    f"{n_steps} steps instead of {manifest.n_steps}")  # fmt: skip
    accept = run.config.resume.accept
    problems = [f"{text}; resume.accept=[{part}] accepts it" for part, text in differences.items()
                if part not in accept]  # fmt: skip
    if problems := changes(manifest.options, options) + problems:
        raise UserError([*problems, f"the checkpoint {folder} was taken with other files or options"])
    for text in differences.values():
        print(f"accept  {text}")
    return list(differences)


def changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the changed options that are not mutable, one line each."""
    changed = []
    for key in sorted({*now, *before}):
        old, new = before.get(key, "(unset)"), now.get(key, "(unset)")
        if old != new and not key.startswith(MUTABLE) and not any(part in f".{key}" for part in MUTABLE_PARTS):
            changed.append(f"{key}: {old} at the checkpoint, {new} now")
    return changed
