"""Creates an arithmetic task (written addition): datasets, a tokenizer and a model config.

    python -m realhf.apps.demo.arithmetic out --digits 2

The solution of ``27+58=`` adds digit + digit + carry from the right, one step per line:

    7+8+0=15
    2+5+1=8
    #### 85

Writes sft.jsonl, train.jsonl, valid.jsonl (with disjoint sums), tokenizer/ and model/config.json. Right and wrong
solutions of the sums in train.jsonl are in preferences.jsonl (pairs), outcomes.jsonl (labelled responses) and
steps.jsonl (labelled steps; steps after a mistake are labelled wrong).
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from realhf.apps.demo.make_tokenizer import EOS, PAD, save_model_config, save_tokenizer

UNKNOWN = "<unk>"
CHARACTERS = "\n 0123456789+-*/=#.,?"


def worked_sum(a: int, b: int) -> tuple[str, str]:
    """Return the prompt ``a+b`` and its solution; both numbers have the same number of digits."""
    steps, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return f"{a}+{b}=\n", "\n".join([*steps, f"#### {a + b}"])


def wrong_sum(prompt: str, rng: random.Random) -> tuple[str, list[float]]:
    """Return a solution with a mistake in one digit sum, and a label for every digit sum."""
    numbers = [part[::-1] for part in prompt.removesuffix("=\n").split("+")]
    place = rng.randrange(len(numbers[0]))
    lines, digits, carry = [], "", 0
    for i, (x, y) in enumerate(zip(*numbers, strict=True)):
        total = int(x) + int(y) + carry
        if i == place:
            total = rng.choice([t for t in range(20) if t != total])
        lines.append(f"{x}+{y}+{carry}={total}")
        carry, digits = total // 10, str(total % 10) + digits
    lines.append(f"#### {int(f'{carry}{digits}')}")
    return "\n".join(lines), [float(i < place) for i in range(len(digits))]


def character_tokenizer(characters: str = CHARACTERS) -> Tokenizer:
    """Return a tokenizer with one token per character, lossless on text of these characters."""
    words = [PAD, EOS, UNKNOWN, *characters]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    return tokenizer


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_labelled(folder: Path, sums: list[tuple[str, str]], rng: random.Random) -> None:
    """Write right and wrong solutions as pairs, labelled responses and labelled steps."""
    pairs, outcomes, steps = [], [], []
    for prompt, right in sums:
        wrong, labels = wrong_sum(prompt, rng)
        is_right = rng.random() < 0.5
        pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong})
        outcomes.append({"prompt": prompt, "answer": right if is_right else wrong, "label": int(is_right)})
        *first, last, result = (right if is_right else wrong).split("\n")
        parts = [*first, f"{last}\n{result}"]
        steps.append({"prompt": prompt, "steps": parts, "labels": [1.0] * len(parts) if is_right else labels})
    for name, rows in (("preferences", pairs), ("outcomes", outcomes), ("steps", steps)):
        write_jsonl(folder / f"{name}.jsonl", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--digits", type=int, default=2, choices=range(1, 10), help="digits of both numbers")
    parser.add_argument("--sft-rows", type=int, default=2000, help="worked sums for SFT")
    parser.add_argument("--train-rows", type=int, default=4000, help="sums for reinforcement learning")
    parser.add_argument("--valid-rows", type=int, default=200, help="held-out sums")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    low = 10 ** (args.digits - 1)
    span = 9 * low
    n_rows = args.sft_rows + args.train_rows + args.valid_rows
    if n_rows > span**2:
        parser.error(f"there are {span**2} sums of {args.digits}-digit numbers, fewer than the {n_rows} requested rows")
    picks = random.Random(args.seed).sample(range(span**2), n_rows)
    sums = [worked_sum(low + pick // span, low + pick % span) for pick in picks]

    problems = [
        {"query_id": f"sum-{i}", "prompt": prompt, "solutions": [answer.splitlines()[-1]]}
        for i, (prompt, answer) in enumerate(sums)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    valid_from = args.sft_rows + args.train_rows
    sft = ({"prompt": prompt, "answer": answer} for prompt, answer in sums[: args.sft_rows])
    write_jsonl(args.out / "sft.jsonl", sft)
    write_jsonl(args.out / "train.jsonl", problems[args.sft_rows : valid_from])
    write_jsonl(args.out / "valid.jsonl", problems[valid_from:])
    write_labelled(args.out, sums[args.sft_rows : valid_from], random.Random(args.seed))
    tokenizer = character_tokenizer()
    save_tokenizer(tokenizer, args.out / "tokenizer")
    save_model_config(tokenizer, args.out / "model", args.hidden, args.layers, positions=256)
    print(f"{args.out}: {n_rows} sums of {args.digits}-digit numbers, {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
