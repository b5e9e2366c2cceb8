"""Plans as text and as files: every printed plan is parsed as the same plan."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.codec import to_json
from realhf.api.config import MFCConfig, MicroBatchConfig
from realhf.api.config.choices import Backend
from realhf.api.execution_plan import ExecutionPlan, MicroBatching, Placement
from realhf.api.experiment import Experiment, MultiStageExperiment
from realhf.api.graph import Graph, Kind
from realhf.api.layout import DeviceMesh, Layout
from realhf.apps.prepare.options import updated
from realhf.base.errors import UserError
from realhf.experiments import EXPERIMENTS, experiment_class
from realhf.plan.compile.allocate import allocate, micro_batching
from realhf.plan.compile.check import all_strategies
from realhf.plan.compile.plan_text import plan_text, read_call, read_plan

NODE_SIZE = 4
GRAPHS: dict[str, Graph] = {
    name: cls().graph()
    for name in EXPERIMENTS
    if not issubclass(cls := experiment_class(name), MultiStageExperiment) and cls is not Experiment
}
Options = dict[str, MFCConfig]


@st.composite
def placements(draw: st.DrawFn, n_workers: int, generates: bool) -> Placement:
    """Any distinct workers in any order, a strategy of as many, and micro-batches."""
    ranks = draw(st.lists(st.integers(0, n_workers - 1), min_size=1, max_size=n_workers, unique=True))
    if draw(st.booleans()):
        first = draw(st.integers(0, n_workers - len(ranks)))
        ranks = list(range(first, first + len(ranks)))
    strategy = draw(st.sampled_from(all_strategies(len(ranks))))
    can_serve = generates and strategy.pp == 1
    backend = draw(st.sampled_from([Backend.native, Backend.vllm])) if can_serve else Backend.native
    batching = MicroBatching(draw(st.integers(1, 9)), draw(st.integers(1, 10**6)), draw(st.integers(0, 300)))
    return Placement(Layout(DeviceMesh(tuple(ranks)), strategy), batching, backend)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Graph, int, Options, ExecutionPlan]:
    """A graph of an experiment, options of its calls, and a plan in which calls may have equal placements."""
    graph, n_nodes = GRAPHS[draw(st.sampled_from(sorted(GRAPHS)))], draw(st.integers(1, 3))
    n_workers = n_nodes * NODE_SIZE
    options = {m.name: MFCConfig(mb_spec=MicroBatchConfig(draw(st.integers(1, 3)), draw(st.sampled_from([None, 100]))))
               for m in graph.mfcs}  # fmt: skip
    shared = draw(placements(n_workers, generates=False))
    made = {}
    for mfc in graph.mfcs:
        made[mfc.name] = own = draw(st.just(shared) | placements(n_workers, mfc.kind is Kind.GENERATE))
        if draw(st.booleans()):  # the micro-batching of the options
            made[mfc.name] = Placement(own.layout, micro_batching(options[mfc.name], "cpu"), own.backend)
    return graph, n_nodes, options, ExecutionPlan(n_workers, made)


def read(graph: Graph, mode: str, n_nodes: int, options: Options, n_gpus: int = NODE_SIZE) -> ExecutionPlan:
    """Return the plan of a command line with this allocation mode."""
    words = [f"allocation_mode={mode}", f"n_nodes={n_nodes}", f"n_gpus_per_node={n_gpus}"]
    config = updated(experiment_class("sft")(), words)
    return allocate(graph, config, options, {}, "cpu")


@given(plans())
def test_every_printed_plan_is_parsed_as_the_same_plan(made: tuple[Graph, int, Options, ExecutionPlan]) -> None:
    graph, n_nodes, options, plan = made
    text = plan_text(plan, {name: micro_batching(option, "cpu") for name, option in options.items()})
    assert read(graph, text, n_nodes, options) == plan, text


def test_texts() -> None:
    def plan(*texts: str) -> str:
        names = ("actor_gen", "ref_inf", "actor_train")
        options = {name: MFCConfig() for name in names}
        graph = Graph(tuple(m for m in GRAPHS["ppo"].mfcs if m.name in names))
        made = read(graph, ",".join(f"{n}:{t}" for n, t in zip(names, texts, strict=True)), 1, options)
        return plan_text(made, {name: micro_batching(MFCConfig(), "cpu") for name in names})

    assert plan("d4", "d4", "d4@0-3") == "d4t1p1"
    assert plan("d4", "d4:tokens=4096", "d4:tokens=512") == "actor_train:d4t1p1@0-3:tokens=512,*:d4t1p1@0-3"
    assert plan("vllm.d1@2:seqs=8", "d2@3,1", "t2@2-3:mbs=2:tokens=9") == (
        "actor_gen:vllm.d1t1p1@2:seqs=8,ref_inf:d2t1p1@3,1,actor_train:d1t2p1@2-3:tokens=9:mbs=2"
    )


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("*:d2:tokns=3", "'tokns=3' is not like tokens=4096, mbs=2 or seqs=64  did you mean tokens ?"),
        ("*:d2:mbs=0", "'mbs=0' is not like tokens=4096"),
        ("*:d2:seqs=2:seqs=2", "'seqs=2' is given twice"),
        ("*:vlm.d2", "unknown backend 'vlm'  did you mean vllm ?"),
        ("*:d2@3-4", "names worker 4, but there are workers 0 to 3"),
        ("*:d2@one", "'one' in device mesh 'one' is not like"),
        ("*:d2@0,0", "names a worker twice"),
        ("*:d2@0-2", "its size is 2, that of mesh 0-2 is 3; nearest legal: d3t1p1"),
        ("*:d2@0-1,x:d2", "unknown call 'x'"),
        ("vllm.d1@1+*:d1@2", "workers after @ cannot be combined with +"),
        ("none.json", "there is no such file; write one with realhf plan --save FILE.json"),
    ],
)
def test_malformed_texts(mode: str, problem: str) -> None:
    graph = GRAPHS["ppo"]
    with pytest.raises(UserError) as caught:
        read(graph, mode, 1, {m.name: MFCConfig() for m in graph.mfcs})
    assert problem in str(caught.value) and ("allocation_mode=" in str(caught.value) or "nearest" in problem)


def test_a_call_without_numbers_of_micro_batches() -> None:
    assert read_call(" vllm.d2t1 @ 0-1 : seqs=3 ").limits == {"max_num_seqs": 3}
    assert read_call("d2").backend is Backend.native and read_call("d2").mesh == ""


def test_plan_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = GRAPHS["grpo"]
    options = {m.name: MFCConfig() for m in graph.mfcs}
    gen, *rest = (m.name for m in graph.mfcs)
    plan = read(graph, f"{gen}:vllm.d2@2-3:seqs=7,*:d1t2p1@0-1:tokens=77", 1, options)
    (tmp_path / "plan.json").write_text(to_json(plan))
    assert read(graph, "plan.json", 1, options) == read_plan("plan.json") == plan
    of_run = {"experiment": "grpo", "plan": json.loads(to_json(plan))}  # as in the directory of a run
    (tmp_path / "run.json").write_text(json.dumps(of_run))
    assert read(graph, "run.json", 1, options) == plan
    config = updated(experiment_class("sft")(), ["allocation_mode=plan.json"])
    assert config.allocation_mode == str(tmp_path / "plan.json")  # a run may be resumed in another folder
    for text in ("", "[]", "{}", "3", '{"n_workers": 4}', to_json(plan)[:-20], to_json(plan).replace("vllm", "vlm")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=r"bad.json is damaged .*write a plan with realhf plan --save FILE.json"):
            read(graph, "bad.json", 1, options)
    with pytest.raises(UserError, match=r"the plan is for 4 workers, n_nodes \* n_gpus_per_node is 8"):
        read(graph, "plan.json", 2, options)
    with pytest.raises(UserError, match="unknown call 'actor_gen'; this experiment has sft_train"):
        read(GRAPHS["sft"], "plan.json", 1, {m.name: MFCConfig() for m in GRAPHS["sft"].mfcs})
    without = ExecutionPlan(4, {name: plan[name] for name in rest})
    (tmp_path / "part.json").write_text(to_json(without))
    with pytest.raises(UserError, match=f"the plan has no placement of {gen}"):
        read(graph, "part.json", 1, options)
    far = ExecutionPlan(4, {**plan.placements, gen: Placement(plan[gen].layout.starting_at(4))})
    (tmp_path / "far.json").write_text(to_json(far))
    with pytest.raises(UserError, match="worker 5 does not exist"):
        read(graph, "far.json", 1, options)
