"""An environment whose calls take time: any reply is answered after a wait, until the last turn."""

import time

from realhf.environments import Reply, Turn


class SlowEnv:
    """Waits ``seconds`` before every answer, as a simulator that computes elsewhere; ends after ``turns`` replies."""

    def __init__(self, seconds: float, turns: int) -> None:
        self.seconds, self.turns = seconds, turns

    def reset(self, row: dict, seed: int) -> Turn:
        self.n_replies = 0
        return Turn()

    def step(self, reply: Reply) -> Turn:
        time.sleep(self.seconds)
        self.n_replies += 1
        return Turn(text="+\n", done=self.n_replies == self.turns)
