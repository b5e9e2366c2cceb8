"""Trains a small BPE tokenizer on the texts of a JSONL file, and writes the config.json of a small model.

python -m realhf.apps.demo.make_tokenizer data.jsonl out --vocab 2048
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS, PAD = "<eos>", "<pad>"


def texts(value: object) -> Iterator[str]:
    """Yield every string inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part)


def byte_pairs(corpus: Iterator[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which is lossless on any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that ``AutoTokenizer`` loads."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)


def save_model_config(tokenizer: Tokenizer, folder: Path, hidden: int, layers: int, positions: int) -> None:
    """Write the config.json of a small Llama for this vocabulary."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": hidden // 4,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSONL file; all its strings are read")
    parser.add_argument("out", type=Path, help="folder for the tokenizer and config.json")
    parser.add_argument("--vocab", type=int, default=2048, help="size of the vocabulary (at least 258)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    args = parser.parse_args()

    with args.file.open(encoding="utf-8") as lines:
        tokenizer = byte_pairs((text for line in lines if line.strip() for text in texts(json.loads(line))), args.vocab)
    save_tokenizer(tokenizer, args.out)
    save_model_config(tokenizer, args.out, args.hidden, args.layers, positions=2048)
    print(f"{args.out}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
