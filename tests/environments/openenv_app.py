"""Serves an environment with OpenEnv's own server for the tests: the folder of its template, or a game of this file."""

import importlib
import random
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    hint: str


class GuessGame(Environment):
    """Guess a number from 0 to 9 that comes from the seed, in three turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> GuessObservation:
        self.secret, self.count = random.Random(seed).randrange(10), 0
        return GuessObservation(hint="guess", reward=0.0, done=False)

    def step(self, action: GuessAction, **_: Any) -> GuessObservation:  # type: ignore[override]
        self.count += 1
        right = action.guess == self.secret
        hint = "right" if right else "lower" if action.guess > self.secret else "higher"
        return GuessObservation(hint=hint, reward=float(right), done=right or self.count == 3)

    @property
    def state(self) -> State:
        return State(step_count=self.count)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.path.insert(0, str(Path(sys.argv[1]).parent))
        app = importlib.import_module(f"{Path(sys.argv[1]).name}.server.app").app
    else:
        app = create_fastapi_app(GuessGame, GuessAction, GuessObservation, max_concurrent_envs=8)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
