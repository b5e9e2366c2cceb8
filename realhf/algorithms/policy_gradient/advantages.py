"""Advantage estimators, the values of ``ppo.advantage``. Imports no torch: options are checked without it.

Scores are ``[B]``, one per response; rows with the same number in ``group_of_row`` are responses to the same prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from realhf.algorithms.policy_gradient.components import Component
from realhf.api.config import KLPlace, opt
from realhf.api.config.option import FRACTION

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.algorithms.policy_gradient.config import PPOConfig
    from realhf.data.batch import SequenceBatch
    from realhf.ops.rows import PackedRows

GROUP_EPS = 1e-5


class GroupStd(Enum):
    population = "population"
    sample = "sample"
    none = "none"


@dataclass
class GroupOptions:
    std: GroupStd = opt(GroupStd.population, "divisor: population or sample standard deviation, or none (Dr. GRPO)")


@dataclass
class TurnOptions:
    std: GroupStd = opt(GroupStd.population, "divisor: population or sample standard deviation, or none")
    discount: float = opt(1.0, "discount of the rewards of later turns", FRACTION)


@dataclass(frozen=True)
class AdvantageInputs:
    """The rows of a training batch. ``rewards`` and ``values`` are ``[T]``, ``row_of_token`` is ``[T]`` int64.

    ``rows`` has all tokens of responses, ``trained`` those that the loss reads. ``lambdas`` are those of GAE, per row.
    """

    batch: SequenceBatch
    rewards: Tensor
    values: Tensor
    rows: PackedRows
    trained: PackedRows
    row_of_token: Tensor
    discount: float
    lambdas: Sequence[float]

    @property
    def groups(self) -> list[int]:
        """A number for each row, equal in responses to a prompt; one that is not trained on is a group of its own."""
        pairs = zip(self.batch.ids, self.trained.counts.tolist(), strict=True)
        return [row.prompt if count else -1 - i for i, (row, count) in enumerate(pairs)]

    @property
    def scores(self) -> Tensor:
        """Return of each response, ``[B]``."""
        return self.rows.sums(self.rewards)

    def of_episodes(self, estimate: Callable[[Tensor, Sequence[int]], Tensor]) -> Advantages:
        """Return estimates for the scores ``[E]`` and groups of episodes, and the scores of rows, at the rows' tokens.

        An episode with several rows counts once: its score is their mean.
        """
        episode_of = episode_numbers(self.batch)
        sums, sizes = group_sums(self.scores, episode_of)
        pairs = zip(episode_of, self.groups, strict=True)
        groups = dict(sorted(pairs, key=lambda one: one[1]))  # the prompt's, if a row is trained on
        scores = (sums / sizes)[first_rows(episode_of)].to(self.scores.dtype)
        advantages = estimate(scores, [groups[number] for number in range(len(scores))])
        return self.per_token(advantages[episode_of])

    def per_token(self, advantages_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the advantages and the scores of the rows at all their tokens, ``[T]`` each."""
        return advantages_B[self.row_of_token], self.scores[self.row_of_token]


Advantages = tuple["Tensor", "Tensor"]
"""Advantages and returns of actions, ``[T]`` each."""


def gae(x: AdvantageInputs, _: None) -> Advantages:
    """Apply GAE to sampled tokens; the state before one is that after the token before it, sampled or not."""
    from realhf.ops.gae import gae_1d_nolp_misalign, packed_gae

    if len(set(x.lambdas)) > 1:
        return gae_of_each_lambda(x)
    gae_lambda = x.lambdas[0] if x.lambdas else 1.0
    if "turn_rewards" in x.batch.columns:
        at, counts = x.rows.mask.nonzero().flatten(), [int(count) for count in x.rows.counts.tolist()]
        ends = zip((at - 1).split(counts), x.rows.last, strict=True)
        states = x.values[[index for before, last in ends for index in (*before.tolist(), int(last))]]
        bootstrap = x.batch["truncated"].bool()
        found = gae_1d_nolp_misalign(x.rewards[at], states, counts, bootstrap, x.discount, gae_lambda)
        advantages, returns = (x.values.new_zeros(len(x.values)).index_copy(0, at, some) for some in found)
        return advantages, returns
    return packed_gae(x.rewards, x.values, x.rows.lengths, x.batch["truncated"].bool(), x.discount, gae_lambda)


def gae_of_each_lambda(x: AdvantageInputs) -> Advantages:
    """Apply GAE to the rows of single responses with each lambda."""
    from realhf.ops.gae import packed_gae

    found = x.values.new_zeros(2, len(x.values))
    truncated = x.batch["truncated"].bool()
    for gae_lambda in sorted(set(x.lambdas)):
        is_row = truncated.new_tensor([one == gae_lambda for one in x.lambdas])
        at = is_row[x.row_of_token]
        lengths = [n for n, taken in zip(x.rows.lengths, is_row.tolist(), strict=True) if taken]
        parts = packed_gae(x.rewards[at], x.values[at], lengths, truncated[is_row], x.discount, gae_lambda)
        found[0, at], found[1, at] = parts
    return found[0], found[1]


