"""Tokenised data files and their batches, with a tokenizer of one token per character."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import CurriculumConfig, DatasetConfig, OnBadRow
from realhf.api.experiment import Task
from realhf.base.errors import UserError
from realhf.data.batch import SequenceBatch
from realhf.data.encode import encode_chunk, encode_split
from realhf.data.rows import Row
from realhf.data.source import RowSource, row_fields
from realhf.data.tokenizer import encode_answers, encode_prompts, encode_segments, load_tokenizer

WORDS = ["<pad>", "<eos>", "<bos>", *map(chr, range(32, 127)), "\n"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def characters(**options: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds BOS and EOS to every text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<eos>", "bos_token": "<bos>"} | options)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return characters(chat_template=TEMPLATE)


def ids(text: str) -> list[int]:
    return [WORDS.index(c) for c in text]


def source(
    tmp_path: Path, rows: list[dict], task: Task, tokenizer: PreTrainedTokenizerBase, **options: object
) -> RowSource:
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RowSource(DatasetConfig(path=str(file), **{"shuffle": False} | options), task, tokenizer, seed=3)


def test_prompts_have_bos_and_answers_have_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_prompts(tokenizer, ["ab"]) == [[2, *ids("ab")]]
    assert encode_answers(tokenizer, ["ab\n"]) == [[*ids("ab\n"), 1]]


def test_the_chat_template_is_applied(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_prompts(tokenizer, [[{"role": "user", "content": "hi"}]]) == [ids("u:hi;>")]
    with pytest.raises(UserError, match="no chat template"):
        encode_prompts(characters(), [[{"role": "user", "content": "hi"}]])


def test_an_unusable_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match=r"none of tokenizer.json, .* tokenizer= can name"):
        load_tokenizer(tmp_path)
    characters(eos_token=None).save_pretrained(tmp_path / "no_eos")
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_tokenizer(tmp_path / "no_eos")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    characters().save_pretrained(tmp_path)
    assert encode_prompts(load_tokenizer(tmp_path), ["x y"]) == [[2, *ids("x y")]]


def test_prompts_have_their_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": c * n, "solutions": ["\u00e9" + c]} for c, n in [("a", 1), ("b", 3)]]
    batch = source(tmp_path, rows, Task.math, tokenizer).batch(1, 4)
    assert batch.ids == (RowId(1, PROMPT), RowId(2, PROMPT), RowId(3, PROMPT))
    assert batch["prompts"].dtype == torch.int64
    assert [r.tolist() for r in batch.columns["prompts"].rows()] == [[2, *ids(t)] for t in ("bbb", "a", "bbb")]
    assert row_fields(batch.columns["row"].rows()[1]) == {"query_id": "1", "prompt": "a", "solutions": ["\u00e9a"]}


def test_sft_rows_have_prompt_masks_and_are_truncated(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "ab", "answer": "c"}, {"prompt": "a", "answer": "cdefgh"}]
    batch = source(tmp_path, rows, Task.sft, tokenizer, max_seqlen=6).batch(0, 2)
    assert batch.ids == (RowId(0, 0), RowId(1, 0))
    tokens, masks = ([r.tolist() for r in batch.columns[key].rows()] for key in ("tokens", "prompt_mask"))
    assert tokens == [[2, *ids("abc"), 1], [2, *ids("acdef")]]
    assert masks == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert batch["prompt_mask"].dtype == torch.uint8


def test_pairs_are_interleaved_and_sampled_without_replacement(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"prompt": "p", "chosen": "+", "rejected": "-"},
        {"prompt": "q", "pos_answers": list("ABCDE"), "neg_answers": list("abcde")},
    ]
    stream = source(tmp_path, rows, Task.pairs, tokenizer, max_pairs_per_prompt=2)
    batch = stream.batch(0, 20)
    assert batch.ids[:6] == tuple(RowId(p, s) for p, s in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)])
    texts = [tokenizer.decode(r[2:-1]) for r in batch.columns["tokens"].rows()]
    assert texts[:2] == ["+", "-"]
    sampled = [tuple(texts[i + 2 : i + 6]) for i in range(0, 60, 6)]
    assert all(a.lower() == b and c.lower() == d and a != c for a, b, c, d in sampled)
    assert len(set(sampled)) > 2
    again = stream.batch(3, 4)
    assert again["tokens"].tolist() == batch.select([8, 9, 10, 11])["tokens"].tolist()


def texts(batch: SequenceBatch, key: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(row[1:]) for row in batch.columns[key].rows()]


def test_mismatched_answers_belong_to_another_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """They come from the next row with another prompt and are truncated to the longest sequence."""
    pairs = [
        {"prompt": "p", "chosen": "PPPPPP", "rejected": "pppppp"},
        {"prompt": "p", "chosen": "P", "rejected": "p"},
        {"prompt": "qqqqqq", "chosen": "Q", "rejected": "q"},
    ]
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    config = DatasetConfig(path=str(file), shuffle=False, eval_path=str(file))
    stream = RowSource(config, Task.pairs, tokenizer, seed=3, mismatched=True)
    batch = stream.batch(0, 3)
    assert texts(batch, "tokens", tokenizer)[:2] == ["pPPPPPP<eos>", "ppppppp<eos>"]
    want = ["pQ<eos>", "pq<eos>", "pQ<eos>", "pq<eos>", "qqqqqqPP", "qqqqqqpp"]
    assert texts(batch, "kl_tokens", tokenizer) == want
    masks = [row.tolist() for row in batch.columns["kl_prompt_mask"].rows()]
    assert masks[0] == [1, 1, 0, 0] and masks[-1] == [1] * 7 + [0, 0]
    parts = [stream.batch(0, 1), stream.batch(1, 2), stream.batch(2, 3)]
    assert [t for part in parts for t in texts(part, "kl_tokens", tokenizer)] == texts(batch, "kl_tokens", tokenizer)
    held_out = stream.held_out(1, 3, 50)
    assert texts(held_out, "kl_tokens", tokenizer) == texts(batch, "kl_tokens", tokenizer)[2:]
    assert (
        held_out.ids[0] == RowId(50, 0)
        and "kl_tokens" not in source(tmp_path, pairs, Task.pairs, tokenizer).batch(0, 1).columns
    )


def test_labelled_rows_have_mismatched_answers(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "a", "answer": str(i), "label": i % 2} for i in range(20)] + [
        {"prompt": "b", "answer": "x", "label": 1}
    ]
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(path=str(file), shuffle=False)
    stream = RowSource(config, Task.outcome, tokenizer, seed=3, mismatched=True)
    found = texts(stream.batch(0, 21), "kl_tokens", tokenizer)
    assert found == ["ax<eos>"] * 20 + ["b0<eos>"]  # the only other prompt is beyond the look-ahead
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    with pytest.raises(UserError, match="all rows have the same prompt"):
        RowSource(config, Task.outcome, tokenizer, seed=3, mismatched=True).batch(0, 1)


def test_replacement_rows_of_a_step(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": c, "solutions": ["1"]} for c in "abcdefg"]
    stream = source(tmp_path, rows, Task.math, tokenizer, shuffle=True)
    own = set(texts(stream.batch(3, 6), "prompts", tokenizer))
    sampled = stream.resampled(1, range(3, 6), 0, 4, 100)
    assert sampled.ids == tuple(RowId(p, PROMPT) for p in range(100, 104))
    replacements = texts(sampled, "prompts", tokenizer)
    assert len(set(replacements)) == 4 and not own & set(replacements)
    again = texts(stream.resampled(1, range(3, 6), 2, 8, 7), "prompts", tokenizer)
    assert again == [*replacements[2:], *replacements]  # repeated when there are no others


def test_rows_that_are_too_long_are_bad_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "x" * n, "answer": "a"} for n in (2, 5, 3)]
    options = {"max_prompt_len": 5, "max_seqlen": 4}
    with pytest.raises(UserError) as caught:
        source(tmp_path, rows, Task.sft, tokenizer, **options)
    path = tmp_path / "d.jsonl"
    assert caught.value.problems[:2] == [
        f"{path}:2: the prompt has 6 tokens, more than dataset.max_prompt_len=5",
        f"{path}:3: the prompt has 4 tokens, no space for an answer in dataset.max_seqlen=4",
    ]
    kept = source(tmp_path, rows, Task.sft, tokenizer, on_bad_row=OnBadRow.skip, **options)
    assert (len(kept), len(kept.problems)) == (1, 2)
    with pytest.raises(UserError, match="no usable row"):
        source(tmp_path, rows[1:], Task.sft, tokenizer, on_bad_row=OnBadRow.skip, **options)


def test_a_shuffled_epoch_has_every_row_once(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": chr(97 + i)} for i in range(20)]
    stream = source(tmp_path, rows, Task.prompt, tokenizer, shuffle=True)
    epochs = [[r[1].item() for r in stream.batch(e, e + 20).columns["prompts"].rows()] for e in (0, 20)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == ids("".join(r["prompt"] for r in rows))
    assert epochs[0] != epochs[1]


def test_no_positions_give_an_empty_batch(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for task, row in [(Task.prompt, {"prompt": "p"}), (Task.sft, {"prompt": "p", "answer": "a"})]:
        batch = source(tmp_path, [row], task, tokenizer).batch(5, 5)
        assert len(batch) == 0
        assert all(column.data.numel() == 0 for column in batch.columns.values())


def test_real_preferences_become_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = Path(__file__).parents[2] / "../shared/data/gsm8k_preferences.jsonl"
    if not file.is_file():
        pytest.skip(f"third-party data {file.name} is missing")
    config = DatasetConfig(path=str(file), max_prompt_len=4096, max_seqlen=4096)
    stream = RowSource(config, Task.pairs, tokenizer, seed=1)
    batch = stream.batch(0, 8)
    assert len(batch) == 16
    assert len(stream) > 100 and not stream.problems


def texts_of(batch: SequenceBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode every row without BOS."""
    return [tokenizer.decode(row[1:]) for row in batch.columns["tokens"].rows()]


