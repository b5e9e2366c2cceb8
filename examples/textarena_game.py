"""A game of TextArena with short texts: tic-tac-toe against a player of random moves. Needs the extra ``textarena``.

``python examples/textarena_game.py OUT`` writes random games for SFT, rows for reinforcement learning, a tokenizer,
and the configuration of a tiny model; ``--random-games 2000`` only plays, and prints the results of random moves.
docs/howto/environments.md trains it.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from realhf.environments import Reply, Turn
from realhf.environments.adapters.textarena_env import TextArenaEnv


class TicTacToe(TextArenaEnv):
    """``TicTacToe-v0`` with the board as nine characters, and the number of a square as the reply.

    The model plays ``O`` and begins. A win gives 1, a draw 0, and a lost game or a second move against the rules -1.
    """

    def __init__(self) -> None:
        super().__init__("TicTacToe-v0", players=2, opponent="random", chat=False)

    def reset(self, row: dict, seed: int) -> Turn:
        return short(super().reset(row, seed))

    def step(self, reply: Reply) -> Turn:
        turn = super().step(replace(reply, text=f"[{reply.text.strip()}]"))
        results = {"won": turn.reward > 0, "lost": turn.reward < 0} if turn.done else {"won": 0, "lost": 0}
        return short(replace(turn, info={**turn.info, **results}))


def short(turn: Turn) -> Turn:
    """Return the turn with the last board of its text only, such as ``O...X....``."""
    lines = [line for line in (turn.text or "").splitlines() if line.count("|") == 2][-3:]
    squares = [square.strip() for line in lines for square in line.split("|")]
    return replace(turn, text="".join(mark if mark in ("O", "X") else "." for mark in squares) + "\n")


def random_game(chance: random.Random, eos: str) -> tuple[list[dict[str, str]], Turn]:
    """Play random moves; return a row per move, with the game before it as the prompt, and the last turn."""
    game, rows = TicTacToe(), list[dict[str, str]]()
    turn = game.reset({}, chance.randrange(2**31))
    text = str(turn.text)
    while not turn.done:
        board = str(turn.text)
        move = str(chance.choice([square for square in range(9) if board[square] == "."]))
        rows.append({"prompt": text, "answer": move})
        turn = game.step(Reply(move, []))
        text += f"{move}{eos}{turn.text}"
    return rows, turn


def demonstrations(chance: random.Random, n: int, eos: str) -> Iterator[dict[str, str]]:
    for _ in range(n):
        yield from random_game(chance, eos)[0]


def results_of_random_moves(chance: random.Random, n: int) -> dict[str, float]:
    """Return the fractions of won and lost games, and the mean reward, of legal random moves."""
    counts = Counter(random_game(chance, "")[1].reward for _ in range(n))
    return {"won": counts[1.0] / n, "lost": counts[-1.0] / n, "reward": (counts[1.0] - counts[-1.0]) / n}


def main() -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from realhf.apps.demo.arithmetic import UNKNOWN, write_jsonl
    from realhf.apps.demo.make_tokenizer import EOS, PAD, save_model_config, save_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--games", type=int, default=2000)
    parser.add_argument("--random-games", type=int, default=0, help="only play this many games with random moves")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    if args.random_games:
        print(json.dumps(results_of_random_moves(chance, args.random_games)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "sft.jsonl", demonstrations(chance, args.games, EOS))
    write_jsonl(args.out / "train.jsonl", ({"game": number} for number in range(64)))
    vocabulary = {word: i for i, word in enumerate([PAD, EOS, UNKNOWN, *"\n.OX012345678"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    save_tokenizer(tokenizer, args.out / "tokenizer")
    save_model_config(tokenizer, args.out / "model", hidden=64, layers=2, positions=256)
    print(json.dumps({"folder": str(args.out), "games": args.games}))


if __name__ == "__main__":
    main()
