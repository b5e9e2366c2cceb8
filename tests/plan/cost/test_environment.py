"""The predicted time of rollouts with waits against a simulation of every call."""

import heapq
import random

import pytest

from realhf.api.machine import EnvironmentLoad
from realhf.environments.loading import is_async_class
from realhf.plan.cost.environment import rollout_seconds


def simulated(
    load: EnvironmentLoad, n_episodes: int, n_slots: int, decode_seconds: float, chance: random.Random
) -> float:
    """Play episodes through slots (first in, first out; equal service) and processes, call by call."""
    service = decode_seconds * n_slots / (n_episodes * load.turns)  # of a reply in a slot, all slots busy
    n_open = min(load.max_open, n_episodes)
    slots, processes = [0.0] * n_slots, [0.0] * min(load.concurrency, n_open)
    events = [(0.0, chance.random(), load.turns) for _ in range(n_open)]
    heapq.heapify(events)
    waiting, end = n_episodes - n_open, 0.0
    while events:
        now, _, left = heapq.heappop(events)
        replied = max(now, heapq.heappop(slots)) + service
        heapq.heappush(slots, replied)
        answered = max(replied, heapq.heappop(processes)) + load.latency
        heapq.heappush(processes, answered)
        end = max(end, answered)
        if left > 1:
            heapq.heappush(events, (answered, chance.random(), left - 1))
        elif waiting:
            waiting -= 1
            heapq.heappush(events, (answered, chance.random(), load.turns))
    return end


@pytest.mark.parametrize("seed", range(60))
def test_the_prediction_is_near_a_simulation(seed: int) -> None:
    chance = random.Random(seed)
    n_slots = chance.choice([4, 16, 64])
    n_episodes = n_slots * chance.choice([2, 4, 8])
    load = EnvironmentLoad(
        turns=chance.randint(2, 8),
        latency=chance.choice([0.001, 0.01, 0.1, 1.0]),
        workers=chance.choice([1, 2, 8]),
        per_process=chance.choice([1, 64]),
        max_open=n_slots * chance.choice([1, 2, 8]),
    )
    decode_seconds = chance.choice([0.5, 5.0])
    predicted = rollout_seconds(load, n_episodes, n_slots, decode_seconds)
    found = simulated(load, n_episodes, n_slots, decode_seconds, chance)
    assert 0.6 < predicted / found < 1.3, (load, n_episodes, n_slots, decode_seconds, predicted, found)


CLASSES = """
import realhf.environments.agents as agents
from realhf.environments.agents import AgentEnvironment
class Sync:
    def step(self, reply): ...
class Async:
    async def step(self, reply): ...
class Child(Async): ...
class Agent(AgentEnvironment): ...
class Other(agents.AgentEnvironment): ...
class Loop(Round): ...
class Round(Loop): ...
async def solve(row, base_url): ...
def make(): ...
"""


def test_async_classes_are_found_without_running_them(tmp_path) -> None:
    file = tmp_path / "classes.py"
    file.write_text(CLASSES)
    found = {name: is_async_class(f"{file}:{name}") for name in
             ("Sync", "Async", "Child", "Agent", "Other", "Loop", "solve", "make", "Missing")}  # fmt: skip
    assert [name for name, is_async in found.items() if is_async] == ["Async", "Child", "Agent", "Other", "solve"]
    assert is_async_class("realhf.environments.agents:AgentProgram")
    assert not is_async_class("realhf.environments.tools:CalculatorEnv") and not is_async_class("no.module:Env")
