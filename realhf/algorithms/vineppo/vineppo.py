"""The interfaces of VinePPO, which estimates the values of intermediate states by Monte Carlo rollouts.

Kazemnejad et al. 2024, arXiv 2410.01679. A response has K steps; state k precedes step k (0-based).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PPOConfig, VineConfig
from realhf.algorithms.policy_gradient.ppo_formulas import outcome_rewards
from realhf.algorithms.policy_gradient.verifier import Verifier, VerifierConfig
from realhf.algorithms.reward_model.step_splitter import SPLITTERS, step_starts
from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import RewardConfig, opt
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext
from realhf.ops.rows import PackedRows

MAX_STATES = 1 << 20  # per prompt; the prompt number of state k of prompt p is p * MAX_STATES + k


@dataclass
class RolloutConfig:
    ppo: PPOConfig = opt(PPOConfig, "sampling of responses, and of rollouts")
    vine: VineConfig = opt(VineConfig, "rollouts")


@dataclass
class _States:
    """The distinct states of a batch: their ids, their tokens, and the maximum length of their continuations."""

    ids: list[RowId] = field(default_factory=list)
    prompts: list[Tensor] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    indices: dict[tuple[int, bytes], int] = field(default_factory=dict)
    per_prompt: Counter[int] = field(default_factory=Counter)

    def add(self, prompt: int, tokens: Tensor, budget: int) -> int:
        """Return the index of a state of ``prompt``; states with equal tokens share an index."""
        key = (prompt, tokens.cpu().numpy().tobytes())
        if key not in self.indices:
            self.indices[key] = len(self.prompts)
            assert self.per_prompt[prompt] < MAX_STATES
            self.ids.append(RowId(prompt * MAX_STATES + self.per_prompt[prompt], PROMPT))
            self.per_prompt[prompt] += 1
            self.prompts.append(tokens)
            self.budgets.append(budget)
        return self.indices[key]


class VineRollouts:
    """Samples ``n_rollouts`` continuations from every state with the current policy; they are not trained on.

    Reads ``tokens prompt_mask``. Returns per row: ``state_starts`` (int64, first token of each step), ``rollouts``
    (concatenated tokens of all continuations), ``rollout_lengths`` and ``rollout_truncated`` (one entry each). A
    response and its continuation have at most ``max_new_tokens`` tokens together.
    """

    config_type = RolloutConfig

    def __init__(self, config: RolloutConfig, context: InterfaceContext) -> None:
        self.config, self.context = config, context
        self.split = SPLITTERS[config.vine.step_splitter]

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        longest, max_states, states = self.config.ppo.gen.max_new_tokens, self.config.vine.max_states, _States()
        starts_of_row = step_starts(batch, self.context.tokenizer, self.split)
        states_of_row = [
            [states.add(row.prompt, tokens[:at], longest - (at - starts[0])) for at in starts[:max_states]]
            for row, tokens, starts in zip(batch.ids, batch.columns["tokens"].rows(), starts_of_row, strict=True)
        ]
        sampled = self.sample(engine, states, batch["tokens"].device)
        outputs = SequenceBatch(batch.ids, self.columns(starts_of_row, states_of_row, sampled))
        n_states = float(sum(map(len, states_of_row)))
        stats = {
            "states": (n_states, float(max(len(batch), 1))),
            "shared_states": (n_states - len(states.prompts), max(n_states, 1.0)),
            "rollout_length": (float(sum(outputs.lengths("rollouts"))), float(sum(outputs.lengths("rollout_lengths")))),
        }
        return outputs, stats

    def sample(self, engine: Engine, states: _States, device: torch.device) -> SequenceBatch:
        """Return ``n_rollouts`` adjacent rows per state."""
        ids = tuple(states.ids)
        prompts = Column.of(states.prompts) if ids else Column(torch.empty(0, dtype=torch.int64, device=device), ())
        budgets = torch.tensor(states.budgets, dtype=torch.int64, device=device)
        batch = SequenceBatch(ids, {"prompts": prompts}).with_scalars("budget", budgets)
        sampling = replace(self.config.ppo.gen, keep_first=None)
        return engine.generate(batch, sampling, self.config.vine.n_rollouts, self.context.seed + 1)

    def columns(self, starts: list[list[int]], states: list[list[int]], sampled: SequenceBatch) -> dict[str, Column]:
        """Return the output columns; row i has the steps ``starts[i]`` and the state indices ``states[i]``."""
        n, tokens, masks = self.config.vine.n_rollouts, sampled["tokens"], sampled.columns["prompt_mask"]
        responses = Column(tokens[masks.data == 0], tuple(int((mask == 0).sum()) for mask in masks.rows()))
        index = [n * state + k for own in states for state in own for k in range(n)]
        rollouts, per_row = responses.select(index), tuple(n * len(own) for own in states)
        lengths = Column(torch.tensor(rollouts.lengths, dtype=torch.int64, device=tokens.device), per_row)
        flat_starts = torch.tensor(list(chain(*starts)), dtype=torch.int64, device=tokens.device)
        return {
            "state_starts": Column(flat_starts, tuple(map(len, starts))),
            "rollouts": Column(rollouts.data, tuple(int(row.sum()) for row in lengths.rows())),
            "rollout_lengths": lengths,
            "rollout_truncated": Column(sampled["truncated"][index].to(torch.int64), per_row),
        }


@dataclass
class ValuesConfig:
    reward: RewardConfig = opt(RewardConfig, "the verifier")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards")
    vine: VineConfig = opt(VineConfig, "rollouts")


class VineValues:
    """Verifies continuations: ``state_values`` of a row are the mean rewards from each of its states.

    Reads the outputs of VineRollouts and ``tokens prompt_mask row``. Truncated continuations get ``wrong_reward``, and
    rewards are clipped and penalised as those of responses. Drops responses with a state without any reward.
    """

    config_type = ValuesConfig

    def __init__(self, config: ValuesConfig, context: InterfaceContext) -> None:
        self.config = config
        unfiltered = replace(config.ppo, generation_size=None, dynamic_sampling=False)
        self.verifier = Verifier(VerifierConfig(config.reward, unfiltered), context)

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        n, rows = self.config.vine.n_rollouts, {k: c.rows() for k, c in batch.columns.items()}
        responses: list[tuple[Tensor, Tensor, Tensor]] = []
        for i in range(len(batch)):
            first = int(rows["prompt_mask"][i].sum())
            for k, rollout in enumerate(rows["rollouts"][i].split(rows["rollout_lengths"][i].tolist())):
                tokens = torch.cat([rows["tokens"][i][: int(rows["state_starts"][i][k // n])], rollout])
                mask = (torch.arange(len(tokens), device=tokens.device) < first).byte()
                responses.append((tokens, mask, rows["row"][i]))
        values, stats = torch.empty(0), Stats()
        if responses:
            columns = zip(("tokens", "prompt_mask", "row"), zip(*responses, strict=True), strict=True)
            ids = tuple(RowId(i, 0) for i in range(len(responses)))
            verified = SequenceBatch(ids, {key: Column.of(parts) for key, parts in columns})
            scored, stats = self.verifier.inference(None, verified, state)
            ppo = self.config.ppo
            wrong = (self.config.reward.wrong_reward - ppo.reward_output_bias) * ppo.reward_output_scaling
            truncated = torch.cat(rows["rollout_truncated"]).bool()
            rewards = scored["rewards"].new_full((len(responses),), torch.nan)
            rewards[[row.prompt for row in scored.ids]] = scored["rewards"]
            lengths = torch.stack([(mask == 0).sum() for _, mask, _ in responses])
            rewards = outcome_rewards(torch.where(truncated, wrong, rewards), truncated, lengths, ppo)
            values = rewards.view(-1, n).nanmean(1)
        result = Column(values, tuple(len(row) // n for row in rows["rollout_lengths"]))
        judged = [i for i, row in enumerate(result.rows()) if row.isfinite().all()]
        return SequenceBatch(batch.ids, {"state_values": result}).select(judged), stats


class VineAdvantages:
    """Returns ``advantages`` of tokens. Reads ``prompt_mask rewards truncated state_starts state_values``."""

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        lengths = batch.lengths("prompt_mask")
        n_tokens = PackedRows(batch["prompt_mask"] == 0, lengths).counts
        rewards = outcome_rewards(batch["rewards"], batch["truncated"], n_tokens, self.config)
        columns = (batch.columns[key].rows() for key in ("state_starts", "state_values"))
        advantages = [torch.empty(0)]
        for length, reward, starts, values in zip(lengths, rewards.tolist(), *columns, strict=True):
            per_step = step_advantages(values.tolist(), reward, len(starts))
            advantages.append(spread_over_tokens(per_step, starts.tolist(), length))
        data = torch.cat(advantages).to(batch["prompt_mask"].device)
        return SequenceBatch(batch.ids, {"advantages": Column(data, lengths)}), {}


def step_advantages(values: Sequence[float], reward: float, n_steps: int) -> list[float]:
    """Return ``A_k = r_k + V(s_{k+1}) - V(s_k)`` for ``n_steps`` steps; only the last r is not 0, and V is 0 after it.

    ``values`` belong to the first states. The value of later states is ``reward``, so that steps between them have
    advantage 0. ValueError for a value that is not finite.
    """
    if not all(map(math.isfinite, values)):
        raise ValueError(f"state values must be finite, got {list(values)}")
    filled = [*values, *[reward] * (n_steps - len(values)), reward]  # the last step has V = 0 and r = reward
    return [next_value - value for value, next_value in pairwise(filled)]


def spread_over_tokens(per_step: Sequence[float], starts: Sequence[int], length: int) -> Tensor:
    """Return each step's value at all of its tokens, ``[length]`` float32; 0 before the first step."""
    sizes = torch.tensor([0, *starts, length]).diff()
    return torch.tensor([0.0, *per_step], dtype=torch.float32).repeat_interleave(sizes)