def test_ranked_lists_keep_their_order(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "p", "answers": list("abcdef")}, {"prompt": "q", "answers": ["x", "y"]}]
    batch = source(tmp_path, rows, Task.ranked, tokenizer, max_responses=3).batch(0, 10)
    assert batch.ids[:5] == tuple(RowId(p, s) for p, s in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
    answers = [text[1] for text in texts_of(batch, tokenizer)]
    assert answers[3:5] == ["x", "y"]
    sampled = {"".join(answers[i : i + 3]) for i in range(0, 25, 5)}
    assert len(sampled) > 1 and all(list(some) == sorted(some) and len(set(some)) == 3 for some in sampled)


def test_outcome_rows_have_a_label(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "p", "answer": "a", "label": 1}, {"prompt": "p", "answer": "bcd", "label": 0.25}]
    batch = source(tmp_path, rows, Task.outcome, tokenizer).batch(0, 2)
    assert texts_of(batch, tokenizer) == ["pa<eos>", "pbcd<eos>"] and batch.lengths("label") == (1, 1)
    assert batch["label"].tolist() == [1.0, 0.25] and batch["label"].dtype == torch.float32
    with pytest.raises(UserError, match="d.jsonl:2: the answer and its label end beyond dataset.max_seqlen=5"):
        source(tmp_path, rows, Task.outcome, tokenizer, max_seqlen=5)


