"""No schedule of the project blocks under NCCL's ordering rules.

The engines and exchanges run on the recording backend; ``Machine`` executes what they called. In the quick form an
engine runs several numbers of micro-batches in turn. In the long form (slow) each is the first on fresh communicators.
"""

from dataclasses import replace

import pytest
import torch

from realhf.api.layout import Layout
from realhf.comm import exchange
from realhf.comm.exchange import P2PCopy, TensorSlice
from realhf.comm.p2p import DirectedGroups
from realhf.comm.process_groups import Group
from realhf.models.engine import grad_reduction
from realhf.system.profiler.link_probes import send_probes
from realhf.system.profiler.probes import Clock
from tests.gpu_emulated.fake_cuda import FakeCuda
from tests.gpu_emulated.nccl import programs
from tests.gpu_emulated.nccl.programs import layout_of
from tests.gpu_emulated.nccl.recording import Job, Recorder, record, recorder  # noqa: F401
from tests.gpu_emulated.nccl.rules import Collective, Machine, OrderError, Post

STAGES = range(2, 9)
Pairs = set[tuple[int, int]]


def executed(recorder: Recorder, world: int, job: Job) -> Pairs:  # noqa: F811
    """Execute a job by NCCL's rules; return the pairs of ranks that exchanged messages."""
    machine = Machine(record(recorder, world, job))
    machine.run()
    return machine.pairs


def adjacent(n: int) -> Pairs:
    return {(stage, stage + 1) for stage in range(n - 1)}


def train_counts(stages: int) -> list[int]:
    return sorted({1, stages - 1, stages, 2 * stages, 2 * stages + 3})


def slot_counts(stages: int) -> list[int]:
    return sorted({1, 2, stages - 1, stages, 10})


@pytest.mark.parametrize("stages", STAGES)
def test_training_inference_and_generation(stages: int, recorder: Recorder) -> None:  # noqa: F811
    layout, tied, last = layout_of(f"p{stages}"), {(0, stages - 1)}, stages - 1
    counts = train_counts(stages)
    assert executed(recorder, stages, programs.train(layout, counts[-3:])) == adjacent(stages) | tied
    assert executed(recorder, stages, programs.infer(layout, counts[:3])) == adjacent(stages)
    to_last = {(stage, last) for stage in range(last)}
    assert executed(recorder, stages, programs.generate(layout, [stages])) == adjacent(stages) | to_last


def in_a_ring(n: int) -> Pairs:
    return adjacent(n) | {(0, n - 1)}


