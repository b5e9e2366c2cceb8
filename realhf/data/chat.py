"""Tokens of chat messages, so that a next turn extends the tokens of a conversation verbatim. Imports no torch.

A chat template is rendered once per shape of a conversation, with marks in place of contents and ids of tool calls.
Only the pieces between them may contain special tokens: text of an environment never becomes one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from realhf.base.errors import UserError
from realhf.data.tokenizer import OPTIONS, encode_texts, render_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
MARK = "content{}of{}message"
CALL_ID = re.compile("[A-Za-z0-9_-]{8,}")
"""Ids of tool calls that have marks. Shorter ones are mostly equal in all conversations."""
REPLY = "the0reply0of0the0model"
SPACE = " \n"
MAX_CACHED = 4096
"""Texts whose ids are kept, since environments repeat short ones, and shapes of conversations."""


@dataclass(frozen=True)
class _Shape:
    """The pieces of a rendered conversation, with marks between them, and the ids of its special tokens.

    ``strips`` says of each message whether the template strips its content left and right.
    """

    pieces: tuple[str, ...]
    marks: tuple[str, ...]
    strips: tuple[tuple[bool, bool], ...]
    special: tuple[int, ...]


class ChatEncoder:
    """Encodes the first and the following turns of conversations by a tokenizer's chat template, or as plain text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._shapes: dict[str, _Shape] = {}
        self._cached = lru_cache(MAX_CACHED)(self._encoded)
        added = tokenizer.added_tokens_decoder
        self._special = {str(token): number for number, token in added.items() if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def text(self, text: str, is_first: bool = False) -> list[int]:
        """Return the ids of a text without special tokens, with BOS if it is the first of an episode."""
        return list(self._cached(text, is_first))

    def _encoded(self, text: str, is_first: bool) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=is_first, split_special_tokens=True, **OPTIONS)["input_ids"]
        return ids[:-1] if is_first and ids[-1:] == [self._tokenizer.eos_token_id] else ids

    def first(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation up to the first reply of the model."""
        return self._encode(messages, tools, after_reply=False)

    def following(self, messages: Sequence[Message], last_token: int | None) -> list[int]:
        """Return the ids between a reply that ends with ``last_token`` and the next one.

        The template's end of turn is not repeated if the reply ends with it.
        """
        ids = self._encode(messages, (), after_reply=True)
        return ids[1:] if ids[:1] == [last_token] else ids

    def _encode(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], after_reply: bool) -> list[int]:
        messages, values = without_ids(messages)
        shape = self._shape(messages, tools, after_reply, list(values))
        for i, (message, (left, right)) in enumerate(zip(messages, shape.strips, strict=True)):
            content = message["content"]
            content = content.lstrip() if left else content
            values[MARK.format(i, len(messages))] = content.rstrip() if right else content
        parts = [shape.pieces[0]]
        for mark, piece in zip(shape.marks, shape.pieces[1:], strict=True):
            parts += [values[mark], piece]
        ids = encode_texts(self._tokenizer, ["".join(parts)], False)[0]
        return ids if self._special_in(ids) == shape.special else self._without_special(parts)

    def _special_in(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in ids if i in self._special.values())

    def _without_special(self, parts: Sequence[str]) -> list[int]:
        """Encode pieces and contents in turn, so that contents have no special tokens."""
        ids, plain = list[int](), ""
        for number, part in enumerate(parts):
            split = [part] if number % 2 or not self._special else re.split(self._any_special, part)
            for k, text in enumerate(split):
                if k % 2 == 0:
                    plain += text
                    continue
                ids += [*self.text(plain), self._special[text]]
                plain = ""
        return ids + self.text(plain)

    def _shape(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], after_reply: bool, ids: Sequence[str]
    ) -> _Shape:
        others = [{key: value for key, value in message.items() if key != "content"} for message in messages]
        key = json.dumps([others, list(tools), after_reply], sort_keys=True)
        if key not in self._shapes:
            if self._special and (found := self._any_special.search(json.dumps(others, ensure_ascii=False))):
                raise UserError(f"a message has the special token {found[0]} outside of its content")
            if len(self._shapes) == MAX_CACHED:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = self._new_shape(messages, tools, after_reply, ids)
        return self._shapes[key]

    def _new_shape(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], after_reply: bool, ids: Sequence[str]
    ) -> _Shape:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            raise UserError(
                f"the environment returned chat messages, but the tokenizer {tokenizer.name_or_path} has no chat "
                "template; return Turn(text=...), or set tokenizer= to one with a chat template"
            )
        marks = [MARK.format(i, len(messages)) for i in range(len(messages))]
        before: list[dict[str, Any]] = []
        if after_reply:
            before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": REPLY}]
        chats = [[*before, *({**message, "content": f"{space}{mark}{space[::-1]}"}
                             for message, mark in zip(messages, marks, strict=True))]
                 for space in ("", SPACE)]  # fmt: skip
        plain, spaced = render_chats(tokenizer, chats, tools)
        if after_reply:
            if REPLY not in plain:
                raise self._invalid("does not show replies of the assistant")
            plain, spaced = (text.rpartition(REPLY)[2] for text in (plain, spaced))
        any_mark = "|".join([*marks, *ids]) or r"(?!)"
        pieces, found = re.split(any_mark, plain), re.findall(any_mark, plain)
        if [mark for mark in found if mark in marks] != marks:
            raise self._invalid("does not show the content of every message once and in order")
        pattern = re.escape(pieces[0]) + "".join(
            (f"(\\s*){mark}(\\s*)" if mark in marks else mark) + re.escape(piece)
            for mark, piece in zip(found, pieces[1:], strict=True)
        )
        match = re.fullmatch(pattern, spaced, re.DOTALL)
        if match is None:
            raise self._invalid("changes the content of messages")
        spaces = [group == "" for group in match.groups()]
        strips = tuple(zip(spaces[::2], spaces[1::2], strict=True))
        tokens = encode_texts(tokenizer, [plain], False)[0]
        return _Shape(tuple(pieces), tuple(found), strips, self._special_in(tokens))

    def _invalid(self, problem: str) -> UserError:
        return UserError(
            f"the chat template of the tokenizer {self._tokenizer.name_or_path} {problem}, so that a conversation "
            "cannot be extended; return Turn(text=...) from the environment"
        )


def without_ids(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """Return messages with marks of the same length in place of the ids of tool calls, and the ids by their marks."""
    marks: dict[str, str] = {}

    def marked(owner: Message, key: str) -> Message:
        value = owner.get(key)
        if not isinstance(value, str) or not CALL_ID.fullmatch(value):
            return owner
        return {**owner, key: marks.setdefault(value, f"i{len(marks)}d".ljust(len(value), "x"))}

    changed = list[Message]()
    for message in messages:
        message = marked(message, "tool_call_id")
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            calls = [marked(call, "id") if isinstance(call, Mapping) else call for call in calls]
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed, {mark: value for value, mark in marks.items()}