def test_step_labels_are_on_the_last_tokens_of_steps(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "p", "steps": ["ab", "c", " d"], "labels": [1, 0.5, 0]}]
    batch = source(tmp_path, rows, Task.process, tokenizer).batch(0, 1)
    assert batch["tokens"].tolist() == [2, *ids("pab\nc d"), 1]
    assert batch["step_labels"].tolist() == [-1, -1, -1, 1.0, -1, 0.5, -1, -1, 0.0]
    assert batch["prompt_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("max_seqlen", "kept"), [(9, [1, 0]), (8, [1]), (4, [1])])
def test_a_truncated_step_is_dropped_with_its_label(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, max_seqlen: int, kept: list[int]
) -> None:
    rows = [{"prompt": "p", "steps": ["ab", "cde"], "labels": [1, 0]}]
    batch = source(tmp_path, rows, Task.process, tokenizer, max_seqlen=max_seqlen).batch(0, 1)
    assert [x for x in batch["step_labels"].tolist() if x >= 0] == kept
    assert batch["tokens"].numel() == (9 if len(kept) == 2 else 4)
    with pytest.raises(UserError, match="the first step and its label end beyond dataset.max_seqlen=3"):
        source(tmp_path, rows, Task.process, tokenizer, max_seqlen=3)


def test_a_token_belongs_to_the_step_of_its_first_character() -> None:
    """Tokens of three characters, one of which spans two steps."""
    vocabulary = {"<eos>": 0, "abc": 1, "d e": 2, "fgh": 3, "?": 4}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]{3}"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    assert encode_segments(tokenizer, [["abcd", " e", "fgh"], ["abc"]]) == [[[1, 2], [], [3, 0]], [[1, 0]]]
    assert encode_segments(tokenizer, []) == []
    rows = [Row(1, {"prompt": "abc", "steps": ["abcd", " e", "fgh"], "labels": [1.0, 0.5, 0.25]})]
    (row,) = encode_chunk(rows, Task.process, tokenizer)
    assert [ids.tolist() for ids in row.answers] == [[1, 2], [3, 0]] and row.labels.tolist() == [1.0, 0.25]