@pytest.mark.parametrize("text", ["p2v2", "p2v4", "p3v2", "p4v2"])
def test_interleaved_stages(text: str, recorder: Recorder) -> None:  # noqa: F811
    """Of two stages, activations and gradients of different chunks have the same direction."""
    layout, untied = layout_of(text), replace(programs.CONFIG, tied_embedding=False)
    stages = layout.strategy.pp
    for n in train_counts(stages):
        assert executed(recorder, stages, programs.train(layout, [n], untied)) == in_a_ring(stages)
        assert executed(recorder, stages, programs.infer(layout, [n])) == in_a_ring(stages)
    assert executed(recorder, stages, programs.train(layout, train_counts(stages))) == in_a_ring(stages)


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
def test_every_schedule_on_fresh_communicators(stages: int, recorder: Recorder) -> None:  # noqa: F811
    layout, untied = layout_of(f"p{stages}"), replace(programs.CONFIG, tied_embedding=False)
    for n in train_counts(stages):
        assert executed(recorder, stages, programs.train(layout, [n])) == adjacent(stages) | {(0, stages - 1)}
        assert executed(recorder, stages, programs.train(layout, [n], untied)) == adjacent(stages)
        assert executed(recorder, stages, programs.infer(layout, [n])) == adjacent(stages)
    for n in slot_counts(stages):
        assert executed(recorder, stages, programs.generate(layout, [n])) >= adjacent(stages)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_one_communicator_per_pair_blocks(
    stages: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(programs, "make_directed_groups", lambda timeout_s: DirectedGroups())
    with pytest.raises(OrderError, match="block one another"):
        executed(recorder, stages, programs.train(layout_of(f"p{stages}"), [2 * stages]))


LAYOUTS = [
    layout_of("p2", (3, 1)),
    layout_of("d2p2"),
    layout_of("t2p2", (1, 0, 2, 3)),
    layout_of("p4", (2, 0, 3, 1)),
    layout_of("d2t2p2", (1, 0, 2, 3, 6, 5, 4, 7)),
    layout_of("p4v2", (2, 0, 3, 1)),
    layout_of("t2p2v2", (1, 0, 2, 3)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pipelines_with_several_axes_and_meshes(layout: Layout, recorder: Recorder) -> None:  # noqa: F811
    world, stages = max(layout.mesh.ranks) + 1, layout.strategy.pp

    def job(rank: int, _: int) -> None:
        if rank in layout.mesh.ranks:
            programs.train(layout, [2 * stages + 1])(rank, world)
        else:
            programs.context_of(layout, rank)

    assert len(executed(recorder, world, job)) >= stages - 1


@pytest.fixture
def small_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_reduction, "BUCKET_NUMEL", 100)


@pytest.mark.usefixtures("small_reductions")
def test_replicas_without_rows_reduce_in_the_same_order(recorder: Recorder) -> None:  # noqa: F811
    for text in ("d3", "d2t2", "d2p2", "d2p2v2"):
        layout = layout_of(text)
        executed(recorder, len(layout.mesh.ranks), programs.train_with_limit(layout))


@pytest.mark.usefixtures("small_reductions")
@pytest.mark.parametrize("text", ["d3", "d2t2", "d2p2", "d2p2v2", "d3z3", "d2t2z3", "d2p2z3", "d2p2v2z3"])
def test_layers_are_gathered_and_reduced_in_the_same_order(text: str, recorder: Recorder) -> None:  # noqa: F811
    """Of ZeRO-2 and ZeRO-3, beside messages between stages and collectives of tensor parallelism."""
    layout = layout_of(text)
    world, n = len(layout.mesh.ranks), 2 * layout.strategy.pp
    executed(recorder, world, programs.train(layout, [n, 2 * n + 1], zero_stage=2))
    executed(recorder, world, programs.infer(layout, [n]))


REALLOCATIONS = [
    (layout_of("d1"), layout_of("p4")),
    (layout_of("p4"), layout_of("d4", (3, 2, 1, 0))),
    (layout_of("d4"), layout_of("p8")),
    (layout_of("t2p2"), layout_of("d2t2", (4, 5, 6, 7))),
    (layout_of("p8"), layout_of("d2t2p2", (1, 0, 2, 3, 6, 5, 4, 7))),
    (layout_of("d2t4"), layout_of("t2p4", tuple(reversed(range(8))))),
    (layout_of("t2p4v2"), layout_of("p8")),
]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny tensors need several buckets and rounds."""
    for name, nbytes in (("BUCKET_BYTES", 1 << 9), ("ALONE_BYTES", 1 << 8), ("BUFFER_BYTES", 1 << 10)):
        monkeypatch.setattr(exchange, name, nbytes)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("src, dst", REALLOCATIONS, ids=str)
def test_reallocation(src: Layout, dst: Layout, in_place: bool, recorder: Recorder) -> None:  # noqa: F811
    assert executed(recorder, 8, programs.reallocate(src, dst, in_place))


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("seed", range(4))
def test_transfers_of_rows(seed: int, recorder: Recorder) -> None:  # noqa: F811
    """Rows of all sizes between random ranks, in several exchanges with other participants."""
    generator = torch.Generator().manual_seed(seed)
    moves = []
    for members in ((0, 1, 2, 3, 4), (1, 2), (0, 4), (0, 1, 2, 3, 4)):
        copies = []
        for number in range(60):
            src, dst = (members[int(torch.randint(len(members), (), generator=generator))] for _ in range(2))
            numel = int(torch.randint(1 << int(torch.randint(1, 11, (), generator=generator)), (), generator=generator))
            copies.append(P2PCopy(number, src, dst, TensorSlice(torch.float32, numel)))
        moves.append(programs.transfer(copies))
    assert len(executed(recorder, 5, programs.in_sequence(*moves))) == 10


def test_the_calls_of_a_step_in_sequence(recorder: Recorder) -> None:  # noqa: F811
    """Generation, a reallocation, inference and training on the same workers, in layouts with other pairs."""
    four, eight, spread = layout_of("d4p2"), layout_of("p8"), layout_of("d2t2p2", (1, 0, 2, 3, 6, 5, 4, 7))
    job = programs.in_sequence(
        programs.generate(four, [3]),
        programs.reallocate(four, eight, True),
        programs.infer(eight, [9]),
        programs.reallocate(eight, spread, False),
        programs.train(spread, [5]),
        programs.train(eight, [17]),
    )
    assert executed(recorder, 8, job) >= adjacent(8)


def test_the_probes_of_links(recorder: Recorder) -> None:  # noqa: F811
    def job(rank: int, world: int) -> None:
        for probe in send_probes(Group((0, 1), rank), Clock(programs.DEVICE, 1, world)):
            probe.run()

    assert executed(recorder, 2, job) == {(0, 1)}


@pytest.mark.usefixtures("small_reductions")
@pytest.mark.parametrize("text", ["d2e2", "d4e2", "d2t2e4", "t2e2", "d2p2e2", "d2p2v2e2"])
def test_tokens_are_exchanged_in_the_same_order(text: str, recorder: Recorder) -> None:  # noqa: F811
    """Beside reductions that overlap with the backward pass, over groups that share ranks."""
    layout = layout_of(text)
    world, n = len(layout.mesh.ranks), 2 * layout.strategy.pp
    executed(recorder, world, programs.train(layout, [n, 2 * n + 1], programs.ROUTED))
    executed(recorder, world, programs.infer(layout, [n], programs.ROUTED))
    exchanged = "all_to_all" in {op.name for event in recorder.events[0] if isinstance(event, Post)
                                 for op in event.operations if isinstance(op, Collective)}  # fmt: skip
    assert exchanged == (layout.strategy.expert_dp > 1)


@pytest.mark.usefixtures("small_reductions")
@pytest.mark.parametrize("text", ["c2", "c3", "d2c2", "c2p2", "d2c2p2", "c2p2v2"])
def test_keys_are_gathered_in_the_same_order(text: str, recorder: Recorder) -> None:  # noqa: F811
    layout = layout_of(text)
    world, n = len(layout.mesh.ranks), 2 * layout.strategy.pp
    executed(recorder, world, programs.train(layout, [n, 2 * n + 1]))
    executed(recorder, world, programs.infer(layout, [n]))
    if layout.strategy.dp > 1:
        executed(recorder, world, programs.train_with_limit(layout))


@pytest.fixture
def on_gpu(recorder: Recorder, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Run the programs on a fake device; messages and collectives of tensors in host memory fail, as NCCL's do."""
    recorder.device = torch.device("cuda:0")
    monkeypatch.setattr(programs, "DEVICE", recorder.device)
    original = programs.rows, programs.prompts_of
    monkeypatch.setattr(programs, "rows", lambda n: original[0](n).to(recorder.device))
    monkeypatch.setattr(programs, "prompts_of", lambda lengths: original[1](lengths).to(recorder.device))


@pytest.mark.usefixtures("on_gpu", "small_buckets", "small_reductions")
@pytest.mark.parametrize("text", ["d2t2", "t2p2"])
def test_all_messages_are_of_tensors_on_the_device(text: str, recorder: Recorder) -> None:  # noqa: F811
    layout = layout_of(text)
    world, moved = len(layout.mesh.ranks), layout_of(f"d{len(layout.mesh.ranks)}")
    executed(recorder, world, programs.train(layout, [2]))
    executed(recorder, world, programs.train_with_limit(layout))
    executed(recorder, world, programs.infer(layout, [2]))
    executed(recorder, world, programs.generate(layout, [4]))
    for in_place in (True, False):
        executed(recorder, world, programs.reallocate(layout, moved, in_place))
