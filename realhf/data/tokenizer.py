"""Loads a tokenizer, and turns prompts and answers into token ids. Nothing that was generated passes here."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from realhf.base.errors import UserError
from realhf.data.rows import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in ``folder``, from its files alone; UserError when there is none or it lacks an EOS."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer folder {folder} does not exist; tokenizer= can name another one")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there;"
            " tokenizer= can name another folder"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {folder} has no end-of-sequence token, so no answer could end:"
            " set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: Prompt) -> list[int]:
    """Return the ids of one prompt, with the special tokens that the tokenizer or its chat template adds."""
    return encode_prompts(tokenizer, [prompt])[0]


def encode_answer(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the ids of one answer: no special tokens, and EOS at the end."""
    return encode_answers(tokenizer, [text])[0]


def encode_prompts(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the ids of every prompt; an EOS that the tokenizer puts behind a text is taken off again.

    UserError for chat messages where the tokenizer has no chat template.
    """
    plain = {i: prompt for i, prompt in enumerate(prompts) if isinstance(prompt, str)}
    chats = {i: prompt for i, prompt in enumerate(prompts) if not isinstance(prompt, str)}
    if chats and tokenizer.chat_template is None:
        raise UserError(
            f"prompts are lists of chat messages, but the tokenizer {tokenizer.name_or_path} has no chat template;"
            " give prompts as text, or tokenizer= a tokenizer with a chat template"
        )
    ids: list[list[int]] = [[] for _ in prompts]
    for i, row in zip(plain, encode_texts(tokenizer, list(plain.values()), True), strict=True):
        ids[i] = row[:-1] if row and row[-1] == tokenizer.eos_token_id else row
    rendered = [
        str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats.values()
    ]
    for i, row in zip(chats, encode_texts(tokenizer, rendered, False), strict=True):
        ids[i] = row
    return ids


def encode_answers(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of every answer, each with EOS at its end."""
    return [[*row, tokenizer.eos_token_id] for row in encode_texts(tokenizer, texts, False)]


def encode_pieces(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """Return the ids of answers that are given in pieces, by piece; a token belongs to that of its first character.

    The last piece has EOS at its end. UserError for a tokenizer that does not tell where its tokens are in a text.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} does not tell where its tokens are in a text:"
            " labelled steps need one with a tokenizer.json"
        )
    if not texts:
        return []
    whole = ["".join(pieces) for pieces in texts]
    encoded = tokenizer(whole, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True,
                        truncation=False, verbose=False)  # fmt: skip
    found = []
    for pieces, ids, spans in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        ends = list(accumulate(map(len, pieces)))
        parts: list[list[int]] = [[] for _ in pieces]
        for token, (start, _) in zip(ids, spans, strict=True):
            parts[bisect_right(ends, start)].append(token)
        parts[-1].append(tokenizer.eos_token_id)
        found.append(parts)
    return found


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(
        list(texts), add_special_tokens=special, return_attention_mask=False, truncation=False, verbose=False
    )["input_ids"]
