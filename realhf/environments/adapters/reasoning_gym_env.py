"""Tasks of reasoning-gym: one question, one reply, and the library's score."""

from collections.abc import Mapping
from typing import Any

from realhf.base.errors import UserError, did_you_mean
from realhf.environments.adapters.common import final_turn, observation_turn, optional_library, row_number
from realhf.environments.types import Reply, Turn


class ReasoningGymEnv:
    """One task of reasoning-gym. The reward of the reply is ``score_answer``, normally in [0, 1].

    ``config`` has the task's options. ``index`` of a row, or else the seed, picks the question. With ``answer_tag``
    the last ``<TAG>...</TAG>`` of a reply is its answer, and a reply without one scores as no answer; an empty
    ``answer_tag`` scores the whole reply. ``instruction`` is put before the question.
    """

    def __init__(
        self,
        task: str,
        config: Mapping[str, Any] | None = None,
        answer_tag: str = "answer",
        instruction: str = "Give your final answer between <answer> and </answer> tags.",
        chat: bool = True,
    ) -> None:
        self.task, self.config, self.answer_tag = task, dict(config or {}), answer_tag
        self.instruction, self.chat = instruction if answer_tag else "", chat

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        with optional_library("reasoning_gym", "reasoning-gym", "ReasoningGymEnv"):
            from reasoning_gym.factory import DATASETS, create_dataset

        if self.task not in DATASETS:
            hint = did_you_mean(self.task, DATASETS)
            raise UserError(f"env.options.task={self.task!r} is not a task of reasoning-gym{hint}")
        # Entry i of almost every data set has the seed seed + i, so a data set of one entry stands for all of them.
        config = {
            **self.config,
            "seed": int(self.config.get("seed", 0)) + row_number(row, abs(seed)) % 2**31,
            "size": 1,
        }
        try:
            self._data = create_dataset(self.task, **config)
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(f"env.options.config={self.config!r:.200} of task {self.task!r}: {error}") from error
        self._entry = self._data[0]
        question = str(self._entry["question"])
        return observation_turn(f"{self.instruction}\n\n{question}" if self.instruction else question, self.chat)

    def step(self, reply: Reply) -> Turn:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(reply.text, self.answer_tag) if self.answer_tag else reply.text.strip()
        score = float(self._data.score_answer(answer, self._entry))
        return final_turn("", self.chat, score, {"score": score, "no_answer": int(answer is None)})
