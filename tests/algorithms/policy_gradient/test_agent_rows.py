"""Rows of episodes whose history is forked or rewritten: every reply is trained once, in the context it had."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.policy_gradient.advantages import ADVANTAGES, AdvantageInputs, GroupOptions
from realhf.algorithms.policy_gradient.config import PPOConfig
from realhf.algorithms.policy_gradient.episodes import Episode, EpisodeGroup, EpisodeRow
from realhf.algorithms.policy_gradient.rewards import rewards_of
from realhf.algorithms.policy_gradient.rollout import episode_rows, episode_stats
from realhf.api.batch_meta import RowId
from realhf.data.batch import Column, SequenceBatch
from realhf.data.turns import TurnOutput
from realhf.ops.rows import PackedRows, per_token
from tests.scaling import examples


def play(episode: Episode, requests: list[tuple[int, int, int]], whole_tokens: bool) -> list[tuple[list, list[int]]]:
    """Send conversations that continue an earlier one, or drop its messages, and return the context of each reply."""
    conversations: list[list] = [[]]
    contexts = []
    for number, (which, kept, new) in enumerate(requests):
        known = conversations[which % len(conversations)]
        conversation = [*known[: len(known) - kept % (len(known) + 1)], f"user {new}"]
        tokens = [token for message in conversation for token in encode(message)]
        if whole_tokens:
            rest = tokens[episode.continue_tokens(tokens) :]
        else:
            messages = [as_message(one) for one in conversation]
            rest = [t for one in conversation[episode.continue_messages(messages) :] for t in encode(one)]
        episode.row.append(rest)
        assert episode.row.tokens == tokens
        reply = f"reply {number % 3}"
        episode.append_sampled(TurnOutput(episode.key, encode(reply), [-0.5] * len(encode(reply)), [], True))
        episode.end_reply(reply)
        contexts.append((list(tokens), encode(reply)))
        conversations.append([*conversation, reply])
        if number % 2:
            episode.append_reward(float(number))
    return contexts


def encode(text: str) -> list[int]:
    return [*text.encode(), 0]


def as_message(text: str) -> dict[str, str]:
    return {"role": "assistant" if text.startswith("reply") else "user", "content": text}


def inputs_of(ids: list[RowId], rewards: list[float]) -> AdvantageInputs:
    """Return rows of a prompt token and a sampled one, which has the reward."""
    lengths = (2,) * len(ids)
    mask = torch.tensor([False, True] * len(ids))
    rows, values = PackedRows(mask, lengths), torch.tensor([x for reward in rewards for x in (0.0, reward)])
    row_of_token = per_token(torch.arange(len(ids)), lengths)
    batch = SequenceBatch(tuple(ids), {"tokens": Column(torch.zeros(len(mask), dtype=torch.int64), lengths)})
    return AdvantageInputs(batch, values, torch.zeros(len(mask)), rows, rows, row_of_token, 1.0, 1.0)


REQUESTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=9)


@settings(max_examples=examples(200), deadline=None)
@given(REQUESTS, st.booleans())
def test_every_reply_is_trained_once_in_its_context(requests: list[tuple[int, int, int]], whole_tokens: bool) -> None:
    episode = Episode((3, 1))
    contexts = play(episode, requests, whole_tokens)
    found = []
    for row in episode.rows:
        assert row.n_drifted == 0 and len(row.tokens) == len(row.sampled) == len(row.logprobs)
        starts = [i for i, is_own in enumerate(row.sampled) if is_own and not (i and row.sampled[i - 1])]
        ends = [end for end, _ in row.replies]
        found += [(row.tokens[:start], row.tokens[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert sorted(found) == sorted(contexts)
    assert episode.score(1.0) == sum(n for n in range(len(requests)) if n % 2)
    batch = episode_rows([(3, EpisodeGroup(3, [], "{}", [episode]))], 4, 1.0, torch.device("cpu"))
    assert len(set(batch.ids)) == len(batch) == len(episode.rows) and {row.sample % 4 for row in batch.ids} == {1}
    assert float(batch["turn_rewards"].sum()) == episode.score(1.0) and int(batch["truncated"].sum()) == 1
    assert episode_stats([episode])["drifted"] == (0.0, float(sum(len(reply) for _, reply in contexts)))


def test_drifted_tokens_are_counted() -> None:
    episode = Episode((0, 0))
    play(episode, [(0, 0, 1), (1, 0, 2), (2, 0, 1)], whole_tokens=False)
    episode.rows[0].tokens[len(encode("user 1")) + len(encode("reply 0"))] += 1  # of the second message
    assert episode.rows[0].n_drifted == 2 * len(encode("reply 0"))


def test_a_row_without_a_reply_is_dropped() -> None:
    episode = Episode((0, 0))
    play(episode, [(0, 0, 1)], whole_tokens=False)
    episode.continue_messages([as_message("user 2")])
    episode.row.append(encode("user 2"))
    assert len(episode.rows) == 2
    episode.drop_empty_row()
    assert len(episode.rows) == 1 and episode.row.replies
    empty = Episode((0, 0), [EpisodeRow()])
    empty.drop_empty_row()
    assert len(empty.rows) == 1


@pytest.mark.parametrize("name", ["group", "rloo"])
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6))
def test_an_episode_with_several_rows_counts_once(name: str, seed: int) -> None:
    """Splitting episodes into rows does not change the advantages of any of them."""
    chance = random.Random(seed)
    scores = [[chance.choice([0.0, 0.5, 1.0]) for _ in range(4)] for _ in range(2)]
    counts = [[chance.randint(1, 3) for _ in range(4)] for _ in range(2)]
    values = {}
    for case in (counts, [[1] * 4] * 2):
        ids, episodes, rewards = [], [], []
        order = [(p, s, k) for p in range(2) for s in range(4) for k in range(case[p][s])]
        chance.shuffle(order)
        for prompt, sample, part in order:
            ids.append(RowId(prompt, sample + 4 * part))
            episodes.append(sample)
            rewards.append(scores[prompt][sample])
        x = inputs_of(ids, rewards)
        x = replace(x, batch=x.batch.with_scalars("episode", torch.tensor(episodes)))
        advantages, _ = ADVANTAGES[name].fn(x, GroupOptions())
        found = {}
        for row, value in zip(ids, x.rows.sums(advantages).tolist(), strict=True):
            found.setdefault((row.prompt, row.sample % 4), set()).add(round(value, 5))
        values[case is counts] = found
    assert values[True] == values[False] and all(len(one) == 1 for one in values[True].values())


def test_rows_of_an_episode_are_selected_together() -> None:
    ids = tuple(RowId(0, n) for n in (0, 1, 2, 3, 4, 5, 8))  # 4 episodes; 4 and 8 belong to 0, 5 to 1
    episode = torch.tensor([0, 1, 2, 3, 0, 1, 0])
    scores = torch.tensor([1.0, 2.0, 3.0, float("nan"), 1.0, 2.0, 1.0])
    mask = Column(torch.zeros(7, dtype=torch.uint8), (1,) * 7)
    batch = SequenceBatch(ids, {"prompt_mask": mask}).with_scalars("episode", episode)
    rows, stats = rewards_of(batch, scores, PPOConfig(group_size=2, generation_size=4))
    assert [row.sample for row in rows.ids] == [1, 2, 5]
    assert stats["reward"] == (6.0, 3.0) and stats["failed"] == (1.0, 4.0)
    rows, _ = rewards_of(batch, torch.ones(7), PPOConfig(group_size=4, dynamic_sampling=True))
    assert len(rows) == 0
