"""A taskset of verifiers v1 for the tests: the model must call a tool to know the answer."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]


class LookupToolset(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def lookup(self, key: str) -> str:
        """Return the value of a key."""
        return {"a": "17", "b": "23"}[key]


class LookupData(vf.TaskData):
    answer: str


class LookupTask(vf.Task[LookupData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [LookupToolset(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def correct(self, task: LookupData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class LookupTaskset(vf.Taskset[LookupTask, vf.TasksetConfig]):
    def load(self) -> Iterator[LookupTask]:
        for key, answer in (("a", "17"), ("b", "23")):
            yield LookupTask(LookupData(prompt=f"What is the value of {key}?", answer=answer), self.config.task)


if __name__ == "__main__":
    LookupToolset.run()
