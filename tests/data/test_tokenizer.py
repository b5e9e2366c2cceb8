"""Tokenizer folders and chat templates are data: their code does not run, and their templates end."""

import ast
import json
import random
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from realhf.arch.families import FAMILIES
from realhf.base.errors import UserError
from realhf.data import tokenizer as module
from realhf.data.tokenizer import encode_prompts, load_tokenizer, same_tokens
from tests.data.test_source import TEMPLATE, characters, ids

ROOT = Path(__file__).parents[2]
CHAT = [{"role": "user", "content": "hi"}]


def test_every_from_pretrained_call_refuses_remote_code() -> None:
    found = []
    for file in sorted((ROOT / "realhf").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".from_pretrained", ".from_config")):
                options = {option.arg: ast.unparse(option.value) for option in node.keywords}
                found.append((file.name, options.get("trust_remote_code")))
    assert found and {value for _, value in found} == {"False"}, found


@pytest.mark.parametrize("seed", range(8))
def test_the_code_of_a_folder_does_not_run(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all places of ``auto_map``; and the terminal is not asked."""
    generator = random.Random(seed)
    monkeypatch.setattr("builtins.input", lambda text="": pytest.fail(f"a prompt: {text}"))
    characters().save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own:\n    pass\n")
    classes = {"AutoTokenizer": ["code.Own", None], "AutoConfig": "code.Own"}
    if seed % 2:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config |= {"auto_map": generator.choice([classes, classes["AutoTokenizer"]]), "tokenizer_class": "Own"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if not seed % 2 or generator.random() < 0.5:
        kind = generator.choice(["llama", "own"])
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": classes}))
    try:
        assert encode_prompts(load_tokenizer(tmp_path), ["a"]) == [[2, *ids("a")]]
    except UserError as error:
        assert str(tmp_path) in str(error)
    assert not (tmp_path / "ran").exists()


CLASSES = (*module.GENERIC_CLASSES, "Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Unknown", None)


@pytest.mark.parametrize("model_type", [None, *FAMILIES, "unknown", 3])
def test_a_tokenizer_is_the_one_of_auto_tokenizer(model_type: object, tmp_path: Path) -> None:
    """For every class and model: the same class and the same file, whether or not ``AutoTokenizer`` is imported."""
    for number, name in enumerate(CLASSES):
        folder = tmp_path / str(number)
        characters().save_pretrained(folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": name}))
        if model_type is not None:
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            expected = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:  # of many kinds, for model types that are no text
            with pytest.raises(UserError, match="cannot be loaded"):
                load_tokenizer(folder)
            continue
        loaded = load_tokenizer(folder)
        assert type(loaded) is type(expected), (name, model_type)
        assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str(), (name, model_type)
        assert loaded.special_tokens_map == expected.special_tokens_map


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
        "{{ (9 ** (9 ** 9)) % 10 }}",
        "{{ 'x' * 99999999999 }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% for",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_or_does_not_end_is_an_error(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEMPLATE_TIMEOUT_S", 2)
    tokenizer = characters(chat_template="{% if messages[0].content == 'hi' %}" + template + "{% endif %}")
    with pytest.raises(UserError, match="chat template of the tokenizer .* failed: .* this chat: "):
        encode_prompts(tokenizer, [[{"role": "user", "content": "no"}]] * 3 + [CHAT])


def test_chats_are_rendered_as_transformers_does() -> None:
    generator, tokenizer = random.Random(5), characters(chat_template=TEMPLATE)
    letters = [*map(chr, range(32, 127)), "\n", "\\", '"']
    chats = [
        [
            {"role": role, "content": "".join(generator.choices(letters, k=generator.randrange(40)))}
            for role in ("user", "assistant")[: generator.randint(1, 2)]
        ]
        for _ in range(200)
    ]
    expected = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    assert module.render_chats(tokenizer, chats) == expected
    odd = [[{"role": "user", "content": text}] for text in ("\ud800", "\u2028a", "é\x00\r\n")]
    assert module.render_chats(tokenizer, odd) == [f"u:{chat[0]['content']};>" for chat in odd]


def byte_level(folder: Path, text: str) -> None:
    """Write a byte-level BPE tokenizer, trained on a text, as vocab.json and merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(show_progress=False, **options))
    folder.mkdir()
    tokenizer.model.save(str(folder))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_tokenizers_of_other_files_are_compared(tmp_path: Path) -> None:
    """Without a tokenizer.json: in one folder, in both, or in none."""
    for name, text in (("a", "hello world " * 20), ("b", "12 34 567 " * 20)):
        byte_level(tmp_path / name, text)
        load_tokenizer(tmp_path / name).save_pretrained(tmp_path / f"{name}_json")
    for first in ("a", "a_json"):
        for second in ("a", "a_json", "b", "b_json"):
            assert same_tokens(tmp_path / first, tmp_path / second) == second.startswith("a"), (first, second)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a":', '{"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}']
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    for name in ("whole", "damaged"):
        characters().save_pretrained(tmp_path / name)
    (tmp_path / "damaged" / "tokenizer.json").write_text(text)
    for load in (load_tokenizer, partial(same_tokens, tmp_path / "whole")):
        with pytest.raises(UserError, match="the tokenizer in .*damaged cannot be loaded"):
            load(tmp_path / "damaged")
