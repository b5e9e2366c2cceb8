"""Which episode is in which slot during multi-turn generation: bookkeeping without model and communication.

Every stage and shard computes the same state from the same turns and tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from realhf.data.turns import EpisodeKey, TurnInput, TurnOutput
from realhf.models.engine.decode.scheduler import SlotMove

IntTable = npt.NDArray[np.int64]
MAX_FED, MAX_TOGETHER = 16, 256
"""Up to so many new tokens of an open episode are fed to decoding steps one by one, or all of them to the next step if
the model decodes tokens together; more are computed in one pass of their own. This depends on the row only."""
MAX_STEP = 4096
"""Turns are admitted until their new tokens are so many that the hidden states of a step would need much memory."""


@dataclass
class OpenEpisode:
    """An open episode. Its first ``n_cached`` tokens are stored in slot ``home``; then ``rest`` was sampled last."""

    key: EpisodeKey
    home: int
    n_cached: int = 0
    rest: tuple[int, ...] = ()
    count: int = 0  # sampled tokens of all turns


@dataclass(frozen=True)
class Admission:
    """A turn's tokens to compute in ``slot``, where ``start`` tokens are stored."""

    slot: int
    start: int
    tokens: tuple[int, ...]


class SessionTable:
    """Rows of live turns in the first slots, and open episodes, each with a home slot behind them.

    ``state`` is ``[6, n_live]``: last token, its position, prompt number, sample, number of sampled tokens, and its
    limit. Waiting turns of open episodes are admitted before new episodes. Rows with tokens in ``fed`` take them from
    there instead of those that are sampled; if the model decodes tokens ``together``, ``before`` has the tokens between
    those in the cache and the last one.
    """

    def __init__(self, n_slots: int, max_episodes: int, stop_ids: Sequence[int], together: bool = False) -> None:
        self.n_slots, self.together = n_slots, together
        self._homes = list(range(n_slots + max_episodes - 1, n_slots - 1, -1))
        self._stops = np.array(stop_ids, np.int64)
        self._open: dict[EpisodeKey, OpenEpisode] = {}
        self._resumed, self._new = deque[TurnInput](), deque[TurnInput]()
        self._live: list[OpenEpisode] = []
        self._n_admitted = 0
        self.state: IntTable = np.empty((6, 0), np.int64)
        self._fed: list[deque[int]] = []
        self._before: list[tuple[int, ...]] = []
        self._finished: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._tokens: list[list[int]] = []
        self._logprobs: list[list[tuple[float, float]]] = []

    @property
    def n_live(self) -> int:
        return len(self._live)

    @property
    def is_idle(self) -> bool:
        """No turn is live or waits."""
        return not (self._live or self._resumed or self._new)

    @property
    def longest(self) -> int:
        return int(self.state[1].max(initial=-1)) + 1

    @property
    def most_steps(self) -> int:
        """Steps until every row has ended, or one if a row takes tokens from the host."""
        return 1 if any(self._fed) else int((self.state[5] - self.state[4]).max(initial=0))

    def submit(self, inputs: Sequence[TurnInput]) -> None:
        for turn in inputs:
            (self._resumed if turn.key in self._open else self._new).append(turn)

    def release(self, closed: Sequence[EpisodeKey]) -> None:
        """Release the home slots of episodes that have ended; none of their turns is live or waits."""
        for key in closed:
            if (episode := self._open.pop(key, None)) is not None:
                self._homes.append(episode.home)

    def admit(self) -> tuple[list[Admission], list[SlotMove]]:
        """Move waiting turns to free slots; return what to compute, equal first turns side by side, and copies.

        Turns wait until an eighth of the slots is free, or enough for all of them: an admission takes a pass.
        """
        turns: list[tuple[OpenEpisode, TurnInput]] = []
        n_free, n_waiting = self.n_slots - self.n_live, len(self._resumed) + min(len(self._new), len(self._homes))
        if n_free * 8 < self.n_slots and n_free < n_waiting:
            self._n_admitted = 0
            return [], []
        n_tokens = 0  # of the next step
        while (
            self.n_live + len(turns) < self.n_slots
            and n_tokens < MAX_STEP
            and (self._resumed or (self._new and self._homes))
        ):
            turn = self._resumed.popleft() if self._resumed else self._new.popleft()
            episode = self._open.get(turn.key)
            if episode is None:
                episode = self._open[turn.key] = OpenEpisode(turn.key, self._homes.pop(), count=turn.count)
            turns.append((episode, turn))
            n_tokens += len(turn.tokens) if self._joins(episode, turn) else 0
        turns.sort(key=lambda one: (not self._joins(*one), one[0].n_cached > 0, one[0].key))
        admitted, moves, columns = list[Admission](), list[SlotMove](), list[list[int]]()
        for slot, (episode, turn) in enumerate(turns, self.n_live):
            tokens, start = (*episode.rest, *turn.tokens), episode.n_cached
            if start:
                moves.append((episode.home, slot, 0, start))
            joins = self._joins(episode, turn)
            is_fed = joins and not self.together
            self._fed.append(deque(tokens[1:] if is_fed else ()))
            self._before.append(tokens[:-1] if joins and self.together else ())
            if not joins:
                admitted.append(Admission(slot, start, tokens))
            token, position = (tokens[0], start) if is_fed else (tokens[-1], start + len(tokens) - 1)
            columns.append([token, position, *episode.key, episode.count, episode.count + turn.limit])
        self._live += [episode for episode, _ in turns]
        self._tokens += [[] for _ in turns]
        self._logprobs += [[] for _ in turns]
        self._finished = np.concatenate((self._finished, np.zeros(len(turns), np.bool_)))
        if columns:
            self.state = np.concatenate((self.state, np.array(columns, np.int64).T), 1)
        self._n_admitted = len(admitted)
        return admitted, moves

    def _joins(self, episode: OpenEpisode, turn: TurnInput) -> bool:
        """The turn's tokens are computed in decoding steps."""
        most = MAX_TOGETHER if self.together else MAX_FED
        return episode.n_cached > 0 and len(episode.rest) + len(turn.tokens) <= most

    def tokens_of_step(self) -> tuple[IntTable, IntTable] | None:
        """Return tokens, positions and slots of the next step, ``[3, T]``, and the index of every row's last token.

        None if every row has one token.
        """
        if not any(self._before):
            return None
        counts = np.array([len(before) + 1 for before in self._before])
        last, positions = self.state[:2]
        tokens = [token for before, end in zip(self._before, last.tolist(), strict=True) for token in (*before, end)]
        ends = counts.cumsum() - 1
        slots = np.repeat(np.arange(self.n_live), counts)
        own = np.repeat(positions - ends, counts) + np.arange(len(tokens))
        return np.stack((np.array(tokens, np.int64), own, slots)), ends

    def counters(self, n: int) -> IntTable:
        """Return prompt number, sample and token count of the last ``n`` rows, the arguments of sampling."""
        return self.state[2:5, self.n_live - n :]

    def where(self, index: int, indices: IntTable | None) -> tuple[EpisodeKey, int]:
        """Return the episode and the position of sample ``index`` of a pass."""
        rows = self._rows(indices)
        return self._live[rows[index]].key, int(self.state[1, rows[index]]) + 1

    def _rows(self, indices: IntTable | None) -> IntTable:
        if indices is not None:
            return indices
        first = self.n_live - self._n_admitted if self._n_admitted else 0
        return np.arange(first, self.n_live)

    def record(self, tokens: IntTable, logprobs: npt.NDArray[np.float64], indices: IntTable | None = None) -> None:
        """Record the tokens that a pass sampled for the admitted rows, else for all, else for rows ``indices``."""
        rows = self._rows(indices)
        if not self._n_admitted:
            self._before = [()] * self.n_live
        self._n_admitted = 0
        if any(self._fed):
            sampling = [i for i, row in enumerate(rows.tolist()) if not self._feed(row)]
            rows, tokens, logprobs = rows[sampling], tokens[sampling], logprobs[:, sampling]
        self.state[0, rows] = tokens
        self.state[1, rows] += 1
        self.state[4, rows] += 1
        for row, token, pair in zip(rows.tolist(), tokens.tolist(), logprobs.T.tolist(), strict=True):
            self._tokens[row].append(token)
            self._logprobs[row].append(pair)
        stopped = (tokens[:, None] == self._stops).any(1)
        self._finished[rows] = stopped | (self.state[4, rows] >= self.state[5, rows])

    def _feed(self, row: int) -> bool:
        """Give a row its next token if it has one to take."""
        if not self._fed[row]:
            return False
        self.state[0, row] = self._fed[row].popleft()
        self.state[1, row] += 1
        return True

    def finish(self) -> tuple[list[TurnOutput], list[SlotMove]]:
        """Remove finished rows; return their turns, and copies: new tokens to home slots, then rows to free slots."""
        ended = np.flatnonzero(self._finished).tolist()
        if not ended:
            return [], []
        outputs, moves = list[TurnOutput](), list[SlotMove]()
        for row in ended:
            episode, position = self._live[row], int(self.state[1, row])
            moves.append((row, episode.home, episode.n_cached, position))
            last = int(self.state[0, row])
            episode.n_cached, episode.rest, episode.count = position, (last,), int(self.state[4, row])
            pairs = self._logprobs[row]
            outputs.append(
                TurnOutput(
                    episode.key,
                    self._tokens[row],
                    [own for own, _ in pairs],
                    [own for _, own in pairs],
                    bool((self._stops == last).any()),
                )
            )
        n_kept = self.n_live - len(ended)
        holes = [row for row in ended if row < n_kept]
        sources = [row for row in range(n_kept, self.n_live) if not self._finished[row]]
        order = list(range(n_kept))
        for source, hole in zip(sources, holes, strict=True):
            order[hole] = source
            moves.append((source, hole, 0, int(self.state[1, source])))
        self.state = self.state[:, order]
        self._finished = np.zeros(n_kept, np.bool_)
        self._live = [self._live[row] for row in order]
        self._fed = [self._fed[row] for row in order]
        self._before = [self._before[row] for row in order]
        self._tokens = [self._tokens[row] for row in order]
        self._logprobs = [self._logprobs[row] for row in order]
        return outputs, moves
