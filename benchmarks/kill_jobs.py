"""The runs of ``kill_and_resume.py``: a job for each feature with state that a checkpoint must contain, and its faults.

Jobs with environments are in ``ENVIRONMENT_JOBS``. A process of an environment is replaced when it dies, and an episode
whose agent dies is played again (``env.retries``), so these faults do not end a run.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REALHF = [sys.executable, "-m", "realhf"]
EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.py"
EPISODES = Path(__file__).with_name("kill_episodes.py")
DISK_FULL = "disk full"
FAULTS = ("master", "worker", "everything", "while writing", DISK_FULL, "truncated shard", "files limited")
ENVIRONMENT, AGENT = "environment", "agent"
STEPS, TIMEOUT_S = 8, 900.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '?' if message.role == 'user' else '=' }}{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
REWARDS = '''"""Rewards of random text."""


def graded(prompt: str, answer: str, row: dict) -> float:
    """Almost every answer has its own reward."""
    return (answer.count("1") + 2 * answer.count("2") - len(answer) / 4) / 8


def rare(prompt: str, answer: str, row: dict) -> float:
    """All answers to a prompt may have the same reward."""
    return float("1" in answer)
'''


@dataclass(frozen=True)
class Job:
    """A run on ``workers``; ``layouts`` are the options of other layouts, one of which each resume chooses."""

    name: str
    experiment: str
    workers: int
    words: str
    layouts: tuple[str, ...] = ()

    def command(self, root: Path) -> list[str]:
        """Return the command that starts or restarts the run in ``root``."""
        return [*REALHF, "quickstart", self.experiment, f"fileroot={root.parent.parent}", "overwrite=True",
                f"experiment_name={root.parent.name}", f"trial_name={root.name}", "device=cpu",
                f"n_gpus_per_node={self.workers}", "threads_per_worker=1", "startup_timeout=900",
                "heartbeat_timeout=600", "tensorboard.enabled=False", "exp_ctrl.ckpt_freq_steps=1",
                "exp_ctrl.total_train_epochs=9", f"exp_ctrl.total_train_steps={STEPS}", "dataset.train_bs_n_seqs=6",
                *self.words.format(task=root.parents[1] / "task", python=sys.executable).split()]  # fmt: skip

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults that this job can have: those of environments and agents need some."""
        options = {ENVIRONMENT: "env.cls=", AGENT: "AgentProgram"}
        return *FAULTS, *(fault for fault, option in options.items() if option in self.words)


def scratch(role: str) -> str:
    return (f"{role}.init_from_scratch=True {role}.config={{task}}/model {role}.tokenizer={{task}}/tokenizer "
            f"{role}.optimizer.lr=1e-3 ")  # fmt: skip


SFT = scratch("model") + "dataset.path={task}/sft.jsonl "
GRPO = (scratch("actor") + "dataset.path={task}/train.jsonl ppo.gen.max_new_tokens=10 ppo.group_size=2 "
        "ppo.ppo_n_minibatches=2 ")  # fmt: skip
GRADED = GRPO + "reward.fn={task}/rewards.py:graded "
PPO = GRADED + "critic.init_from_scratch=True critic.config={task}/model ppo.use_adaptive_kl_ctl=True "
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "critic_train", "actor_train")


def layout(mode: str, workers: int = 2, generation: int | None = None, training: int | None = None) -> str:
    """Return the options of an allocation; with ``mode=manual``, of generation and training on one worker each."""
    meshes = {call: generation if call == "actor_gen" else training for call in CALLS}
    return " ".join(
        (
            f"n_gpus_per_node={workers} allocation_mode={mode}",
            *(f"{call}.device_mesh={'null' if mesh is None else mesh}" for call, mesh in meshes.items()),
        )
    )


STALE = f"{PPO} max_staleness=2 {layout('manual', generation=0, training=1)}"
OTHER_LAYOUTS = (layout("d1", 1), layout("d2"), layout("t2"), layout("manual", generation=1, training=0))
ROUTED = {"model_type": "qwen3_moe", "num_experts": 300, "num_experts_per_tok": 4, "moe_intermediate_size": 16,
          "norm_topk_prob": True, "mlp_only_layers": [0]}  # fmt: skip
INDEPENDENT = {"head_dim": 16}  # the decoding kernel computes rows independently, so the times of replies do not matter
EVALUATED = "dataset.eval_fraction=0.2 exp_ctrl.eval_freq_steps=1 exp_ctrl.save_freq_steps=2 "
MEMBERS = ("1", "2")  # seeds of the reward models
EPISODIC = (GRPO.replace("{task}/model", "{task}/independent")
            + "env.max_turns=4 env.max_episode_len=120 env.timeout=60 ")  # fmt: skip
PARTIAL = "env.partial_tokens=20 ppo.recompute_logprobs=True"
HINTS = f"{EPISODIC} env.cls={{task}}/episodes.py:Hints "
PROGRAM = (EPISODIC.replace("{task}/tokenizer", "{task}/chat") + "env.cls=realhf.environments.agents:AgentProgram "
           "env.options.command=[{python},{task}/episodes.py] env.retries=9 ")  # fmt: skip