def group(x: AdvantageInputs, options: GroupOptions) -> Advantages:
    return x.of_episodes(lambda scores, groups: group_advantages(scores, groups, options.std))


def rloo(x: AdvantageInputs, _: None) -> Advantages:
    return x.of_episodes(leave_one_out)


def gdpo(x: AdvantageInputs, _: None) -> Advantages:
    """Return the weighted sum of the scores of each reward, each normalised over the group by itself.

    A reward with small differences counts as much as one with large differences. The column ``reward_parts`` has the
    weights of the rewards, then the scores.
    """
    width = next(iter(x.batch.lengths("reward_parts")), 2)
    weights, scores = x.batch["reward_parts"].view(-1, width).chunk(2, 1)
    columns = [group_advantages(column, x.groups, GroupStd.population) for column in scores.unbind(1)]
    parts = (weight * column for weight, column in zip(weights.unbind(1), columns, strict=True))
    return x.per_token(sum(parts, scores.new_zeros(len(scores))))


def opo(x: AdvantageInputs, _: None) -> Advantages:
    """Subtract the group's mean score weighted by lengths: of least variance if gradients of tokens are independent."""
    episode_of = episode_numbers(x.batch)
    lengths = group_sums(x.rows.counts, episode_of)[0][first_rows(episode_of)]
    return x.of_episodes(lambda scores, groups: scores - length_weighted_mean(scores, lengths, groups))


def turn(x: AdvantageInputs, options: TurnOptions) -> Advantages:
    """Normalise the return from each turn on over the turns of the same number in the group.

    A turn is a run of sampled tokens; its reward is the sum over them.
    """
    mask = x.rows.mask
    starts = mask & ~mask.roll(1)  # a row's first token is not sampled
    number_of = (starts.cumsum(0) - 1)[mask]
    rows, indices, returns = x.row_of_token[starts].tolist(), list[int](), list[float]()
    for i, row in enumerate(rows):
        indices.append(indices[-1] + 1 if i and rows[i - 1] == row else 0)
    rewards = x.rewards.double().new_zeros(len(rows)).index_add(0, number_of, x.rewards[mask].double()).tolist()
    for i in reversed(range(len(rows))):
        has_next = i + 1 < len(rows) and rows[i + 1] == rows[i]
        returns.append(rewards[i] + (options.discount * returns[-1] if has_next else 0.0))
    groups = dict[tuple[int, int], int]()
    group_of = x.groups
    numbers = [groups.setdefault((group_of[row], i), len(groups)) for row, i in zip(rows, indices, strict=True)]
    scores = x.rewards.double().new_tensor(returns[::-1])
    advantages = group_advantages(scores, numbers, options.std)
    whole = [x.rewards.new_zeros(len(mask)), x.rewards.new_zeros(len(mask))]
    for column, values in zip(whole, (advantages, scores), strict=True):
        column[mask] = values.to(column.dtype)[number_of]
    return whole[0], whole[1]


def greedy_baseline(x: AdvantageInputs, _: None) -> Advantages:
    return x.per_token(x.scores - x.batch["baseline"])


def precomputed(x: AdvantageInputs, _: None) -> Advantages:
    return x.batch["advantages"], x.scores[x.row_of_token]


def process(x: AdvantageInputs, _: None) -> Advantages:
    """Return the sum of the normalised step rewards from each token on; ``step_rewards`` is -1 except at step ends.

    All step rewards of a group are normalised together, by their population standard deviation.
    """
    rewards = x.batch["step_rewards"]
    result = rewards.double().new_zeros(len(rewards))
    groups = x.row_of_token.new_tensor(x.groups)[x.row_of_token]
    for number in sorted(set(x.groups)):
        at = (rewards >= 0) & (groups == number)
        steps = rewards[at].double()
        if len(steps) and steps.min() < steps.max():
            result[at] = (steps - steps.mean()) / (steps.std(correction=0) + GROUP_EPS)
    for row in result.split(x.rows.lengths):
        row.copy_(row.flip(0).cumsum(0).flip(0))
    return result.to(rewards.dtype), x.scores[x.row_of_token]


def check_no_critic(ppo: PPOConfig) -> list[str]:
    problem = f"ppo.advantage={ppo.advantage.value} uses no critic: set ppo.disable_value=True"
    return [] if ppo.disable_value else [problem]


def check_group(ppo: PPOConfig) -> list[str]:
    options = [name for name, n in (("group_size", ppo.group_size), ("gen.keep_first", ppo.gen.keep_first)) if n == 1]
    name = f"ppo.advantage={ppo.advantage.value}"
    return [f"{name} compares responses: it needs ppo.{option} > 1" for option in options] + check_no_critic(ppo)


def check_gdpo(ppo: PPOConfig) -> list[str]:
    unread = {"ppo.kl_in=reward": ppo.kl_in is KLPlace.reward and ppo.kl_ctl > 0,
              "ppo.length_penalty": ppo.length_penalty.value != "none",
              "ppo.overlong_buffer": ppo.overlong_buffer > 0,
              "ppo.mask_no_eos_with_zero": ppo.mask_no_eos_with_zero}  # fmt: skip
    problems = [f"ppo.advantage=gdpo reads the scores of each reward, and not {name}" for name, is_set in unread.items()
                if is_set]  # fmt: skip
    return problems + check_group(ppo)


