"""Loads a tokenizer and encodes the prompts and answers of datasets. Runs no code of the tokenizer's folder."""

import json
import os
import resource
import signal
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from realhf.base.errors import UserError
from realhf.data.rows import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
GENERIC_MODELS = (None, "llama", "gpt2", "gpt_neox", "gemma", "gemma2", "qwen3", "qwen3_moe", "olmo2")
"""Models whose tokenizers may be of a generic class; transformers chooses another one for some of the others."""
TEMPLATE_TIMEOUT_S = 10
"""Time to render one chat."""
TEMPLATE_BYTES = 1 << 30
"""Additional address space for rendering chats."""
Chat = Sequence[Mapping[str, Any]]
OPTIONS: dict[str, Any] = {"return_attention_mask": False, "truncation": False, "verbose": False}


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer in ``folder`` without network access; UserError if it is missing, invalid, or lacks an EOS."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"tokenizer folder {folder} does not exist; tokenizer= can name another one")
    if not has_tokenizer(path):
        raise UserError(
            f"{folder} has no tokenizer: it contains none of {', '.join(TOKENIZER_FILES)};"
            " tokenizer= can name another folder"
        )
    try:
        loader = _tokenizer_class(path)
        tokenizer = loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file can raise any type
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {folder} has no end-of-sequence token, which responses need:"
            " set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def same_tokens(first: Path, second: Path) -> bool:
    """Return whether the tokenizers of two folders give equal tokens equal numbers; they may split texts differently.

    UserError if one cannot be loaded.
    """
    files = [folder / "tokenizer.json" for folder in (first, second)]
    if first.resolve() == second.resolve() or (
        all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()
    ):
        return True
    return _vocabulary(first) == _vocabulary(second)


def _vocabulary(folder: Path) -> dict[str, int]:
    if not (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder).get_vocab()

    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    except Exception as error:  # the type that the library raises
        raise UserError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def _tokenizer_class(folder: Path) -> Any:
    """Return ``AutoTokenizer``, or the class it would choose where that is certain: its import takes 2 s and torch."""
    config, model = (_json_object(folder / name) for name in ("tokenizer_config.json", "config.json"))
    is_generic = config.get("tokenizer_class") in GENERIC_CLASSES and model.get("model_type") in GENERIC_MODELS
    if is_generic and not ({"auto_map"} & (config.keys() | model.keys())) and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _json_object(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none, and where only ``AutoTokenizer`` knows what to do."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def encode_prompts(tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the ids of every prompt, with special tokens except a final EOS; UserError for chats without template."""
    plain = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if chats and tokenizer.chat_template is None:
        raise UserError(
            f"prompts are lists of chat messages, but the tokenizer {tokenizer.name_or_path} has no chat template;"
            " give prompts as text, or tokenizer= a tokenizer with a chat template"
        )
    rendered = render_chats(tokenizer, chats)
    ids = encode_texts(tokenizer, plain, True)
    plain_ids = iter(row[:-1] if row[-1:] == [tokenizer.eos_token_id] else row for row in ids)
    chat_ids = iter(encode_texts(tokenizer, rendered, False))
    return [next(plain_ids if isinstance(prompt, str) else chat_ids) for prompt in prompts]


def render_chats(
    tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Chat], tools: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Render chats by the tokenizer's template in a child process; UserError if the template fails or does not end.

    A template is a program from the tokenizer's folder. transformers restricts its access, but not its time and memory.
    """
    if not chats:
        return []
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        _render_and_exit(tokenizer, chats, tools, writer)
    os.close(writer)
    with open(reader, encoding="ascii") as lines:
        results: list[tuple[bool, str]] = [json.loads(line) for line in lines]
    texts, errors = ([text for is_text, text in results if is_text == kind] for kind in (True, False))
    _, status = os.waitpid(child, 0)
    if len(texts) < len(chats):
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        errors.append(f"no end after {TEMPLATE_TIMEOUT_S} s" if is_late else f"its process ended with status {status}")
        raise UserError(f"the chat template of the tokenizer {tokenizer.name_or_path} failed: {errors[0]}; fix the "
                        f"template or this chat: {json.dumps(chats[len(texts)]):.200}")  # fmt: skip
    return texts


def _render_and_exit(
    tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Chat], tools: Sequence[dict[str, Any]], writer: int
) -> NoReturn:
    """Write a JSON line per chat, up to the first error. SIGALRM ends the process, also in the middle of C code."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + TEMPLATE_BYTES, resource.RLIM_INFINITY))
        with open(writer, "w", buffering=1, encoding="ascii") as out:
            for chat in chats:
                signal.alarm(TEMPLATE_TIMEOUT_S)
                try:
                    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
                    messages = [dict(message) for message in chat]
                    text = tokenizer.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=True, **options
                    )
                    line = True, text
                except Exception as error:
                    line = False, f"{type(error).__name__}: {error}"
                out.write(json.dumps(line) + "\n")
                if not line[0]:
                    break
    finally:
        os._exit(0)


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
