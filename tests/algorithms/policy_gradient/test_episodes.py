"""Episodes between scripted replies and real environment processes: tokens, masks, rewards, ends, failures."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from realhf.algorithms.policy_gradient.episode_driver import EpisodeDriver, RolloutOptions
from realhf.algorithms.policy_gradient.episodes import Episode, EpisodeGroup
from realhf.algorithms.policy_gradient.rollout import episode_rows, episode_stats
from realhf.api.config import EnvConfig, GenerationConfig
from realhf.apps.demo.arithmetic import character_tokenizer
from realhf.apps.demo.make_tokenizer import EOS, PAD
from realhf.data.turns import EpisodeKey, TurnInput, TurnOutput
from realhf.environments.env_process import EnvOptions
from realhf.environments.pool import EnvPool

ENVIRONMENT = '''
from realhf.environments import Turn


class Env:
    """Plays the turns of the row: texts, tokens, messages, rewards."""

    def reset(self, row, seed):
        self.turns = iter(row["turns"])
        return self.next(row.get("first", {}))

    def step(self, reply):
        self.replies = getattr(self, "replies", 0) + 1
        return self.next(next(self.turns))

    def next(self, fields):
        if fields == "raise":
            raise ValueError("no more turns")
        return Turn(**fields)
'''
SEEDS = """
from realhf.environments import Turn


class Env:
    def reset(self, row, seed):
        return Turn(info={"seed": seed % 2**50}, done=True)

    def step(self, reply): ...
"""
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=character_tokenizer(), eos_token=EOS, pad_token=PAD)
STOP = TOKENIZER.eos_token_id
TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'refused' %}{{- raise_exception('no such role') }}{%- endif %}
    {{- message.content + '=' }}
{%- endfor %}"""
Row = dict[str, object]


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., list[Episode]]]:
    """Play episodes; the model replies with its number of replies and a stop token."""
    file = tmp_path / "env.py"
    file.write_text(ENVIRONMENT)
    pools: list[EnvPool] = []

    def run(rows: list[Row], n: int = 1, max_len: int = 60, n_open: int = 2,
            tokenizer: PreTrainedTokenizerFast = TOKENIZER, **options: int) -> list[Episode]:  # fmt: skip
        pools.append(EnvPool(EnvOptions(f"{file}:Env")))
        groups = [EpisodeGroup.new(7 * i, ids("1+1="), json.dumps(row), n) for i, row in enumerate(rows)]
        gen = GenerationConfig(max_new_tokens=4)
        limits = RolloutOptions(EnvConfig(**options), gen, 3, max_len, n_open)
        driver = EpisodeDriver(pools[-1], tokenizer, groups, limits)
        waiting: list[TurnInput] = []
        counts: dict[EpisodeKey, int] = {}
        outputs: list[TurnOutput] = []
        most = 0
        while not (request := driver.next(outputs, not waiting)).done:
            waiting += request.inputs
            most = max(most, len(driver._by_number))
            turn = waiting.pop(0)
            count = counts[turn.key] = counts.get(turn.key, 0) + 1
            tokens = [*ids(str(count)), STOP][: turn.limit]
            logprobs = [-float(count)] * len(tokens)
            outputs = [TurnOutput(turn.key, tokens, logprobs, logprobs, tokens[-1] == STOP)]
        assert most <= n_open
        found = msgspec.msgpack.decode(driver.result(), type=list[EpisodeGroup])
        assert all(group.is_over for group in found)
        return [episode for group in found for episode in group.episodes]

    yield run
    for pool in pools:
        pool.close()


def test_tokens_masks_and_rewards(play: Callable[..., list[Episode]]) -> None:
    turns = [{"text": "+", "reward": 0.5}, {"tokens": ids("=="), "reward": -1.0}, {"reward": 2.0, "done": True}]
    (episode,) = play([{"turns": turns}])
    assert TOKENIZER.decode(episode.row.tokens) == f"1+1=1{EOS}+2{EOS}==3{EOS}"
    assert episode.row.sampled == [0] * 4 + [1] * 2 + [0] + [1] * 2 + [0] * 2 + [1] * 2
    assert episode.row.logprobs == [0.0] * 4 + [-1.0] * 2 + [0.0] + [-2.0] * 2 + [0.0] * 2 + [-3.0] * 2
    assert episode.rewards == [(0, 5, 0.5), (0, 8, -1.0), (0, 12, 2.0)]
    assert not episode.truncated and episode.n_turns == 3 and not episode.failure
    assert episode.score(1.0) == 1.5 and episode.score(0.5) == 0.5 - 0.5 + 0.5


def test_columns_and_statistics(play: Callable[..., list[Episode]]) -> None:
    last = {"reward": 1.0, "done": True, "info": {"right": True}}
    episodes = play([{"turns": [{"text": "+", "reward": 0.5}, last]}, {"turns": ["raise"]}], n=2)
    groups = [(one.key[0], EpisodeGroup(one.key[0], [], "{}", [one])) for one in episodes]
    batch = episode_rows(groups, 2, 1.0, torch.device("cpu"))
    assert [(i.prompt, i.sample) for i in batch.ids] == [(0, 0), (0, 1), (7, 0), (7, 1)]
    assert batch["scores"].tolist()[:2] == [1.5, 1.5] and batch["scores"][2:].isnan().all()
    assert (batch.columns["turn_rewards"].rows()[0] != 0).nonzero().flatten().tolist() == [5, 8]
    assert torch.equal(batch["prompt_mask"] == 0, batch["logprobs"] != 0)
    stats = episode_stats(episodes)
    assert stats["failed"] == (2.0, 4.0) and stats["turns"] == (4.0, 2.0) and stats["info_right"] == (2.0, 2.0)
    assert "ValueError: no more turns" in episodes[2].failure


