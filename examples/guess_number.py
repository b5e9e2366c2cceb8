"""An environment of several turns: guess a number with hints.

``python examples/guess_number.py OUT`` writes games for SFT, rows for reinforcement learning, a tokenizer, and the
configuration of a tiny model. docs/howto/environments.md trains it.
"""

import argparse
import json
import random
from pathlib import Path

from realhf.environments import Reply, Turn

HIGHEST = 31
PROMPT = f"0-{HIGHEST}\n"


class GuessNumber:
    """The secret is in the row. The right guess gives 1, a wrong one costs 0.1, other text ends the game with -1."""

    def reset(self, row: dict, seed: int) -> Turn:
        self.secret = int(row["secret"])
        return Turn()  # the episode starts with the row's prompt

    def step(self, reply: Reply) -> Turn:
        guess = reply.text.strip()
        if not guess.isdecimal():
            return Turn(reward=-1.0, done=True, info={"right": 0})
        if int(guess) == self.secret:
            return Turn(reward=1.0, done=True, info={"right": 1})
        return Turn(text="+\n" if int(guess) < self.secret else "-\n", reward=-0.1, info={"right": 0})


def game(secret: int, chance: random.Random, careless: float, eos: str) -> str:
    """Return guesses and hints of a player, who forgets the hints with probability ``careless`` at every guess."""
    low, high, text = 0, HIGHEST, ""
    while True:
        guess = chance.randint(0, HIGHEST) if chance.random() < careless else chance.randint(low, high)
        if guess == secret:
            return f"{text}{guess}"
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        text += f"{guess}{eos}{'+' if guess < secret else '-'}\n"


def main() -> None:
    from realhf.apps.demo.arithmetic import character_tokenizer, write_jsonl
    from realhf.apps.demo.make_tokenizer import EOS, save_model_config, save_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--games", type=int, default=4000)
    parser.add_argument("--careless", type=float, default=0.5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    secrets = [chance.randint(0, HIGHEST) for _ in range(args.games)]
    games = ({"prompt": PROMPT, "answer": game(secret, chance, args.careless, EOS)} for secret in secrets)
    write_jsonl(args.out / "sft.jsonl", games)
    rows = [{"prompt": PROMPT, "secret": secret} for secret in range(HIGHEST + 1)]
    write_jsonl(args.out / "train.jsonl", rows)
    tokenizer = character_tokenizer()
    save_tokenizer(tokenizer, args.out / "tokenizer")
    save_model_config(tokenizer, args.out / "model", hidden=64, layers=2, positions=256)
    print(json.dumps({"folder": str(args.out), "games": args.games}))


if __name__ == "__main__":
    main()
