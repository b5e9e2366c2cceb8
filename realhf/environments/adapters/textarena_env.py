"""Games of TextArena: alone, or against built-in opponents."""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from realhf.base.errors import UserError, did_you_mean
from realhf.environments.adapters.common import final_turn, observation_turn, optional_library
from realhf.environments.types import Reply, Turn

LISTED = re.compile(r"(?i)\b(?:available|valid|legal)\b[^:]*:")
BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
MAX_OPPONENT_MOVES = 1000
"""Moves of opponents between two replies, after which a game has failed."""


class TextArenaEnv:
    """A game of ``textarena.make``. The reply's text is the action, and the game's reward comes at its end.

    ``make`` has options of the game. With several ``players`` the model is ``player``, and ``opponent`` plays the
    others: ``random`` picks among the moves in brackets that the last observation lists as available or valid,
    ``first`` takes the first of them, and any other text is played as it is.
    """

    def __init__(
        self,
        id: str,
        make: Mapping[str, Any] | None = None,
        players: int = 1,
        player: int = 0,
        opponent: str = "random",
        chat: bool = True,
    ) -> None:
        if not 0 <= player < players:
            raise UserError(f"env.options.player={player} is not below env.options.players={players}")
        self.id, self.make, self.players = id, dict(make or {}), players
        self.player, self.opponent, self.chat = player, opponent, chat
        self._env: Any = None
        self._random_state: tuple[Any, ...] = ()
        self._n_invalid = 0

    def reset(self, row: dict[str, Any], seed: int) -> Turn:
        with optional_library("textarena", "textarena", "TextArenaEnv"):
            import textarena

        known = vars(textarena.envs.registration)["ENV_REGISTRY"]
        if self.id not in known:
            raise UserError(f"env.options.id={self.id!r} is not a game of TextArena{did_you_mean(self.id, known)}")
        self._chance, self._n_invalid = random.Random(seed), 0
        self._random_state = random.Random(seed).getstate()
        return self._with_own_randomness(lambda: self._start(textarena, seed))

    def step(self, reply: Reply) -> Turn:
        return self._with_own_randomness(lambda: self._answer(reply.text))

    def close(self) -> None:
        """Forget the game; it holds no other resources."""
        self._env = None

    def _with_own_randomness(self, play: Callable[[], Turn]) -> Turn:
        """Run a part of the game with the random state of this episode: games share the module ``random``."""
        state = random.getstate()
        random.setstate(self._random_state)
        try:
            return play()
        finally:
            self._random_state = random.getstate()
            random.setstate(state)

    def _start(self, textarena: Any, seed: int) -> Turn:
        try:
            self._env = textarena.make(self.id, **self.make)
            self._env.reset(num_players=self.players, seed=seed)
        except (AssertionError, TypeError) as error:
            options = f"env.options.id={self.id!r} with players={self.players}, make={self.make!r:.100}"
            raise UserError(f"{options}: TextArena cannot start the game: {error}") from error
        return self._until_own_turn(False)

    def _answer(self, text: str) -> Turn:
        state = self._env.state
        errors = getattr(state, "error_count", 0)
        done, _ = self._env.step(action=text)
        invalid = getattr(state, "error_count", 0) > errors or self._lost_by_invalid_move()
        self._n_invalid += invalid
        return self._until_own_turn(bool(done))

    def _until_own_turn(self, done: bool) -> Turn:
        for _ in range(MAX_OPPONENT_MOVES):
            if done:
                return self._end()
            player, observation = self._env.get_observation()
            if player == self.player:
                return observation_turn(observed(observation), self.chat, info=self._info())
            done, _ = self._env.step(action=self._opponent_move(observed(observation)))
        raise RuntimeError(f"{self.id}: opponents have made {MAX_OPPONENT_MOVES} moves in a row")

    def _opponent_move(self, observation: str) -> str:
        if self.opponent not in ("random", "first"):
            return self.opponent
        moves = available_moves(observation)
        if not moves:
            raise UserError(
                f"env.options.opponent={self.opponent!r}: {self.id} lists no moves in brackets; "
                "set env.options.opponent to a text that is always a valid move"
            )
        return self._chance.choice(moves) if self.opponent == "random" else moves[0]

    def _end(self) -> Turn:
        rewards, infos = self._env.close()
        reason = str((infos or {}).get(self.player, {}).get("reason") or "")
        return final_turn(reason, self.chat, float((rewards or {}).get(self.player, 0.0)), self._info())

    def _lost_by_invalid_move(self) -> bool:
        return bool(self._env.state.game_info.get(self.player, {}).get("invalid_move"))

    def _info(self) -> dict[str, float]:
        return {"invalid_moves": self._n_invalid}


def observed(observation: Any) -> str:
    """Return an observation as text; raw games give (sender, message, type) triples."""
    return observation if isinstance(observation, str) else "\n".join(str(message) for _, message, _ in observation)


def available_moves(observation: str) -> list[str]:
    """Return the moves in brackets on the last line that lists available, valid or legal ones."""
    for line in reversed(observation.splitlines()):
        listed = LISTED.search(line)
        if listed and (moves := BRACKETED.findall(line[listed.end() :])):
            return moves
    return []