def letters(n: int) -> list[dict]:
    return [{"prompt": chr(97 + i), "chosen": "+", "rejected": "-"} for i in range(n)]


def test_a_fraction_of_the_rows_is_held_out(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def parts(**options: object) -> tuple[list[str], list[str]]:
        stream = source(tmp_path, letters(20), Task.pairs, tokenizer, **options)
        kept = stream.held_out(0, stream.n_held_out, 40)
        assert {row.prompt for row in kept.ids} == set(range(40, 40 + stream.n_held_out))
        trained = stream.batch(0, len(stream))
        return tuple([text[0] for text in texts_of(some, tokenizer)[::2]] for some in (trained, kept))

    trained, held_out = parts(eval_fraction=0.2)
    assert len(held_out) == 4 and sorted(trained + held_out) == [chr(97 + i) for i in range(20)]
    assert held_out == sorted(held_out) and parts(eval_fraction=0.2) == (trained, held_out)
    assert parts(eval_fraction=0.2, split_seed=2)[1] != held_out
    assert [len(part) for part in parts(eval_fraction=0.001)] == [19, 1]
    assert [len(part) for part in parts()] == [20, 0]


def test_held_out_rows_can_have_their_own_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    other = tmp_path / "held.jsonl"
    other.write_text(json.dumps({"prompt": "z", "chosen": "+", "rejected": "-"}) + "\n")
    stream = source(tmp_path, letters(3), Task.pairs, tokenizer, eval_path=str(other), label_noise=1.0)
    assert (len(stream), stream.n_held_out) == (3, 1)
    assert texts_of(stream.held_out(0, 1, 9), tokenizer) == ["z+<eos>", "z-<eos>"]  # noise applies to training rows
    assert texts_of(stream.batch(0, 1), tokenizer) == ["a-<eos>", "a+<eos>"]
    other.write_text("{}\n")
    with pytest.raises(UserError, match=r"held.jsonl:1: 'prompt' is missing"):
        source(tmp_path, letters(3), Task.pairs, tokenizer, eval_path=str(other))


def test_label_noise_depends_only_on_the_split_seed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = tmp_path / "d.jsonl"
    row = {"prompt": "p", "pos_answers": ["+"] * 500, "neg_answers": ["-"] * 500}
    file.write_text(json.dumps(row) + "\n")

    def flipped(seed: int, **options: object) -> list[bool]:
        config = DatasetConfig(path=str(file), max_pairs_per_prompt=500, label_noise=0.25, **options)
        batch = RowSource(config, Task.pairs, tokenizer, seed).batch(3, 4)
        return [text[1] == "-" for text in texts_of(batch, tokenizer)[::2]]

    assert flipped(1) == flipped(2) != flipped(1, split_seed=5)
    assert 0.2 < sum(flipped(1)) / 500 < 0.3


def test_answers_to_score_have_their_row(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "ab", "answer": "c", "gold": 2}, {"prompt": "d", "answer": "ef", "truncated": True}]
    batch = source(tmp_path, rows, Task.answer, tokenizer).batch(0, 2)
    assert batch.ids == (RowId(0, 0), RowId(1, 0))
    assert batch["tokens"].tolist() == [2, *ids("abc"), 1, 2, *ids("def")]  # a truncated answer has no EOS
    assert batch["prompt_mask"].tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 0]
    assert [row_fields(data) for data in batch.columns["row"].rows()] == rows


