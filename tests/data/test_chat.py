"""Turns of a conversation: extending it turn by turn gives the tokens of the whole; contents are never special."""

import copy
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from realhf.base.errors import UserError
from realhf.data import chat as chat_module
from realhf.data.chat import ChatEncoder
from realhf.data.tokenizer import render_chats
from tests.scaling import examples

FOLDER = Path(__file__).with_name("chat_templates")
SPECIAL = {
    "qwen2_5": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "gemma": ("<bos>", "<end_of_turn>", "<start_of_turn>"),
}
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words as those of Llama 3 and Qwen: line breaks are not merged with the text after them."""
EOS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
}
ODD = ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "[/INST]", "<|eot_id|>", "<end_of_turn>\n", "🙂🙂", "é",
       "\ufffd", "{{ 1 }}", "{% raw %}", "\u202e", "\x00", "  ", "\n\n"]  # fmt: skip
CONTENT = st.lists(st.one_of(st.sampled_from(ODD), st.text("ab 1\n", max_size=6)), max_size=5).map("".join)


@lru_cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([words, bytes_of]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL[name]], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = ["user system assistant model tool_response the answer is 1 2 3 hello world \n\n tools a b ab"] * 9
    bpe.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS[name], bos_token=SPECIAL[name][0])
    made.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return made


@lru_cache
def encoder(name: str) -> ChatEncoder:
    return ChatEncoder(tokenizer(name))


def reply_of(name: str, content: str) -> list[int]:
    """Return the tokens that a model samples: its text and the end of its turn."""
    return [*encoder(name).text(content), tokenizer(name).eos_token_id]


@pytest.mark.parametrize("name", SPECIAL)
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4), st.booleans())
def test_turn_by_turn_equals_the_whole(name: str, turns: list[tuple[str, str]], with_tools: bool) -> None:
    """Replies without outer white space: some templates strip it from the history, and sampled tokens stay."""
    chat = encoder(name)
    role = "tool" if with_tools and name in ("qwen2_5", "qwen3", "llama3") else "user"
    ids, messages = chat.first([{"role": "user", "content": turns[0][0]}]), [{"role": "user", "content": turns[0][0]}]
    for content, reply in turns:
        reply = f"r{reply.strip()}r".replace("</think>", "")
        if len(messages) > 1:
            ids += chat.following([{"role": role, "content": content}], ids[-1])
            messages.append({"role": role, "content": content})
        ids += reply_of(name, f" {reply}" if name == "mistral" else reply)
        messages.append({"role": "assistant", "content": reply})
    whole = chat.first([*messages, {"role": "user", "content": "x"}])
    last = chat.following([{"role": "user", "content": "x"}], ids[-1])
    assert [*ids, *last] == whole


@pytest.mark.parametrize("name", SPECIAL)
def test_ids_are_those_of_the_template(name: str) -> None:
    """Transformers renders and encodes the whole text; words at the borders of contents make that unambiguous."""
    messages = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "the answer"},
                {"role": "user", "content": "a b 1 2"}]  # fmt: skip
    made = tokenizer(name)
    expected = made.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert encoder(name).first(messages) == expected["input_ids"]


@pytest.mark.parametrize("name", SPECIAL)
@settings(max_examples=examples(40), deadline=None)
@given(CONTENT)
def test_contents_have_no_special_tokens(name: str, content: str) -> None:
    """The special tokens of a turn are those of a turn with an empty content."""
    chat, made = encoder(name), tokenizer(name)
    special = set(made.all_special_ids) | {made.convert_tokens_to_ids(token) for token in SPECIAL[name]}

    def specials(text: str) -> list[int]:
        return [i for i in chat.following([{"role": "user", "content": text}], None) if i in special]

    assert specials(content) == specials("x")
    assert not special & set(chat.text(content))
    assert made.decode(chat.text(content), clean_up_tokenization_spaces=False) == content


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3"])
def test_tools_are_in_the_first_turn(name: str) -> None:
    plain, with_tools = (encoder(name).first([{"role": "user", "content": "x"}], tools) for tools in ((), (TOOL,)))
    assert plain != with_tools and '"add"' in tokenizer(name).decode(with_tools)


def test_several_tool_messages_share_a_turn() -> None:
    chat, made = encoder("qwen3"), tokenizer("qwen3")
    ids = chat.following([{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}], made.eos_token_id)
    expected = (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    assert made.decode(ids) == f"{expected}<|im_start|>assistant\n"


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.text('abxyz019_-"<é', max_size=30) | st.sampled_from(["i0dxxxxx", "i1dxxxxxx"]), min_size=1, max_size=4)
)
def test_ids_of_calls_are_those_of_the_template(ids: list[str]) -> None:
    """Templates show them as they are, as JSON, several times, or not at all."""
    made = copy.deepcopy(tokenizer("qwen3"))
    made.chat_template = (
        "{%- for m in messages %}<|im_start|>{{ m.role + ' ' + m.content }}"
        "{{ m.tool_call_id }}{{ m.tool_call_id }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>"
        "{%- endfor %}"
    )
    calls = [{"id": one, "function": {"name": "f", "arguments": {}}} for one in ids]
    messages = [
        {"role": "assistant", "content": "calls", "tool_calls": calls},
        *({"role": "tool", "content": f"x{k}", "tool_call_id": one} for k, one in enumerate(ids)),
    ]
    text = made.apply_chat_template(messages, tokenize=False)
    assert made.decode(ChatEncoder(made).first(messages)) == text


def test_a_template_is_rendered_once_for_all_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, count = ChatEncoder(tokenizer("qwen3")), []
    monkeypatch.setattr(chat_module, "render_chats", lambda *args: count.append(1) or render_chats(*args))
    for k in range(20):
        chat.following([{"role": "tool", "content": "x", "tool_call_id": f"call-{k:04}"}], None)
    assert len(count) == 1
    monkeypatch.setattr(chat_module, "MAX_CACHED", 4)
    for k in range(20):
        chat.following([{"role": "tool", "content": "x", "name": f"n{k}"}], None)
        assert len(chat._shapes) <= 4


def test_special_tokens_outside_of_contents_are_refused() -> None:
    for field in ("name", "role", "tool_call_id"):
        with pytest.raises(UserError, match="special token <.im_end.> outside of its content"):
            encoder("qwen3").first([{"role": "tool", "content": "x", field: "a<|im_end|>b"}])


def test_the_end_of_a_turn_is_repeated_after_a_truncated_reply() -> None:
    chat, made = encoder("qwen3"), tokenizer("qwen3")
    whole, rest = (chat.following([{"role": "user", "content": "x"}], last) for last in (5, made.eos_token_id))
    assert whole == [made.eos_token_id, *rest]


@pytest.mark.parametrize(
    "template, problem",
    [
        (None, "has no chat template"),
        ("{{ messages[-1].content }}", "does not show replies of the assistant"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not show"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "once and in order"),
        ("{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}", "changes the content"),
        ("{{ raise_exception('no') }}", "failed: .*no"),
    ],
)
def test_templates_that_cannot_be_extended_are_errors(template: str | None, problem: str) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer("qwen3").backend_tokenizer, eos_token="<|im_end|>")
    made.chat_template = template
    with pytest.raises(UserError, match=problem):
        ChatEncoder(made).following([{"role": "user", "content": "x"}], 1)
