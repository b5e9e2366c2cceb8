"""VinePPO: what a state is worth is found by rolling out from it, so no critic is needed.

Three calls of the graph: ``VineRollouts`` continues answers from where their steps begin, ``VineValues`` has the
continuations judged, ``VineAdvantages`` turns values into advantages of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from realhf.algorithms.policy_gradient.config import PPOConfig, VineConfig
from realhf.algorithms.policy_gradient.verifier import Verifier, VerifierConfig
from realhf.algorithms.reward_model.step_splitter import SPLITTERS
from realhf.algorithms.vineppo.vineppo_formulas import spread_over_tokens, step_advantages, step_starts
from realhf.api.batch_meta import PROMPT, RowId
from realhf.api.config import RewardConfig, opt
from realhf.api.messages import State, Stats
from realhf.data.batch import Column, SequenceBatch
from realhf.data.protocols import Engine, InterfaceContext

MOST_STATES = 1 << 20
"""Of one prompt: states are numbered apart from the prompts of the data."""


@dataclass
class RolloutConfig:
    ppo: PPOConfig = opt(PPOConfig, "sampling of answers, and of rollouts")
    vine: VineConfig = opt(VineConfig, "rollouts")


@dataclass
class _States:
    """Every state of a batch once: its tokens, how many more an answer may have, and its number."""

    prompts: list[Tensor] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    places: dict[tuple[int, bytes], int] = field(default_factory=dict)
    per_prompt: dict[int, int] = field(default_factory=dict)

    def add(self, prompt: int, tokens: Tensor, budget: int) -> int:
        """Return the place of a state of ``prompt``; states with the same tokens are one."""
        key = (prompt, tokens.cpu().numpy().tobytes())
        if key not in self.places:
            self.places[key] = len(self.prompts)
            number = self.per_prompt.get(prompt, 0)
            self.per_prompt[prompt] = number + 1
            assert number < MOST_STATES
            self.prompts.append(tokens)
            self.budgets.append(budget)
            self.numbers.append(prompt * MOST_STATES + number)
        return self.places[key]


class VineRollouts:
    """Draws ``n_rollouts`` continuations from every state, by the policy as it is, apart from what is trained on.

    Reads ``tokens prompt_mask``. Makes, per row: ``state_starts`` (int64, token at which each step begins),
    ``rollouts`` (tokens of all continuations, one after the other), ``rollout_lengths`` and ``rollout_truncated`` (one
    entry each).
    Continuations may be as long as what ``max_new_tokens`` leaves.
    """

    config_type = RolloutConfig

    def __init__(self, config: RolloutConfig, context: InterfaceContext) -> None:
        self.config, self.context = config, context
        self.split = SPLITTERS[config.vine.step_splitter]

    def generate(self, engine: Engine, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        vine, states = self.config.vine, _States()
        starts, places = [], []
        for row, tokens, prompt_mask in zip(batch.ids, *self._rows(batch), strict=True):
            first = int(prompt_mask.sum())
            begins = [first + start for start in self.steps(tokens[first:])]
            starts.append(begins)
            longest = self.config.ppo.gen.max_new_tokens
            places.append(
                [states.add(row.prompt, tokens[:b], longest - (b - first)) for b in begins[: vine.max_states]]
            )
        drawn = self.draw(engine, states, batch["tokens"].device)
        outputs = SequenceBatch(batch.ids, self.columns(batch, starts, places, drawn))
        n_states = float(sum(map(len, places)))
        stats = {
            "states": (n_states, float(max(len(batch), 1))),
            "shared_states": (n_states - len(states.prompts), max(n_states, 1.0)),
            "rollout_length": (float(sum(outputs.lengths("rollouts"))), float(sum(outputs.lengths("rollout_lengths")))),
        }
        return outputs, stats

    def steps(self, answer: Tensor) -> list[int]:
        """Return the tokens of an answer at which its steps begin."""
        return step_starts(self.context.tokenizer, answer.tolist(), self.split)

    def draw(self, engine: Engine, states: _States, device: torch.device) -> SequenceBatch:
        """Return the continuations of all states, those of a state next to each other."""
        ids = tuple(RowId(number, PROMPT) for number in states.numbers)
        prompts = Column.of(states.prompts) if ids else Column(torch.empty(0, dtype=torch.int64, device=device), ())
        budgets = torch.tensor(states.budgets, dtype=torch.int64, device=device)
        batch = SequenceBatch(ids, {"prompts": prompts}).with_scalars("budget", budgets)
        return engine.generate(batch, self.config.ppo.gen, self.config.vine.n_rollouts, self.context.seed + 1)

    def columns(
        self, batch: SequenceBatch, starts: list[list[int]], places: list[list[int]], drawn: SequenceBatch
    ) -> dict[str, Column]:
        """Give every row what was drawn from its states."""
        n, device = self.config.vine.n_rollouts, batch["tokens"].device
        tokens, masks = drawn.columns["tokens"].rows(), drawn.columns["prompt_mask"].rows()
        answers = [row[mask == 0] for row, mask in zip(tokens, masks, strict=True)]
        truncated = drawn["truncated"]
        none = torch.empty(0, dtype=torch.int64, device=device)
        of_row = [[n * place + k for place in own for k in range(n)] for own in places]

        def ragged(rows: Sequence[Tensor]) -> Column:
            return Column(torch.cat([none, *rows]), tuple(map(len, rows)))

        return {
            "state_starts": ragged([torch.tensor(own, dtype=torch.int64, device=device) for own in starts]),
            "rollouts": ragged([torch.cat([none, *(answers[i] for i in own)]) for own in of_row]),
            "rollout_lengths": ragged([torch.tensor([len(answers[i]) for i in own], device=device) for own in of_row]),
            "rollout_truncated": ragged([truncated[own].to(torch.int64) for own in of_row]),
        }

    @staticmethod
    def _rows(batch: SequenceBatch) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return batch.columns["tokens"].rows(), batch.columns["prompt_mask"].rows()


@dataclass
class ValuesConfig:
    reward: RewardConfig = opt(RewardConfig, "the verifier")
    ppo: PPOConfig = opt(PPOConfig, "scaling and bias of rewards")
    vine: VineConfig = opt(VineConfig, "rollouts")


class VineValues:
    """Judges continuations: ``state_values`` of a row are the mean rewards from each of its states.

    Reads what VineRollouts makes, ``tokens prompt_mask row``. A truncated continuation is worth ``wrong_reward``.
    """

    config_type = ValuesConfig

    def __init__(self, config: ValuesConfig, context: InterfaceContext) -> None:
        self.config = config
        all_of_them = replace(config.ppo, generation_size=None, dynamic_sampling=False)
        self.verifier = Verifier(VerifierConfig(config.reward, all_of_them), context)

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        n, rows = self.config.vine.n_rollouts, {k: c.rows() for k, c in batch.columns.items()}
        answers: list[tuple[Tensor, Tensor, Tensor]] = []
        truncated: list[Tensor] = []
        for i in range(len(batch)):
            lengths = rows["rollout_lengths"][i].tolist()
            first = int(rows["prompt_mask"][i].sum())
            for k, rollout in enumerate(rows["rollouts"][i].split(lengths)):
                answer = torch.cat([rows["tokens"][i][: int(rows["state_starts"][i][k // n])], rollout])
                mask = torch.zeros(len(answer), dtype=torch.uint8, device=answer.device)
                mask[:first] = 1
                answers.append((answer, mask, rows["row"][i]))
            truncated.append(rows["rollout_truncated"][i])
        ids = tuple(RowId(i, 0) for i in range(len(answers)))
        keys = ("tokens", "prompt_mask", "row")
        judged = SequenceBatch(
            ids, {k: Column.of(parts) for k, parts in zip(keys, zip(*answers, strict=True), strict=True)}
        )
        scored, stats = self.verifier.inference(None, judged, state) if ids else (judged, {})
        ppo = self.config.ppo
        nothing = (self.config.reward.wrong_reward - ppo.reward_output_bias) * ppo.reward_output_scaling
        rewards = scored["rewards"] if ids else torch.empty(0)
        values = torch.where(torch.cat(truncated).bool(), nothing, rewards).view(-1, n).mean(1) if ids else rewards
        n_states = tuple(len(row) // n for row in rows["rollout_lengths"])
        return SequenceBatch(batch.ids, {"state_values": Column(values, n_states)}), stats


class VineAdvantages:
    """Makes ``advantages`` of tokens. Reads ``prompt_mask rewards truncated state_starts state_values``."""

    config_type = PPOConfig

    def __init__(self, config: PPOConfig, context: InterfaceContext) -> None:
        self.config = config

    def inference(self, engine: Engine | None, batch: SequenceBatch, state: State) -> tuple[SequenceBatch, Stats]:
        clip, found = self.config.max_reward_clip, []
        rewards = batch["rewards"].clamp(-clip, clip)
        if self.config.mask_no_eos_with_zero:
            rewards = rewards.masked_fill(batch["truncated"].bool(), 0.0)
        starts, values = (batch.columns[key].rows() for key in ("state_starts", "state_values"))
        for length, reward, begins, known in zip(
            batch.lengths("prompt_mask"), rewards.tolist(), starts, values, strict=True
        ):
            per_step = step_advantages(known.tolist(), reward, len(begins))
            found.append(spread_over_tokens(per_step, begins.tolist(), length, length))
        device = batch["prompt_mask"].device
        data = torch.cat([torch.empty(0), *found]).to(device)
        return SequenceBatch(batch.ids, {"advantages": Column(data, batch.lengths("prompt_mask"))}), {}
