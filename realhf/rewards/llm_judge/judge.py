"""The judge behind the presets that ask a language model: scores groups of responses."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realhf.api.config import LLMJudgeConfig
from realhf.rewards.llm_judge.chat_client import ChatClient, ChatError, ChatUsage
from realhf.rewards.llm_judge.questions import AGAIN, Question, questions_of, reader_of, scores_of, template_of
from realhf.rewards.llm_judge.reply_cache import ReplyCache, Spending
from realhf.rewards.verdict import ResponseGroup, Status, Verdict


@dataclass
class LLMJudge:
    """Scores with the preset ``rubric`` or ``pairwise``; ``folder`` is that of the run for its spending and replies.

    A response without any answered question has an error. UserError if the budget is exhausted. ``usage`` is that of
    the last call.
    """

    preset: str
    config: LLMJudgeConfig
    folder: Path

    def __post_init__(self) -> None:
        self.template = template_of(self.preset, self.config)
        self.cache = ReplyCache(Path(self.config.cache) if self.config.cache else self.folder / "replies")
        self.spending = Spending(self.folder)
        self.usage = ChatUsage(self.config.price_in, self.config.price_out)

    def judge_groups(self, groups: Sequence[ResponseGroup]) -> list[list[Verdict]]:
        """Return the verdicts on the responses of each group, in order."""
        return asyncio.run(self._judge_all(groups))

    async def _judge_all(self, groups: Sequence[ResponseGroup]) -> list[list[Verdict]]:
        key = os.environ.get(self.config.api_key_env, "") if self.config.api_key_env else ""
        client = ChatClient(self.config, self.cache, self.spending, key)
        self.usage = client.usage
        open_groups = asyncio.Semaphore(2 * self.config.max_concurrency)  # bounds the texts in memory

        async def judge(group: ResponseGroup) -> list[Verdict]:
            async with open_groups:
                return await self._judge(client, group)

        try:
            found = await asyncio.gather(*map(judge, groups), return_exceptions=True)
        finally:
            await client.close()
        verdicts = []
        for verdict in found:  # requests in progress have ended, so that their cost is counted
            if isinstance(verdict, BaseException):
                raise verdict
            verdicts.append(verdict)
        return verdicts

    async def _judge(self, client: ChatClient, group: ResponseGroup) -> list[Verdict]:
        n = len(group.responses)
        try:
            questions = questions_of(self.preset, group, self.config, self.template)
        except ValueError as error:
            return [Verdict(0.0, Status.error, str(error))] * n
        answers = await asyncio.gather(*(self._value(client, one, group) for one in questions), return_exceptions=True)
        values: list[float | None] = []
        problems: dict[int, str] = {}
        for question, answer in zip(questions, answers, strict=True):
            if isinstance(answer, ChatError):
                problems |= {i: str(answer) for i in question.about if i not in problems}
            elif isinstance(answer, BaseException):
                raise answer
            values.append(None if isinstance(answer, ChatError) else answer)
        return [
            Verdict(0.0, Status.error, problems.get(i, "no other response to compare with"))
            if score is None else Verdict(score, Status.ok)
            for i, score in enumerate(scores_of(n, questions, values))
        ]  # fmt: skip

    async def _value(self, client: ChatClient, question: Question, group: ResponseGroup) -> float:
        if question.value is not None:
            return question.value
        again = AGAIN.replace("{what}", "winner" if self.preset == "pairwise" else "score")
        asked_by = f"{self.folder}#{group.prompt_id}"
        return await client.value(question.text, reader_of(self.preset, self.config), again, asked_by)
