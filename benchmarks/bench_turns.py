"""Rollouts with tool calls of realhf's command line against TRL's tool loop, on CPU.

    python benchmarks/bench_turns.py --peer PYTHON [--rounds N] [--seconds 0,0.01]

16 prompts with 8 episodes each, of 4 replies of 12 tokens that call a tool, which waits for ``--seconds``. The model's
weights are made so that each token determines the next one: both sample the same replies. Seconds are those of the
rollout, medians over steps without the first; both run in turns on one thread each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bench_peer import SIZES
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

REPOSITORY = Path(__file__).parents[1]
N_PROMPTS, N_RESPONSES, N_TURNS, STEPS = 16, 8, 4, 4
CALL = '<tool_call>\n{"name": "move", "arguments": {}}\n</tool_call>'
WORDS = [f"word{k}" for k in range(10)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOLS = '''
import asyncio


class Game:
    def __init__(self, seconds):
        self.seconds = seconds

    async def move(self) -> str:
        """Make a move."""
        await asyncio.sleep(self.seconds)
        return "ok"
'''


def template_of(python: str) -> str:
    """Return the chat template of Qwen3 as TRL ships it."""
    code = "from trl.chat_template_utils import qwen3_training_chat_template as text; print(text, end='')"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout


def make_tokenizer(template: str, folder: Path) -> PreTrainedTokenizerFast:
    """Save a tokenizer in which every word of the replies, and the call, is one token."""
    bpe = Tokenizer(models.BPE())
    words, bytes_of = Regex(r"\s|\S+"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), bytes_of])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([template] * 9, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.add_tokens([*WORDS, CALL])
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def make_model(size: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a model whose next token is a function of the last one: the words, the call, the end of the turn."""
    torch.manual_seed(0)
    model = SIZES[size][1]()
    chain = [int(tokenizer.convert_tokens_to_ids(word)) for word in (*WORDS, CALL, "<|im_end|>")]
    embedding = torch.nn.functional.normalize(torch.randn_like(model.model.embed_tokens.weight), dim=1)
    head = torch.zeros_like(model.lm_head.weight)
    head[chain[0]] = -embedding[chain].sum(0)  # any other token starts the chain
    head[chain[0]] += 0.6 * embedding.mean(0) * len(embedding)
    for token, following in zip(chain, chain[1:], strict=False):
        head[following] = 2 * embedding[token]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head * 40 / embedding.shape[1] ** 0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.config.eos_token_id = model.generation_config.eos_token_id = chain[-1]
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder)


def ours(folder: Path, seconds: float) -> tuple[float, float]:
    """Return the seconds of a rollout and the replies per episode."""
    with tempfile.TemporaryDirectory() as root:
        words = [
            f"fileroot={root}", "experiment_name=b", "trial_name=t", "device=cpu", "threads_per_worker=1",
            f"actor.path={folder}/model", f"dataset.path={folder}/rows.jsonl", f"dataset.train_bs_n_seqs={N_PROMPTS}",
            f"ppo.group_size={N_RESPONSES}", "ppo.kl_in=none", "actor.optimizer.lr=0", f"env.cls={folder}/game.py:Game",
            f"env.options.seconds={seconds}", f"env.max_turns={N_TURNS}", "ppo.gen.max_new_tokens=100",
            "env.max_episode_len=800", "ppo.gen.max_num_seqs=128", "env.max_concurrency=128", "env.workers=1",
            f"exp_ctrl.total_train_steps={STEPS}", "exp_ctrl.total_train_epochs=100", "tensorboard.enabled=False",
        ]  # fmt: skip
        command = [sys.executable, "-m", "realhf", "quickstart", "grpo", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=600)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        lines = [json.loads(line) for line in (Path(root) / "b" / "t" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["time/actor_gen_s"] for line in lines[1:]), lines[-1]["env/turns"]


def peer(python: str, folder: Path, seconds: float) -> tuple[float, float]:
    command = [python, str(REPOSITORY / "benchmarks" / "peer_turns.py"), str(folder), str(STEPS), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["rollout_s"], found["turns"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=str(REPOSITORY / ".venv-peer" / "bin" / "python"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", default="tiny")
    parser.add_argument("--seconds", default="0,0.01")
    args = parser.parse_args()
    for size in args.models.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_model(size, make_tokenizer(template_of(args.peer), folder / "model"), folder / "model")
            (folder / "game.py").write_text(TOOLS)
            rows = [{"prompt": f"play {k}"} for k in range(N_PROMPTS)]
            (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            for seconds in map(float, args.seconds.split(",")):
                pairs = [(ours(folder, seconds), peer(args.peer, folder, seconds)) for _ in range(args.rounds)]
                assert all(mine[1] == theirs[1] == N_TURNS for mine, theirs in pairs), pairs
                mine, theirs = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
                case, ratio = f"{size}, tool {seconds * 1e3:g} ms", theirs / mine
                print(f"{case}: realhf {mine:.2f} s, TRL {theirs:.2f} s, ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