def test_values_of_rows_and_turns_may_be_odd(play: Callable[..., list[Episode]]) -> None:
    """A row has numbers of any size; no text, number or message of an environment ends the run."""
    odd: list[dict[str, object]] = [{"text": "\ud8001"}, {"messages": [{"role": "user", "content": "\udfff"}]}]
    bad: list[dict[str, object]] = [
        {"messages": [{"role": "refused", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "number": 10**30}]},
        {"tools": [nested(60)]},
        {"max_tokens": 10**30},
        {"tokens": [10**30]},
        {"tokens": [10**9]},
    ]
    last = {"done": True, "reward": 1.0}
    rows = [{"turns": [turn, last], "number": 10**30, "name": "\udc00"} for turn in (*odd, *bad)]
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    episodes = play(rows, tokenizer=tokenizer)
    assert [bool(one.failure) for one in episodes] == [False] * len(odd) + [True] * len(bad)
    problems = ["no such role", "100 bits", "nested", "100 bits", "100 bits", "the vocabulary has"]
    for episode, problem in zip(episodes[len(odd) :], problems, strict=True):
        assert problem in episode.failure and episode.n_turns == 1, episode.failure


def nested(depth: int) -> dict[str, object]:
    return {"of": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    "row, options, n_turns",
    [
        ({"turns": [{"text": "+"}] * 9}, {"max_turns": 3}, 3),
        ({"turns": [{"text": "+" * 20}] * 9}, {"max_len": 40}, 2),
        ({"turns": [{"text": "+"}] * 9}, {"max_len": 5}, 1),
    ],
)
def test_episodes_are_truncated(
    row: Row, options: dict[str, int], n_turns: int, play: Callable[..., list[Episode]]
) -> None:
    """The reply before the end has its reward, and no message of the environment follows it."""
    (episode,) = play([row], **options)
    assert episode.truncated and not episode.failure and episode.n_turns == len(episode.rewards) == n_turns
    assert episode.row.sampled[-1] == 1 and len(episode.row.tokens) <= options.get("max_len", 60)


@pytest.mark.parametrize(
    "first, start",
    [({}, "1+1="), ({"text": "9"}, "9"), ({"tokens": [5, 6]}, None), ({"text": ""}, EOS), ({"tokens": []}, EOS)],
)
def test_an_episode_starts_with_its_first_turn_or_its_prompt(
    first: Row, start: str | None, play: Callable[..., list[Episode]]
) -> None:
    (episode,) = play([{"first": first, "turns": [{"done": True}]}])
    n = episode.row.sampled.index(1)
    assert episode.row.tokens[:n] == ([5, 6] if start is None else ids(start))


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"first": "raise", "turns": []}, "ValueError: no more turns"),
        ({"first": {"text": "1" * 70}, "turns": []}, "the first turn has 70 tokens"),
        ({"first": {"tokens": [10**6]}, "turns": []}, "token 1000000, the vocabulary has"),
        ({"turns": [{"tokens": [10**6]}]}, "token 1000000, the vocabulary has"),
        ({"turns": [{"text": "+", "reward": "1"}]}, "Turn.reward"),
        ({"turns": [{"text": "+", "tokens": [1]}]}, "messages, text or tokens"),
        ({"turns": []}, "StopIteration"),
    ],
)
def test_failures_name_their_cause(row: Row, problem: str, play: Callable[..., list[Episode]]) -> None:
    failed, good = play([row, {"turns": [{"done": True, "reward": 1.0}]}])
    assert problem in failed.failure and failed.row.tokens and failed.score(1.0) != failed.score(1.0)
    assert not good.failure and good.score(1.0) == 1.0


def test_seeds_are_of_the_prompt_or_of_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "seeds.py"
    file.write_text(SEEDS)
    found = {}
    for per_sample in (False, True):
        pool = EnvPool(EnvOptions(f"{file}:Env"))
        groups = [EpisodeGroup.new(i, [5], "{}", 3) for i in range(2)]
        options = RolloutOptions(EnvConfig(seed_per_sample=per_sample), GenerationConfig(), 1, 9, 9)
        driver = EpisodeDriver(pool, TOKENIZER, groups, options)
        while not driver.next([], True).done:
            pass
        pool.close()
        found[per_sample] = [episode.info["seed"] for group in driver.groups for episode in group.episodes]
    assert len(set(found[False])) == 2 and len(set(found[True])) == 6


def test_the_length_of_an_episode_is_bounded() -> None:
    def longest(n_positions: int, **options: int) -> int:
        env = EnvConfig(max_turns=3, **options)
        return RolloutOptions(env, GenerationConfig(max_new_tokens=10), 1, n_positions, 1).max_len(7)

    assert longest(10**6) == 7 + 256 + 3 * (10 + 256)
    assert (longest(50), longest(50, max_episode_len=20)) == (50, 20)
