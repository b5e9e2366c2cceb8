"""All allocation modes and their errors."""

import pytest

from realhf.api.config import ExperimentConfig, MFCConfig, MicroBatchConfig, ParallelConfig
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.model_config import ModelConfig
from realhf.base.errors import UserError
from realhf.plan.compile.allocate import allocate

SPEC = InterfaceSpec("any")
GRAPH = Graph((
    MFC("actor_gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",)),
    MFC("actor_train", "actor", Kind.TRAIN, SPEC, ("tokens",)),
))  # fmt: skip
ACTOR = ModelConfig("llama", n_layers=3, hidden=24, n_heads=4, n_kv_heads=2, head_dim=6, intermediate=40, vocab=11,
                    max_positions=64)  # fmt: skip


def plan(
    mode: str, n_gpus: int = 4, n_nodes: int = 1, model: ModelConfig = ACTOR, **options: MFCConfig
) -> ExecutionPlan:
    config = ExperimentConfig(allocation_mode=mode, n_gpus_per_node=n_gpus, n_nodes=n_nodes)
    calls = {m.name: options.get(m.name, MFCConfig()) for m in GRAPH.mfcs}
    return allocate(GRAPH, config, calls, {"actor": model}, "cpu", {})


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
def test_modes(mode: str, expected: list[str]) -> None:
    made = plan(mode)
    assert layouts(made) == expected and made.n_workers == 4


def test_manual_meshes_and_micro_batches() -> None:
    gen = MFCConfig("node02:0-1", ParallelConfig(data_parallel_size=2), MicroBatchConfig(3, 500))
    made = plan("manual", 2, 2, actor_gen=gen, actor_train=MFCConfig(parallel=ParallelConfig(data_parallel_size=4)))
    assert layouts(made) == ["d2t1p1@2-3", "d4t1p1@0-3"]
    assert made["actor_gen"].micro_batching == MicroBatching(3, 500)


def test_micro_batching_applies_in_every_mode() -> None:
    made = plan("heuristic", actor_gen=MFCConfig(mb_spec=MicroBatchConfig(7, 99)))
    assert made["actor_gen"].micro_batching == MicroBatching(7, 99)
    assert made["actor_train"].micro_batching == MicroBatching(1, 4096)


