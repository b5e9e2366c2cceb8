"""A tool learned from few demonstrations: sums that a tiny model cannot do alone, with a calculator.

``python examples/calculator_sums.py OUT`` writes demonstrations for SFT, sums for reinforcement learning, a tokenizer,
and the configuration of a tiny model. The environment is ``realhf.environments.tools:CalculatorEnv``.
docs/howto/environments.md trains it.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

TERMS = 3
WORDS = ("calculate", "expression", "tool_response", "name")
SIGNS = '[]()<>"'


def problem(chance: random.Random) -> tuple[str, int]:
    """Return a sum such as ``482+107+936`` and its value."""
    terms = [chance.randint(100, 999) for _ in range(TERMS)]
    return "+".join(map(str, terms)), sum(terms)


def demonstrations(chance: random.Random, n: int, with_call: float, eos: str) -> Iterator[dict[str, str]]:
    """Yield rows of ``n`` solved sums, the fraction ``with_call`` by the calculator and the others without it.

    A call has two rows, one per reply of the model, as only the answer of a row is trained.
    """
    for _ in range(n):
        expression, value = problem(chance)
        prompt = f"{expression}=\n"
        if chance.random() >= with_call:
            yield {"prompt": prompt, "answer": str(value)}
            continue
        call = f'[calculate(expression="{expression}")]'
        answer = f'\n<tool_response name="calculate">\n{value}\n</tool_response>\n'  # as env.options.as_text writes it
        yield {"prompt": prompt, "answer": call}
        yield {"prompt": f"{prompt}{call}{eos}{answer}", "answer": str(value)}


def rows(chance: random.Random, n: int) -> Iterator[dict[str, str]]:
    for _ in range(n):
        expression, value = problem(chance)
        yield {"prompt": f"{expression}=\n", "answer": str(value)}


def main() -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from realhf.apps.demo.arithmetic import CHARACTERS, UNKNOWN, write_jsonl
    from realhf.apps.demo.make_tokenizer import EOS, PAD, save_model_config, save_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--demonstrations", type=int, default=8000)
    parser.add_argument("--with-call", type=float, default=0.25, help="fraction of the demonstrations with a call")
    parser.add_argument("--train-rows", type=int, default=20000, help="sums for reinforcement learning")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chance = random.Random(args.seed)
    write_jsonl(args.out / "sft.jsonl", demonstrations(chance, args.demonstrations, args.with_call, EOS))
    write_jsonl(args.out / "train.jsonl", rows(chance, args.train_rows))
    vocabulary = {word: i for i, word in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS, *SIGNS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*WORDS, r"[\s\S]"])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    save_tokenizer(tokenizer, args.out / "tokenizer")
    save_model_config(tokenizer, args.out / "model", hidden=64, layers=2, positions=256)
    print(json.dumps({"folder": str(args.out), "demonstrations": args.demonstrations}))


if __name__ == "__main__":
    main()