ENVIRONMENT_JOBS = (
    Job("environments", "grpo", 2, f"{HINTS} {EVALUATED}"),
    Job("environments, partial", "grpo", 2, f"{HINTS} {PARTIAL}"),
    Job(
        "environments, critic",
        "ppo-math",
        2,
        f"{HINTS} critic.init_from_scratch=True critic.config={{task}}/independent max_staleness=1 ppo.value_norm=True",
    ),
    Job("environments, lora", "grpo", 2, f"{HINTS} {PARTIAL} actor.lora.rank=4 actor.lora.dropout=0.1"),
    Job("agent", "grpo", 2, PROGRAM),
    Job("agent, partial", "grpo", 2, f"{PROGRAM} {PARTIAL}"),
)
JOBS = (
    Job("sft", "sft", 1, f"{SFT} {EVALUATED} exp_ctrl.keep_best=-eval/loss"),
    Job("sft pp", "sft", 2, f"{SFT} allocation_mode=p2"),
    Job("dpo", "dpo", 1, scratch("actor") + "dataset.path={task}/preferences.jsonl"),
    Job("ppo", "ppo-math", 1, PPO),
    Job("ppo dp", "ppo-math", 2, PPO),
    Job("ppo tp", "ppo-math", 2, f"{PPO} allocation_mode=t2"),
    Job("ppo pp", "ppo-math", 2, f"{PPO} allocation_mode=actor_gen:d2,*:p2"),
    Job("staleness", "ppo-math", 2, STALE),
    Job("staleness, other layouts", "ppo-math", 2,
        f"{STALE} actor.optimizer.lr=1e-4 critic.optimizer.lr=1e-4", OTHER_LAYOUTS),
    Job("grpo", "grpo", 2, GRADED),
    Job("resamples", "grpo", 1, GRPO + "reward.fn={task}/rewards.py:rare ppo.dynamic_sampling=True"),
    Job("best of n, EMA", "ppo-math", 2, f"{PPO} ppo.generation_size=4 ppo.ref_ema_eta=0.1"),
    Job("keep_best", "grpo", 1, f"{GRADED} {EVALUATED} exp_ctrl.keep_best=eval/reward"),
    Job("ensemble", "ppo", 1, PPO.replace("reward.fn={task}/rewards.py:graded", "ensemble.objective=UWO "
        f"ensemble.members=[{','.join(f'{{task}}/member-{seed}/models/model/step_1' for seed in MEMBERS)}]")),
    Job("lora", "grpo", 2, GRADED + "actor.lora.rank=4 actor.lora.dropout=0.1"),
    Job("prompt lookup", "grpo", 2, GRADED + "ppo.gen.prompt_lookup_num_tokens=4 ppo.gen.temperature=0.3"),
    Job("int8 decoding", "grpo", 2, f"{GRADED} ppo.gen.weight_dtype=int8 ppo.recompute_logprobs=True "
        "ppo.gen.kv_cache_dtype=bfloat16"),
    Job("router replay", "grpo", 2, GRADED.replace("{task}/model", "{task}/routed")
        + "ppo.router_replay=True ppo.recompute_logprobs=True max_staleness=1 allocation_mode=t2"),
    Job("distill, averages", "distill", 1, GRPO + "ppo.distill.prompt={{prompt}} ppo.distill.objective=forward_kl "
        "ppo.distill.top_k=4 ppo.actor_ema_eta=0.3"),
    Job("critic first", "ppo-math", 2, f"{PPO} ppo.value_pretrain_steps=3 ppo.gae_lambda_alpha=0.5"),
    Job("curriculum", "grpo", 2, GRPO + "reward.fn={task}/rewards.py:rare dataset.curriculum.max_pass_rate=0.9 "
        "dataset_filter_threshold=0.5 dataset_max_filter_percentage=0.2"),
    Job("vineppo", "vineppo", 1, f"{GRADED} vine.n_rollouts=2 vine.max_states=2"),
    *ENVIRONMENT_JOBS,
)  # fmt: skip


def make_task(folder: Path) -> None:
    """Write data, a model config, rewards and the members of an ensemble of reward models."""
    size = ("--digits", "1", "--hidden", "32", "--layers", "2", "--sft-rows", "40", "--train-rows", "20",
            "--valid-rows", "5")  # fmt: skip
    task = folder / "task"
    subprocess.run([sys.executable, str(EXAMPLE), str(task), *size], check=True, capture_output=True)
    (task / "rewards.py").write_text(REWARDS)
    shutil.copy(EPISODES, task / "episodes.py")
    shutil.copytree(task / "tokenizer", task / "chat")
    (task / "chat" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    dense = json.loads((task / "model" / "config.json").read_text())
    for name, values in (("routed", ROUTED), ("independent", INDEPENDENT)):
        (task / name).mkdir()
        (task / name / "config.json").write_text(json.dumps({**dense, **values}))
    words = (f"{scratch('model')} dataset.path={{task}}/preferences.jsonl dataset.train_bs_n_seqs=6 device=cpu "
             "exp_ctrl.total_train_steps=1 mode=inline tensorboard.enabled=False fileroot={task}/.. "
             "experiment_name=task").format(task=task).split()  # fmt: skip
    for seed in MEMBERS:
        subprocess.run([*REALHF, "quickstart", "rw", *words, f"trial_name=member-{seed}", f"seed={seed}"], check=True,
                       stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)  # fmt: skip
