"""Whole training steps of realhf's command line against TRL's trainers, on CPU.

    python benchmarks/bench_trl.py [grpo] [lora] [ppo] [sft] [rw] [dpo] [--rounds N] [--models tiny,small]
        [--threads N] [--peer PYTHON] [--peer-ppo PYTHON]

16 prompts (``135m``: 4) with 8 responses each, of 32 tokens on average and 64 at most; one update per step; SFT trains
on as many such rows, a reward model and DPO on pairs of them. PPO has four models (TRL 1.5.1, the last version with a
PPO trainer), GRPO no reference model; ``lora`` is GRPO with adapters of rank 16, in TRL those of PEFT, for all linear
modules. TRL runs with all rows and with 32 rows per pass, for SFT also with rows grouped by length; the fastest setting
counts. Seconds per step are medians of each program's own timings; both run in turns. ``make bench-peer``
creates the environments.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bench_peer import MEAN, N_NEW, N_PROMPTS, N_RESPONSES, SIZES, report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

STEPS = {"tiny": 12, "small": 4, "135m": 3}
REWARD = """
def share_of_low_words(prompt: str, answer: str, row: dict) -> float:
    words = [word for word in answer.split() if word.startswith("w")]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
"""
PROMPTS = {"135m": 4}
"""Prompts per step where they are not ``N_PROMPTS``."""
GROUPS = (f"ppo.group_size={N_RESPONSES}", f"ppo.gen.max_new_tokens={N_NEW}", "actor.optimizer.lr=1e-6",
          "actor.optimizer.lr_scheduler_type=constant", "ppo.ppo_n_minibatches=1")  # fmt: skip
SETTINGS = {"grpo": ("all", "32"), "lora": ("all", "32"), "ppo": ("all", "32"), "rw": ("all", "32"),
            "sft": ("all", "32", "all by_length", "32 by_length"), "dpo": ("all", "32")}  # fmt: skip
"""Rows per pass of TRL."""


def n_prompts(name: str) -> int:
    return PROMPTS.get(name, N_PROMPTS)


def settings_of(subject: str, name: str) -> list[str]:
    """Return the settings of TRL, each once, with the number of all rows."""
    every = str(n_prompts(name) * N_RESPONSES)
    return list(dict.fromkeys(setting.replace("all", every) for setting in SETTINGS[subject]))


def our_words(subject: str, folder: Path, prompts_per_step: int) -> list[str]:
    """Return our command line options for a subject."""
    prompts = (f"dataset.path={folder / 'prompts.jsonl'}", f"dataset.train_bs_n_seqs={prompts_per_step}")
    match subject:
        case "grpo" | "lora":
            reward = f"reward.fn={folder / 'reward.py'}:share_of_low_words"
            adapters = ("actor.lora.rank=16",) if subject == "lora" else ()
            return ["grpo", f"actor.path={folder / 'model'}", "ppo.kl_in=none", reward, *GROUPS, *prompts, *adapters]
        case "ppo":
            return ["ppo", f"actor.path={folder / 'model'}", f"rew.path={folder / 'reward'}", *GROUPS, *prompts,
                    "critic.optimizer.lr=1e-6", "critic.optimizer.lr_scheduler_type=constant"]  # fmt: skip
        case "rw" | "dpo":
            role, n_pairs = {"rw": "model", "dpo": "actor"}[subject], prompts_per_step * N_RESPONSES // 2
            return [subject, f"{role}.path={folder / 'model'}", f"{role}.optimizer.lr=1e-6",
                    f"{role}.optimizer.lr_scheduler_type=constant", f"dataset.path={folder / 'pairs.jsonl'}",
                    f"dataset.train_bs_n_seqs={n_pairs}"]  # fmt: skip
        case _:
            return ["sft", f"model.path={folder / 'model'}", "model.optimizer.lr=1e-6",
                    "model.optimizer.lr_scheduler_type=constant", f"dataset.path={folder / 'rows.jsonl'}",
                    f"dataset.train_bs_n_seqs={prompts_per_step * N_RESPONSES}"]  # fmt: skip


def mean_response_length(model: PreTrainedModel, n_prompt: int) -> float:
    """Return the mean length of a response, which token 0 ends."""
    prompts = torch.randint(2, model.config.vocab_size - 4, (24, n_prompt))
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=N_NEW, eos_token_id=0,
        pad_token_id=1,
    )[:, n_prompt:]  # fmt: skip
    return float((made != 1).sum()) / len(made)


def prepare(name: str, folder: Path) -> None:
    """Write a model, a tokenizer of numbered words, prompts and a reward function.

    The first component of all hidden states is made nearly constant, and its head weight for the end token is bisected
    until responses have MEAN words on average.
    """
    torch.manual_seed(0)
    mean_prompt, build = SIZES[name]
    model = build()
    vocab, table, head = (
        model.config.vocab_size,
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
    )
    with torch.no_grad():
        table[:, 0] = 1.0
        if head is not table:
            head[:, 0] = 0.0
        low, high, weight = 0.0, 40.0, 0.0
        for _ in range(9):
            middle = (low + high) / 2
            head[0, 0] += middle - weight
            weight = middle
            low, high = (weight, high) if mean_response_length(model, mean_prompt) > MEAN else (low, weight)
    model.config.eos_token_id, model.config.pad_token_id = 0, 1
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 1
    n_words = vocab - 4  # some tokenizer classes add tokens
    words = {"<eos>": 0, "<pad>": 1, **{f"w{number}": number for number in range(2, n_words)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    model.config.num_labels = 1
    scorer = LlamaForSequenceClassification(model.config)
    for part, subfolder in ((model, "model"), (fast, "model"), (scorer, "reward"), (fast, "reward")):
        part.save_pretrained(folder / subfolder)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(mean_prompt - 8, mean_prompt + 8, (512,), generator=generator).tolist()
    prompts = [
        " ".join(f"w{w}" for w in torch.randint(2, n_words, (n,), generator=generator).tolist()) for n in lengths
    ]
    rows = [json.dumps({"prompt": prompt, "solutions": [""], "query_id": str(i)}) for i, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)
    lengths = (1 + torch.empty(len(prompts)).geometric_(1 / MEAN, generator=generator)).clamp(max=N_NEW).long().tolist()
    pairs = [
        {"prompt": prompt, "answer": " " + " ".join(f"w{w}" for w in torch.randint(2, n_words, (n,)).tolist())}
        for prompt, n in zip(prompts * 4, lengths * 4, strict=True)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    preferred = [
        {"prompt": good["prompt"], "chosen": good["answer"], "rejected": bad["answer"]}
        for good, bad in zip(pairs, pairs[1:] + pairs[:1], strict=True)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in preferred))


def our_metrics(subject: str, name: str, folder: Path, number: int, threads: int) -> list[dict[str, float]]:
    """Run our command line with a worker per core; return the metrics of all steps but the first."""
    root, words = folder / f"ours{subject}{number}", our_words(subject, folder, n_prompts(name))
    subprocess.run([
        sys.executable, "-c", "from realhf.apps.main import console; console()", "quickstart", *words, "device=cpu",
        f"fileroot={root}", "experiment_name=e", "trial_name=t", f"exp_ctrl.total_train_steps={STEPS[name]}",
        f"n_gpus_per_node={threads}", "threads_per_worker=1", f"allocation_mode=d{threads}", "save_roles=[]",
        "n_logged_generations=0", "tensorboard.enabled=False",
    ], check=True, capture_output=True)  # fmt: skip
    lines = [json.loads(line) for line in (root / "e" / "t" / "metrics.jsonl").read_text().splitlines()]
    return lines[1:]


def their_step(peer: str, subject: str, name: str, folder: Path, threads: int, setting: str) -> float:
    """Return the seconds per step of TRL."""
    script = str(Path(__file__).with_name("peer_trl.py"))
    words = [peer, script, subject, *map(str, (folder, STEPS[name], threads, n_prompts(name))), *setting.split()]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["step_s"])


def compare(subject: str, name: str, rounds: int, threads: int, peer: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(name, folder)
        times: dict[str, list[float]] = {}
        for number in range(rounds):
            steps = our_metrics(subject, name, folder, number, threads)
            times.setdefault("realhf", []).append(statistics.median(line["time/step_s"] for line in steps))
            for setting in settings_of(subject, name):
                seconds = their_step(peer, subject, name, folder, threads, setting)
                times.setdefault(f"TRL, {setting}", []).append(seconds)
    report(
        f"{subject} step {name}", {name: 1 / statistics.median(seconds) for name, seconds in times.items()}, "steps/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("subjects", nargs="*", default=list(SETTINGS), help=" ".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default="tiny,small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", default=".venv-peer/bin/python", help="interpreter of an environment with TRL")
    parser.add_argument("--peer-ppo", default=".venv-peer-ppo/bin/python", help="the same with a TRL that has PPO")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for subject in options.subjects:
        for name in options.models.split(","):
            peer = options.peer_ppo if subject == "ppo" else options.peer
            compare(subject, name, options.rounds, options.threads, peer)


if __name__ == "__main__":
    main()