ADVANTAGES: dict[str, Component[AdvantageInputs, Advantages]] = {
    "gae": Component(gae, "generalised advantage estimation (arXiv 1506.02438, eq. 16)"),
    "group": Component(group, "score normalised over the group (GRPO, arXiv 2402.03300, sec. 4.1.2)",
                       GroupOptions, check_group),
    "gdpo": Component(gdpo, "each of several rewards normalised over the group, then summed (GDPO, arXiv 2601.05242)",
                      check=check_gdpo),
    "turn": Component(turn, "return from each turn on, normalised over the group by turn (MT-GRPO, arXiv 2505.11821)",
                      TurnOptions, check_group),
    "rloo": Component(rloo, "leave-one-out baseline (RLOO, arXiv 2402.14740, sec. 3.2)", check=check_group),
    "opo": Component(opo, "baseline weighted by lengths (OPO, arXiv 2505.23585)", check=check_group),
    "greedy_baseline": Component(greedy_baseline, "reward of the greedy response as baseline (ReMax, arXiv 2310.10505)",
                                 check=check_no_critic),
    "precomputed": Component(precomputed, "column 'advantages' of the graph (VinePPO, arXiv 2410.01679)",
                             check=check_no_critic),
    "process": Component(process, "normalised step rewards (GRPO with a PRM, arXiv 2402.03300, sec. 4.1.3)",
                         check=check_no_critic),
}  # fmt: skip


def episode_numbers(batch: SequenceBatch) -> list[int]:
    """Return a number for each row, from 0 in order of first rows, equal in the rows of an episode."""
    samples = batch["episode"].tolist() if "episode" in batch.columns else [row.sample for row in batch.ids]
    numbers = dict[tuple[int, int], int]()
    return [numbers.setdefault((row.prompt, n), len(numbers)) for row, n in zip(batch.ids, samples, strict=True)]


def first_rows(episode_of: Sequence[int]) -> list[int]:
    """Return the first row of each episode."""
    last_seen = dict(zip(reversed(episode_of), reversed(range(len(episode_of))), strict=True))
    return [last_seen[number] for number in range(len(last_seen))]


def group_advantages(scores: Tensor, group_of_row: Sequence[int], std: GroupStd) -> Tensor:
    """Return ``(score - mean of the group) / (std of the group + 1e-5)``, ``[B]`` in the dtype of ``scores``.

    ``population`` divides squares by n, ``sample`` by n - 1; ``none`` only subtracts the mean (Dr. GRPO, arXiv
    2503.20783). The advantage is 0 in groups of one and in groups whose scores are all equal.
    """
    sums, sizes = group_sums(scores, group_of_row)
    centred = scores.double() - sums / sizes
    if std is not GroupStd.none:
        squares, _ = group_sums(centred.square(), group_of_row)
        variance = squares / (sizes if std is GroupStd.population else (sizes - 1).clamp(min=1.0))
        centred = centred / (variance.sqrt() + GROUP_EPS)
    is_equal = scores.new_tensor(equal_in_group(scores, group_of_row)).bool()
    return centred.masked_fill(is_equal, 0.0).to(scores.dtype)


def leave_one_out(scores: Tensor, group_of_row: Sequence[int]) -> Tensor:
    """Return the score minus the mean of the group's other scores, ``[B]``; 0 in groups of one."""
    sums, sizes = group_sums(scores, group_of_row)
    others = (sums - scores.double()) / (sizes - 1).clamp(min=1.0)
    return (scores.double() - others).masked_fill(sizes == 1, 0.0).to(scores.dtype)


def length_weighted_mean(scores: Tensor, lengths: Tensor, group_of_row: Sequence[int]) -> Tensor:
    """Return the mean of each row's group, ``[B]``, in which a score counts as often as its response has tokens."""
    totals, _ = group_sums(scores.double() * lengths, group_of_row)
    weights, _ = group_sums(lengths, group_of_row)
    return (totals / weights.clamp(min=1.0)).to(scores.dtype)


def group_sums(scores: Tensor, group_of_row: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the sum and the size of each row's group, ``[B]`` float64. Adds in the order of rows, on the CPU."""
    sums, sizes = dict.fromkeys(group_of_row, 0.0), Counter(group_of_row)
    for number, score in zip(group_of_row, scores.double().tolist(), strict=True):
        sums[number] += score
    new = scores.double().new_tensor
    return new([sums[number] for number in group_of_row]), new([float(sizes[number]) for number in group_of_row])


def equal_in_group(scores: Tensor, group_of_row: Sequence[int]) -> list[bool]:
    """Return for each row whether all scores of its group are equal."""
    distinct: dict[int, set[float]] = {}
    for number, score in zip(group_of_row, scores.tolist(), strict=True):
        distinct.setdefault(number, set()).add(score)
    return [len(distinct[number]) == 1 for number in group_of_row]
