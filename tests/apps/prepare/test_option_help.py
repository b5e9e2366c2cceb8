"""Help on options, suggestions for the names of other libraries, and values that need no quotes."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs import make_options
from realhf.api.config.option import leaves
from realhf.apps.main import run
from realhf.apps.prepare.option_help import (
    BASIC,
    SYNONYMS,
    completions,
    matching,
    options_help,
    options_of,
    synonyms_of,
)
from realhf.apps.prepare.options import updated
from realhf.base.errors import UserError
from realhf.experiments import EXPERIMENTS, experiment_class
from realhf.experiments.ppo_math import PPOMathExperiment
from tests.scaling import examples

KEYS = {name: [o.key for o in options_of(experiment_class(name))] for name in EXPERIMENTS}
NAMES = [name for names in SYNONYMS.values() for name in names.split()]


def is_known(word: str, name: str) -> bool:
    """Return True for an option or a group of options."""
    return any(key == word or key.startswith(f"{word}.") for key in KEYS[name])


def shown(name: str, pattern: str = "") -> dict[str, str]:
    """The lines of a help text by option."""
    lines = [line for line in options_help(experiment_class(name), pattern).splitlines() if line.startswith("  ")]
    return {line.split(":")[0].strip(): line for line in lines}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help_shows_up_to_twenty_options_with_the_defaults_of_the_experiment(name: str) -> None:
    defaults = {o.key: o.default for o in options_of(experiment_class(name))}
    lines = shown(name)
    assert 10 <= len(lines) <= 20 and all(line.endswith(f"[{defaults[key]}]") for key, line in lines.items())
    assert set(shown(name, "all")) == set(defaults)


def test_the_defaults_of_grpo_are_not_those_of_ppo() -> None:
    lines = shown("grpo")
    assert lines["ppo.group_size"].endswith("[8]") and lines["ppo.kl_ctl"].endswith("[0.04]")
    assert "critic.optimizer.lr" not in lines and "rew.path" not in lines
    assert {"critic.optimizer.lr", "rew.path"} <= set(shown("ppo"))


def test_every_named_option_exists() -> None:
    known = {key for keys in KEYS.values() for key in keys}
    assert set(" ".join(BASIC.values()).split()) <= known
    assert all(any(f".{key}".endswith(f".{end}") for key in known) for end in SYNONYMS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_names_of_other_libraries_are_answered_with_an_option(name: str) -> None:
    found = {word: keys[0] for word in NAMES if not is_known(word, name) and (keys := synonyms_of(word, KEYS[name]))}
    with pytest.raises(UserError) as caught:
        updated(experiment_class(name)(), [f"{word}=1" for word in found])
    assert caught.value.problems == [f"unknown option {word}  did you mean {key} ?" for word, key in found.items()]
    options = list(options_of(experiment_class(name)))
    assert all(key in matching(word, options) for word, key in found.items()), "--help finds it too"


@pytest.mark.parametrize(
    ("name", "word", "option"),
    [
        ("grpo", "learning_rate", "actor.optimizer.lr"),
        ("ppo", "critic.learning_rate", "critic.optimizer.lr"),
        ("ppo", "Learning-Rate", "actor.optimizer.lr"),
        ("sft", "learning_rate", "model.optimizer.lr"),
        ("grpo", "batch_size", "dataset.train_bs_n_seqs"),
        ("grpo", "epochs", "exp_ctrl.total_train_epochs"),
        ("grpo", "max_length", "ppo.gen.max_new_tokens"),
        ("sft", "max_length", "dataset.max_seqlen"),
        ("gen", "max_length", "sampling.max_new_tokens"),
    ],
)
def test_synonyms(name: str, word: str, option: str) -> None:
    assert synonyms_of(word, KEYS[name])[0] == option


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("KL_ctl", {"ppo.kl_ctl", "ppo.use_adaptive_kl_ctl"}),
        ("wandb.*", {"wandb.mode", "wandb.project", "wandb.entity", "wandb.name"}),
        ("nucleus", {"ppo.gen.top_p", "evaluation.top_p"}),
        ("ppo.kl_ctl=0.3", {"ppo.kl_ctl"}),
        ("zzz", set()),
    ],
)
def test_help_searches(pattern: str, options: set[str]) -> None:
    assert set(shown("grpo", pattern)) == options


@settings(max_examples=examples(50))
@given(st.text(st.characters(), max_size=50) | st.sampled_from(["[", "]*", "**", "\udcff", "a" * 5000]))
def test_any_search_gives_lines_that_can_be_printed(pattern: str) -> None:
    text = options_help(PPOMathExperiment, pattern)
    assert text.strip() and text.encode().decode() == text


@pytest.mark.parametrize(
    "words", [["grpo", "--help"], ["grpo", "-h", "kl"], ["--help", "grpo"], ["grpo", "x=1", "--help"]]
)
@pytest.mark.parametrize("command", ["quickstart", "plan"])
def test_help_of_both_commands(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if (command, words[0]) != ("plan", "--help"):
        assert run([command, *words]) == 0
        assert "  ppo.kl_ctl: float" in capsys.readouterr().out


def test_the_page_of_options_is_short_and_complete() -> None:
    page = Path(make_options.__file__).with_name("options.md").read_text()
    assert len(page.splitlines()) <= 900
    for name, keys in KEYS.items():
        section = page.split(f"## {name}\n")[1].split("\n## ")[0]
        for key in keys:
            group, _, rest = key.partition(".")
            assert f"| `{key}` |" in page or (f"| `{group}.*` |" in section and f"| `{rest}` |" in page), (name, key)
    assert "`group_size=8`" in page.split("## grpo\n")[1].split("\n## ")[0]


URLS = ["http://h:1/judge?fn=math", "http://h/a?b=c&d=e,f", "https://u:p@h/x#y=(1)", "format:^a{1,3}=b$", "a b = c",
        "1e3", "007", "true", "{prompt}", "12:30:00", "choice(1,2)", "--mail-type=END", "a,b", "x[1]"]  # fmt: skip


@pytest.mark.parametrize("text", URLS)
def test_texts_need_no_quotes(text: str) -> None:
    options = updated(PPOMathExperiment(), [f"reward.fn={text}", f"planner.profile={text}", f"actor.path={text}"])
    assert (options.reward.fn, options.planner.profile, options.actor.path) == (text, text, text)


@settings(max_examples=examples(12))
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="$\\"), max_size=30))
def test_any_text_without_interpolation_is_taken_as_it_is(text: str) -> None:
    if text[:1] not in ("'", '"') and text not in ("null", "???"):
        assert updated(PPOMathExperiment(), [f"dataset.prompt_template={text}"]).dataset.prompt_template == text


@settings(max_examples=examples(12))
@given(st.lists(st.sampled_from([u for u in URLS if not set(u) & set(",[]{} ")]), min_size=1, max_size=4))
def test_lists_of_texts_need_no_quotes(texts: list[str]) -> None:
    texts = ["math?x=1", *texts]  # the first one is not of Hydra's grammar
    assert updated(PPOMathExperiment(), [f"reward.fns=[{','.join(texts)}]"]).reward.fns == texts


def test_quotes_and_null_still_work() -> None:
    options = updated(PPOMathExperiment(), ["reward.fn='a=b'", "actor.path=null", 'dataset.path="c d"'])
    assert (options.reward.fn, options.actor.path, options.dataset.path) == ("a=b", None, "c d")


@settings(max_examples=examples(12))
@given(st.sampled_from(list(EXPERIMENTS)), st.data())
def test_completions_lead_to_every_option(name: str, data: st.DataObject) -> None:
    known = {key: field for key, field, _ in leaves(experiment_class(name)())}
    key = data.draw(st.sampled_from(list(known)))
    at = data.draw(st.integers(0, len(key)))
    step = completions(key[:at], known)
    assert len(set(step)) == len(step) and any(f"{key}=".startswith(word) and len(word) > at for word in step)
    assert all(word.startswith(key[:at]) and (word.endswith((".", "="))) for word in step)
    for word in completions(f"{key}=", known):
        if "/" not in word and not Path(word.partition("=")[2]).exists():
            updated(experiment_class(name)(), [word])
