"""``realhf demo``: SFT and then PPO with verified responses on a small arithmetic task, on CPU."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

from realhf.apps.commands.quickstart import read_words
from realhf.apps.prepare.launching import start
from realhf.apps.prepare.preflight import preflight
from realhf.base.errors import RunFailed, UserError
from realhf.launch.local import preloaded_workers
from realhf.plan.run_spec import RunSpec

SFT_STEPS, PPO_STEPS = 90, 50
WINDOW = 5  # number of first and last steps whose mean rewards are compared
SFT_OPTIONS = f"""
    dataset.train_bs_n_seqs=64 model.init_from_scratch=True model.optimizer.lr=3e-3
    model.optimizer.lr_scheduler_type=constant exp_ctrl.total_train_steps={SFT_STEPS} exp_ctrl.total_train_epochs=10
"""
PPO_OPTIONS = f"""
    dataset.train_bs_n_seqs=64 actor.optimizer.lr=5e-4 actor.optimizer.lr_scheduler_type=constant
    critic.optimizer.lr=1e-3 critic.optimizer.lr_scheduler_type=constant ppo.group_size=4 ppo.kl_ctl=0.01
    ppo.gen.max_new_tokens=32 exp_ctrl.total_train_steps={PPO_STEPS} n_gpus_per_node=2
"""


def main(arguments: list[str]) -> None:
    if arguments and (arguments[0] != "--dir" or len(arguments) != 2):
        raise UserError("usage: realhf demo [--dir DIR]")
    folder = Path(arguments[1] if arguments else "demo-run")
    task = make_task(folder / "task")
    model = [f"model.config={task}/model", f"model.tokenizer={task}/tokenizer"]
    sft = run("sft", folder, [f"dataset.path={task}/sft.jsonl", *model, *SFT_OPTIONS.split()])
    actor = f"actor.path={sft.paths.model('model', SFT_STEPS)}"
    report(run("ppo-math", folder, [f"dataset.path={task}/train.jsonl", actor, *PPO_OPTIONS.split()]))


def make_task(folder: Path) -> Path:
    """Write the dataset, tokenizer and model config."""
    program = [sys.executable, "-m", "realhf.apps.demo.arithmetic", str(folder), "--hidden", "96", "--layers", "3"]
    with subprocess.Popen(program) as generator:
        importlib.import_module("transformers.tokenization_utils_tokenizers")  # slow; needed next
    if generator.returncode:
        raise UserError(
            f"the task of the demo could not be made (exit code {generator.returncode}); is {folder} writable?"
        )
    return folder


def run(experiment: str, folder: Path, words: list[str]) -> RunSpec:
    common = [f"fileroot={folder}", "experiment_name=demo", f"trial_name={experiment}", "overwrite=True", "device=cpu"]
    options, paths = read_words(experiment, [*common, *words])
    with preloaded_workers(options):
        spec = preflight(experiment, options, paths)
        start([spec], spec.config, spec.paths)
    return spec


def report(run: RunSpec) -> None:
    """Print the increase of the reward; RunFailed if it is too small."""
    rewards = [json.loads(line)["reward/mean"] for line in run.paths.metrics.read_text().splitlines()]
    first, last = (sum(part) / WINDOW for part in (rewards[:WINDOW], rewards[-WINDOW:]))
    print(f"demo    mean reward {first:.3f} over the first {WINDOW} steps, {last:.3f} over the last {WINDOW}: "
          f"up by {last - first:.3f}")  # fmt: skip
    print(f"demo    the model is in {run.paths.model('actor', PPO_STEPS)}; load it with transformers' "
          "AutoModelForCausalLM.from_pretrained")  # fmt: skip
    if last - first < 0.25:
        raise RunFailed(f"the reward of the demo increased by {last - first:.3f}, expected at least 0.25")
