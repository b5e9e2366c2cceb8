"""An environment of verifiers v1 for the tests: it answers each guess of a number, without end of tasks."""

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        for number in itertools.count():
            yield GuessTask(GuessData(prompt="Guess my number.", secret=number * 7 % 10), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    log: str = ""
    """A file that gets a line for every start and end of the servers."""
    is_broken: bool = False


class GuessEnv(vf.Env[GuessConfig]):
    def write(self, line: str) -> None:
        if self.config.log:
            with open(self.config.log, "a") as file:
                file.write(f"{line}\n")

    async def start(self) -> None:
        self.write("start")
        if self.config.is_broken:
            raise ValueError("the servers are broken")

    async def stop(self) -> None:
        self.write("stop")

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        won = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(3):
                if segment.terminated:
                    break
                won = segment.last_reply.strip() == str(task.data.secret)
                if won:
                    break
                segment = await interaction.turn("wrong")
        interaction.trace.record_reward("won", float(won))