def leveled(tmp_path: Path, name: str, levels: list[object]) -> str:
    file = tmp_path / f"{name}.jsonl"
    rows = [{"prompt": f"{name}{i}", "solutions": ["1"], "level": level} for i, level in enumerate(levels)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def prompts_of(stream: RowSource, rows: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(row[1:]) for row in stream.chosen(rows, 0).columns["prompts"].rows()]


def test_chosen_rows_of_several_sources(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    paths = [leveled(tmp_path, "a", [1, 2]), leveled(tmp_path, "b", [3, 4, 5])]
    config = DatasetConfig(paths=paths)
    stream = RowSource(config, Task.math, tokenizer, seed=3)
    assert prompts_of(stream, [4, 0, 0, 2], tokenizer) == ["b2", "a0", "a0", "b0"]
    batch = stream.chosen([1, 3], 10)
    assert (
        batch.ids == (RowId(10, PROMPT), RowId(11, PROMPT)) and row_fields(batch.columns["row"].rows()[1])["level"] == 4
    )
    assert stream.chosen([], 10).ids == ()
    train, held_out = encode_split(replace(config, eval_fraction=0.4), Task.math, tokenizer)
    assert len(train.sizes) == 2 and sum(train.sizes) == len(train) == 3 and len(held_out) == 2
    assert encode_split(DatasetConfig(path=paths[0]), Task.math, tokenizer)[0].sizes == (2,)


def test_rows_are_sorted_within_their_source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Text in CSV may be a number; equal numbers are in random order."""
    paths = [leveled(tmp_path, "a", ["3", 1.5, -2]), leveled(tmp_path, "b", [0] * 20)]
    config = DatasetConfig(paths=paths, curriculum=CurriculumConfig(sort_by="level"))
    stream = RowSource(config, Task.math, tokenizer, seed=3)
    found = prompts_of(stream, range(23), tokenizer)
    assert found[:3] == ["a2", "a1", "a0"]
    assert sorted(found[3:]) == sorted(f"b{i}" for i in range(20)) != found[3:] != [f"b{i}" for i in range(20)]
    held_out = RowSource(replace(config, eval_path=paths[0]), Task.math, tokenizer, seed=3).held_out(0, 3, 0)
    assert [row_fields(row)["level"] for row in held_out.columns["row"].rows()] == ["3", 1.5, -2]
    for bad in (None, "hard", float("nan"), [1], 10**400, -(10**400), "1e999", {}):
        config.paths = [leveled(tmp_path, "a", [1, bad])]
        with pytest.raises(UserError, match=r"a.jsonl:2: no number in column 'level' \(dataset.curriculum.sort_by\)"):
            RowSource(config, Task.math, tokenizer, seed=3)


def test_mismatched_answers_of_chosen_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """They are those of the next rows of the data, so they do not depend on which worker reads a row."""
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in letters(4)))
    stream = RowSource(DatasetConfig(path=str(file)), Task.pairs, tokenizer, seed=3, mismatched=True)
    whole = texts(stream.chosen([3, 1, 0], 0), "kl_tokens", tokenizer)
    assert whole == [t for i in (3, 1, 0) for t in texts(stream.chosen([i], 0), "kl_tokens", tokenizer)]
