"""Loads a tokenizer and encodes the prompts and answers of datasets."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realhf.base.errors import UserError
from realhf.data.rows import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
OPTIONS: dict[str, Any] = {"return_attention_mask": False, "truncation": False, "verbose": False}


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in ``folder`` without network access; UserError if it is missing, invalid, or lacks an EOS."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer folder {folder} does not exist; tokenizer= can name another one")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder} has no tokenizer: it contains none of {', '.join(TOKENIZER_FILES)};"
            " tokenizer= can name another folder"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {folder} has no end-of-sequence token, which responses need:"
            " set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def encode_prompts(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the ids of every prompt, with special tokens except a final EOS; UserError for chats without template."""
    plain = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if chats and tokenizer.chat_template is None:
        raise UserError(
            f"prompts are lists of chat messages, but the tokenizer {tokenizer.name_or_path} has no chat template;"
            " give prompts as text, or tokenizer= a tokenizer with a chat template"
        )
    rendered = [str(tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)) for c in chats]
    ids = encode_texts(tokenizer, plain, True)
    plain_ids = iter(row[:-1] if row[-1:] == [tokenizer.eos_token_id] else row for row in ids)
    chat_ids = iter(encode_texts(tokenizer, rendered, False))
    return [next(plain_ids if isinstance(prompt, str) else chat_ids) for prompt in prompts]


def encode_answers(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of every answer, without special tokens except a final EOS."""
    return [[*row, tokenizer.eos_token_id] for row in encode_texts(tokenizer, texts, False)]


def encode_segments(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Return the ids of answers given as segments, by segment; a token belongs to the segment of its first character.

    The last segment ends with EOS. Raises UserError for a tokenizer without offset mapping.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no offset mapping, which labelled steps need:"
            " use one with a tokenizer.json"
        )
    if not texts:
        return []
    joined = ["".join(segments) for segments in texts]
    encoded = tokenizer(joined, add_special_tokens=False, return_offsets_mapping=True, **OPTIONS)
    results = []
    for segments, ids, spans in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        ends = list(accumulate(map(len, segments)))
        parts: list[list[int]] = [[] for _ in segments]
        for token, (start, _) in zip(ids, spans, strict=True):
            parts[bisect_right(ends, start)].append(token)
        parts[-1].append(tokenizer.eos_token_id)
        results.append(parts)
    return results


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=special, **OPTIONS)["input_ids"]