def test_default_micro_batch_by_device() -> None:
    calls = {m.name: MFCConfig() for m in GRAPH.mfcs}
    config = ExperimentConfig(allocation_mode="d1", n_gpus_per_node=1)
    found = {device: allocate(GRAPH, config, calls, {}, device, {}) for device in ("cpu", "cuda")}
    assert found["cuda"]["actor_gen"].micro_batching == MicroBatching(1, 16384)
    assert found["cpu"]["actor_gen"].micro_batching == MicroBatching(1, 4096)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("heuristc", "unknown mode; use .* did you mean heuristic"),
        ("", "unknown mode"),
        ("d4p1m1xyz", "'d4p1m1xyz' is not a parallel strategy; write it .* nearest legal: d4t1p1$"),
        ("t2x2", "'t2x2' is not a parallel strategy; write it .* nearest legal: d2t2p1$"),
        ("d2", "its size is 2, n_nodes . n_gpus_per_node is 4; nearest legal: d4t1p1$"),
        ("d1t2p4", "its size is 8, n_nodes . n_gpus_per_node is 4; nearest legal: d1t2p2$"),
        (
            "actor_gn:d2,*:d1",
            "unknown call 'actor_gn'; this experiment has actor_gen, actor_train  did you mean actor_gen",
        ),
        ("actor_gen:d2,actor_gen:d1", "call 'actor_gen' is given twice"),
        ("actor_gen:d2", "no strategy for actor_train; add '.:d4' for the rest"),
        ("actor_gen:2,*:d1", "actor_gen: '2' is not a parallel strategy; write it .* nearest legal: d4t1p1$"),
        ("actor_gen:d2,", "unknown call ''"),
    ],
)
def test_malformed_modes(mode: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^allocation_mode={mode.replace('+', '.').replace('*', '.')}: {words}"):
        plan(mode)


def test_all_invalid_layouts_are_listed() -> None:
    assert problems("actor_gen:d8,*:t2p2") == [
        "actor_gen: d8t1p1: its size is 8, that of mesh 0-3 is 4; nearest legal: d4t1p1"
    ]
    assert problems("t3", 3) == [
        f"{name}: d1t3p1: 4 heads (2 KV heads) are not divisible by tensor-parallel size 3; nearest legal: d3t1p1"
        for name in ("actor_gen", "actor_train")
    ]
    both = problems("actor_gen:t8,*:d2p5")
    assert both[0].startswith("actor_gen: d1t8p1: its size is 8, that of mesh 0-3 is 4, and 4 heads (2 KV heads")
    assert both[1].endswith("and 3 layers are fewer than 5 pipeline stages; nearest legal: d2t1p2") and len(both) == 2


def test_all_malformed_entries_are_listed() -> None:
    parts = ["unknown call 'actr_gen'", "actor_train: 't' is not a parallel", "call 'actor_train' is given twice",
             "no strategy for actor_gen; add '*:d4' for the rest"]  # fmt: skip
    found = problems("actr_gen:d4,actor_train:t,actor_train:d2")
    starts = [f"allocation_mode=actr_gen:d4,actor_train:t,actor_train:d2: {start}" for start in parts]
    assert [line.startswith(start) for line, start in zip(found, starts, strict=False)] == [True] * 4
    assert len(found) == 4


def test_invalid_manual_layouts_suggest_options() -> None:
    wrong = {
        "actor_gen": MFCConfig("node03", ParallelConfig(data_parallel_size=2)),
        "actor_train": MFCConfig(parallel=ParallelConfig(data_parallel_size=0)),
    }
    found = problems("manual", 2, 2, **wrong)
    assert found == [
        "actor_gen: device mesh 'node03' names node 3, but there are nodes 1 to 2; nearest legal: node 2",
        "actor_train: parallel degrees must be positive, got d0t1p1; nearest legal: "
        "actor_train.parallel.data_parallel_size=4",
    ]
    assert problems("manual", actor_gen=MFCConfig("0")) == [
        "actor_train: d1t1p1: its size is 1, that of mesh 0-3 is 4; nearest legal: "
        "actor_train.parallel.data_parallel_size=4"
    ]
    unreadable = MFCConfig("nodeX", ParallelConfig(tensor_parallel_size=3))
    found = problems("manual", actor_gen=unreadable, actor_train=MFCConfig("0"))
    assert found[0].endswith("or 0-3; nearest legal: 0-3") and found[1].endswith(
        "nearest legal: actor_gen.parallel.data_parallel_size=3 actor_gen.parallel.tensor_parallel_size=1"
    )


@pytest.mark.parametrize(
    ("mode", "n_gpus", "parts"),
    [
        ("vllm.d4t1p1+d2t2p1", 4, ["it needs 4 + 4 separate workers, there are 4", "vllm.d2t1p1+d2t1p1"]),
        ("vllm.d4t1p1+d2t2p1", 9, ["it needs 4 + 4 separate workers, there are 9", "vllm.d5t1p1+d2t2p1"]),
        ("d2t2p1+vllm.d4t1p1", 1, ["it needs 4 + 4 separate workers, there are 1", "n_gpus_per_node=8"]),
        ("vllm.d1t1p2+d2", 4, ["an inference server has no pipeline stages, d1t1p2 has 2", "vllm.d2t1p1+d2t1p1"]),
        ("vllm.d4x+d4y", 8, ["'d4x' is not a parallel strategy", "'d4y' is not a", "vllm.d4t1p1+d4t1p1"]),
        ("vllm.d1+vllm.d1", 2, ["'vllm.d1' is not a parallel strategy", "vllm.d1t1p1+d1t1p1"]),
        (
            "vllm.d2+actr_train:d2",
            4,
            ["unknown call 'actr_train'", "no strategy for actor_train", "vllm.d3t1p1+d1t1p1"],
        ),
        ("vllm.t3+t3", 6, ["4 heads (2 KV heads) are not divisible by tensor-parallel size 3", "vllm.d1t2p1+d1t4p1"]),
    ],
)
def test_server_modes_that_do_not_fit(mode: str, n_gpus: int, parts: list[str]) -> None:
    (found,) = problems(mode, n_gpus)
    assert all(word in found for word in parts[:-1]) and found.endswith(f"nearest legal: {parts[-1]}")


def test_a_server_generates_on_separate_workers() -> None:
    for mode in ("vllm.d2t2p1+d2t1p2", "d2t1p2+vllm.d2t2"):
        made = plan(mode, 8)
        assert layouts(made) == ["d2t2p1@0-3", "d2t1p2@4-7"]
        assert [made[name].backend for name in made.placements] == [Backend.vllm, Backend.native]
    assert layouts(plan("vllm.d2+actor_train:d1", 4)) == ["d2t1p1@0-1", "d1t1p1@2"]
    (line,) = problems("d2t2p1+sglang.d4t1p1", 8)
    assert line.startswith("allocation_mode=d2t2p1+sglang.d4t1p1: backend sglang is not supported; use heuristic")


def test_backends() -> None:
    assert plan("d2", 2, actor_gen=MFCConfig(backend=Backend.vllm))["actor_gen"].backend is Backend.vllm
    assert problems("d1t1p2", 2, actor_gen=MFCConfig(backend=Backend.vllm)) == [
        "actor_gen.backend=vllm: this backend has no pipeline stages, d1t1p2 has 2; nearest legal: d2t1p1"
    ]
    assert problems("d2", 2, actor_train=MFCConfig(backend=Backend.vllm)) == [
        "actor_train.backend=vllm: this backend only generates, but this call does not generate"
    ]
    assert problems("d2", 2, actor_train=MFCConfig(backend=Backend.megatron)) == [
        "actor_train.backend=megatron: megatron-core is set per role, not per call; set actor.backend=megatron"
    ]


@pytest.mark.parametrize("mode", ["vllm", "vllmd2", "vllm.d2", "d2+d2,vllm.d1", "vllm.d1+d1+d2"])
def test_malformed_server_modes(mode: str) -> None:
    (line,) = problems(mode)
    assert line.startswith(
        f"allocation_mode={mode}: an inference server for the one generation call is written like vllm.d4"
    )


def test_ignored_options_are_errors() -> None:
    option = MFCConfig("0", ParallelConfig(data_parallel_size=2))
    tail = "is set, but allocation_mode=heuristic ignores it; set allocation_mode=manual"
    expected = [f"actor_gen.device_mesh {tail}", f"actor_gen.parallel {tail}"]
    assert problems("heuristic", actor_gen=option) == expected
