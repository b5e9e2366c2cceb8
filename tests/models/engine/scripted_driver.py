"""A driver of multi-turn rollouts with scripted replies. Imported by gloo ranks: does not import transformers."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from realhf.api.config import GenerationConfig, ModelSpec
from realhf.api.experiment import RoleSpec
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model_config import ModelConfig
from realhf.comm.process_groups import ParallelContext, make_groups
from realhf.data.turns import EpisodeKey, TurnInput, TurnOutput, TurnRequest
from realhf.models.engine.native import NativeEngine, build_engine
from tests.models.engine.tiny_engine import STOP, VOCAB, prompts_of

TURNS, LIMIT, LENGTHS, N, SEED, MAX_LEN = 3, 5, (3, 1, 7, 5), 3, 11, 64
FOUR_LAYERS = ModelConfig("llama", 4, 32, 4, 2, 8, 48, VOCAB, 64, init_std=0.2)
MESHES = {"d1": (0,), "t2": (1, 2), "p2": (3, 1), "t2p2": (1, 0, 2, 3)}


def reply_to(output: TurnOutput, turn: int, vocab: int = VOCAB) -> list[int]:
    """Return the tokens that an environment answers, a function of the turn."""
    generator = torch.Generator().manual_seed(sum(output.tokens) + 31 * output.key[0] + turn)
    length = int(torch.randint(0 if not output.stopped else 1, 9, (1,), generator=generator))
    return torch.randint(2, vocab, (length,), generator=generator).tolist()


@dataclass
class ScriptedDriver:
    """Plays ``TURNS`` turns per episode. ``delays`` (a seed) answers in another order, some passes later."""

    prompts: dict[int, list[int]]
    n: int
    delays: int | None = None
    vocab: int = VOCAB
    turns: dict[EpisodeKey, list[TurnOutput]] = field(default_factory=dict)
    rows: dict[EpisodeKey, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.delays)
        keys = [(prompt, sample) for prompt in self.prompts for sample in range(self.n)]
        if self.delays is not None:
            self.random.shuffle(keys)
        self.waiting = deque(TurnInput(key, self.prompts[key[0]], LIMIT) for key in keys)
        self.n_open = len(keys)
        for turn in self.waiting:
            self.rows[turn.key], self.turns[turn.key] = list(turn.tokens), []

    def next(self, outputs: Sequence[TurnOutput], is_idle: bool) -> TurnRequest:
        closed = []
        for output in outputs:
            self.turns[output.key].append(output)
            self.rows[output.key] += output.tokens
            if len(self.turns[output.key]) == TURNS:
                closed.append(output.key)
                self.n_open -= 1
                continue
            tokens = reply_to(output, len(self.turns[output.key]), self.vocab)
            self.rows[output.key] += tokens
            self.waiting.append(TurnInput(output.key, tokens, LIMIT))
        if not self.n_open:
            return TurnRequest(closed=closed, done=True)
        n = len(self.waiting)
        if self.delays is not None:
            self.random.shuffle(self.waiting)
            n = self.random.randint(int(is_idle), n) if n else 0
        return TurnRequest([self.waiting.popleft() for _ in range(n)], closed)

    def result(self) -> bytes:
        return msgspec.msgpack.encode([sorted(self.rows.items()), sorted(self.turns.items())])


def play(engine: NativeEngine, delays: int | None = None, slots: int = 4, episodes: int = 6, **options: object) -> list:
    """Return the rows and the turns of all episodes."""
    prompts = {i: row.tolist() for i, row in enumerate(prompts_of(LENGTHS).columns["prompts"].rows())}
    config = GenerationConfig(max_new_tokens=LIMIT, max_num_seqs=slots, **options)  # type: ignore[arg-type]
    driver = ScriptedDriver(prompts, N, delays)
    return msgspec.msgpack.decode(engine.sample_turns(lambda: driver, config, SEED, MAX_LEN, episodes))


def play_everywhere(rank: int, world: int) -> dict[str, list]:
    """Play in every layout that includes this rank."""
    layouts = {name: Layout(DeviceMesh(mesh), ParallelStrategy.parse(name)) for name, mesh in MESHES.items()}
    axes = dict.fromkeys(
        layout.axis(axis, one)
        for layout in layouts.values()
        for one in layout.mesh.ranks
        for axis in ("dp", "tp", "pp")
    )
    groups, found = make_groups([ranks for ranks in axes if len(ranks) > 1], rank), {}
    for name, layout in layouts.items():
        if rank in layout.mesh.ranks:
            context, role = ParallelContext(layout, rank, groups=groups), RoleSpec(ModelSpec(init_from_scratch=True))
            found[name] = play(build_engine(FOUR_LAYERS, role, context, False, True, 3, 1, (STOP,), None), 1)
    return found
