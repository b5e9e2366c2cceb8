"""Every allocation mode and everything it can refuse."""

import pytest

from realhf.api.config import ExperimentConfig, MFCConfig, MicroBatchConfig, ParallelConfig
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.plan import ExecutionPlan, MicroBatching
from realhf.base.errors import UserError
from realhf.plan.allocate import allocate

SPEC = InterfaceSpec("any")
GRAPH = Graph((
    MFC("actor_gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",)),
    MFC("actor_train", "actor", Kind.TRAIN, SPEC, ("tokens",)),
))  # fmt: skip


def plan(mode: str, n_gpus: int = 4, n_nodes: int = 1, **options: MFCConfig) -> ExecutionPlan:
    config = ExperimentConfig(allocation_mode=mode, n_gpus_per_node=n_gpus, n_nodes=n_nodes)
    return allocate(GRAPH, config, {m.name: options.get(m.name, MFCConfig()) for m in GRAPH.mfcs})


def layouts(made: ExecutionPlan) -> list[str]:
    return [str(made[m.name].layout) for m in GRAPH.mfcs]


def problems(*arguments: object, **options: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        plan(*arguments, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("heuristic", ["d4t1p1@0-3", "d4t1p1@0-3"]),
        ("d4", ["d4t1p1@0-3", "d4t1p1@0-3"]),
        ("D4P1M1", ["d4t1p1@0-3", "d4t1p1@0-3"]),
        ("actor_gen:d2,*:d1", ["d2t1p1@0-1", "d1t1p1@0"]),
        ("*:d4, actor_train:d3", ["d4t1p1@0-3", "d3t1p1@0-2"]),
        ("actor_gen:d1,actor_train:d4", ["d1t1p1@0", "d4t1p1@0-3"]),
    ],
)
def test_a_mode_lays_every_call_out(mode: str, expected: list[str]) -> None:
    made = plan(mode)
    assert layouts(made) == expected and made.n_workers == 4


def test_manual_meshes_and_micro_batches() -> None:
    gen = MFCConfig("node02:0-1", ParallelConfig(data_parallel_size=2), MicroBatchConfig(3, 500))
    made = plan("manual", 2, 2, actor_gen=gen, actor_train=MFCConfig(parallel=ParallelConfig(data_parallel_size=4)))
    assert layouts(made) == ["d2t1p1@2-3", "d4t1p1@0-3"]
    assert made["actor_gen"].micro_batching == MicroBatching(3, 500)


def test_micro_batching_is_read_in_every_mode() -> None:
    made = plan("heuristic", actor_gen=MFCConfig(mb_spec=MicroBatchConfig(7, 99)))
    assert made["actor_gen"].micro_batching == MicroBatching(7, 99)
    assert made["actor_train"].micro_batching == MicroBatching()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("search", "this version has no such mode; use heuristic, manual, dN, or actor_gen"),
        ("vllm.d4t1p1+d2t2p1", "this version has no such mode"),
        ("heuristc", "there is no such mode; use .* did you mean heuristic"),
        ("", "there is no such mode"),
        ("d4p1m1xyz", "'d4p1m1xyz' is not a parallel strategy"),
        ("d2", "d2t1p1 needs 2 workers, n_nodes . n_gpus_per_node gives 4"),
        ("d4t2", "d4t2p1 needs 8 workers"),
        (
            "actor_gn:d2,*:d1",
            "'actor_gn' is no MFC of this experiment .actor_gen, actor_train.  did you mean actor_gen",
        ),
        ("actor_gen:d2,actor_gen:d1", "'actor_gen' is given twice"),
        ("actor_gen:d2", "no strategy for actor_train; add '.:d4' for the rest"),
        ("actor_gen:2,*:d1", "'2' is not a parallel strategy"),
        ("actor_gen:d2,", "'' is no MFC"),
    ],
)
def test_a_mode_that_cannot_be_read_is_an_error(mode: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^allocation_mode={mode.replace('+', '.').replace('*', '.')}: {words}"):
        plan(mode)


def test_every_layout_that_is_impossible_is_listed() -> None:
    assert problems("actor_gen:d8,*:t2p2") == [
        "allocation_mode: actor_gen:d8t1p1 needs 8 workers, there are 4",
    ]
    wrong = {
        "actor_gen": MFCConfig("node03", ParallelConfig(data_parallel_size=2)),
        "actor_train": MFCConfig(parallel=ParallelConfig(data_parallel_size=0)),
    }
    found = problems("manual", 2, 2, **wrong)
    assert found[0].startswith("actor_gen: device mesh 'node03' names node 3") and len(found) == 2
    assert found[1].startswith("actor_train: parallel degrees must be positive")
    assert problems("manual", actor_gen=MFCConfig("0")) == [
        "actor_train: strategy d1t1p1 needs 1 workers, mesh 0-3 has 4"
    ]


def test_options_that_a_mode_does_not_read_are_errors() -> None:
    wish = MFCConfig("0", ParallelConfig(data_parallel_size=2))
    tail = "is set, but allocation_mode=heuristic does not read it; set allocation_mode=manual"
    expected = [f"actor_gen.device_mesh {tail}", f"actor_gen.parallel {tail}"]
    assert problems("heuristic", actor_gen=wish) == expected


def test_sizes_must_be_positive() -> None:
    assert problems("heuristic", 0) == ["n_nodes * n_gpus_per_node must be positive, got 1 * 0"]
    (line,) = problems("heuristic", actor_gen=MFCConfig(mb_spec=MicroBatchConfig(0, 1)))
    assert line.startswith("actor_gen.mb_spec: n_mbs and max_tokens_per_mb must be positive")
