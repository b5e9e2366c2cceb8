"""A taskset of verifiers v1 for the tests: one sum per task, with a reward for the right number."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content.strip() == str(task.answer))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(5):
            prompt = f"What is {number} + 10?"
            yield SumTask(SumData(prompt=prompt, system_prompt="Be brief.", answer=number + 10), self.config.task)
