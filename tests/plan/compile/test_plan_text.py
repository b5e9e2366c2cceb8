"""Plans as text and as files: every printed plan is parsed as the same plan."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.codec import to_json
from realhf.api.config import LoraOptions, MFCConfig, MicroBatchConfig, ModelSpec, OptimizerConfig
from realhf.api.config.choices import Backend, Recompute
from realhf.api.config.option import AUTO
from realhf.api.execution_plan import ExecutionPlan, MemorySaving, MicroBatching, Placement
from realhf.api.experiment import Experiment, MultiStageExperiment, RoleSpec
from realhf.api.graph import Graph, Kind
from realhf.api.layout import DeviceMesh, Layout
from realhf.apps.prepare.options import updated
from realhf.base.errors import UserError
from realhf.experiments import EXPERIMENTS, experiment_class
from realhf.plan.compile.allocate import allocate, micro_batching
from realhf.plan.compile.check import all_strategies
from realhf.plan.compile.plan_text import plan_text, read_call, read_plan
from realhf.plan.compile.zero import with_zero3

NODE_SIZE = 4
GRAPHS: dict[str, Graph] = {
    name: cls().graph()
    for name in EXPERIMENTS
    if not issubclass(cls := experiment_class(name), MultiStageExperiment) and cls is not Experiment
}
Options = dict[str, MFCConfig]
Roles = dict[str, RoleSpec]


@dataclass(frozen=True)
class Case:
    """A plan of a graph, and the options of its calls and roles."""

    graph: Graph
    n_nodes: int
    options: Options
    roles: Roles
    device: str
    plan: ExecutionPlan

    @property
    def text(self) -> str:
        defaults = {name: micro_batching(option, self.device) for name, option in self.options.items()}
        return plan_text(self.plan, defaults)

    def read(self, mode: str) -> ExecutionPlan:
        plan = read(self.graph, mode, self.n_nodes, self.options, roles=self.roles, device=self.device)
        return with_zero3(plan, self.graph, self.roles)


@st.composite
def placements(draw: st.DrawFn, n_workers: int, generates: bool) -> Placement:
    """Any distinct workers in any order, a strategy of as many with or without ZeRO-3, and micro-batches."""
    ranks = draw(st.lists(st.integers(0, n_workers - 1), min_size=1, max_size=n_workers, unique=True))
    if draw(st.booleans()):
        first = draw(st.integers(0, n_workers - len(ranks)))
        ranks = list(range(first, first + len(ranks)))
    strategy = draw(st.sampled_from(all_strategies(len(ranks)))).with_zero3(draw(st.booleans()))
    can_serve = generates and strategy.pp == 1
    backend = draw(st.sampled_from([Backend.native, Backend.vllm])) if can_serve else Backend.native
    batching = MicroBatching(draw(st.integers(1, 9)), draw(st.integers(1, 10**6)), draw(st.integers(0, 300)))
    return Placement(Layout(DeviceMesh(tuple(ranks)), strategy), batching, backend)


SWITCHES = st.sampled_from([False, True, AUTO])


@st.composite
def model_options(draw: st.DrawFn) -> ModelSpec:
    """Options of a role; those of memory saving may be ``auto``."""
    backend = draw(st.sampled_from([Backend.native, Backend.native, Backend.megatron]))
    offload = draw(SWITCHES if backend is Backend.native else st.sampled_from([False, AUTO]))
    optimizer, lora = OptimizerConfig(offload=offload), LoraOptions(rank=draw(st.sampled_from([0, 0, 4])))
    return ModelSpec(gradient_checkpointing=draw(SWITCHES), recompute_granularity=draw(st.sampled_from(Recompute)),
                     optimizer=optimizer, backend=backend, zero_stage=draw(st.sampled_from([1, 3, AUTO])),
                     lora=lora)  # fmt: skip


def savings(spec: ModelSpec, device: str) -> list[MemorySaving | None]:
    """The savings among which the planner chooses for a training call."""
    offload = spec.optimizer.offload if device != "cpu" else False  # as apps/prepare/planning.py has it
    recomputes = [None, *Recompute] if spec.gradient_checkpointing == AUTO else [spec.recompute]
    is_free = offload == AUTO and spec.backend is Backend.native
    offloads = [False, True] if is_free else [offload is True]
    is_fixed = AUTO not in (spec.gradient_checkpointing, offload)
    return [None] if is_fixed else [MemorySaving(how, where) for how in recomputes for where in offloads]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A graph of an experiment, options, and a plan in which calls may have equal placements."""
    graph, n_nodes = GRAPHS[draw(st.sampled_from(sorted(GRAPHS)))], draw(st.integers(1, 3))
    n_workers = n_nodes * NODE_SIZE
    options = {m.name: MFCConfig(mb_spec=MicroBatchConfig(draw(st.integers(1, 3)), draw(st.sampled_from([None, 100]))))
               for m in graph.mfcs}  # fmt: skip
    roles, device = (
        {role: RoleSpec(draw(model_options())) for role in graph.roles},
        draw(st.sampled_from(["cpu", "cuda"])),
    )
    shared = draw(placements(n_workers, generates=False))
    made = {}
    for mfc in graph.mfcs:
        made[mfc.name] = own = draw(st.just(shared) | placements(n_workers, mfc.kind is Kind.GENERATE))
        if draw(st.booleans()):  # the micro-batching of the options
            made[mfc.name] = Placement(own.layout, micro_batching(options[mfc.name], device), own.backend)
        if mfc.role and mfc.is_train:
            saving = draw(st.sampled_from(savings(roles[mfc.role].spec, device)))
            made[mfc.name] = replace(made[mfc.name], saving=saving)
    plan = with_zero3(ExecutionPlan(n_workers, made), graph, roles)
    return Case(graph, n_nodes, options, roles, device, plan)


def read(
    graph: Graph, mode: str, n_nodes: int, options: Options, n_gpus: int = NODE_SIZE, roles: Roles | None = None,
    device: str = "cpu",
) -> ExecutionPlan:  # fmt: skip
    """Return the plan of a command line with this allocation mode."""
    words = [f"allocation_mode={mode}", f"n_nodes={n_nodes}", f"n_gpus_per_node={n_gpus}"]
    config = updated(experiment_class("sft")(), words)
    return allocate(graph, config, options, {}, device, roles or {})


@given(cases())
def test_every_printed_plan_is_parsed_as_the_same_plan(case: Case) -> None:
    assert case.read(case.text) == case.plan, case.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@given(cases())
def test_every_saved_plan_is_read_as_the_same_plan(folder: Path, case: Case) -> None:
    (folder / "plan.json").write_text(to_json(case.plan))
    assert case.read(str(folder / "plan.json")) == case.plan


def saving_roles(**options: Any) -> Roles:
    """The roles of PPO, whose trained models have these options."""
    offload = OptimizerConfig(offload=options.pop("offload", False))
    trained = RoleSpec(ModelSpec(optimizer=offload, **options))
    return {"actor": trained, "critic": trained, "ref": RoleSpec(ModelSpec()), "rew": RoleSpec(ModelSpec())}


@pytest.mark.parametrize(
    ("text", "options", "saving"),
    [
        ("recompute=full", {"gradient_checkpointing": AUTO}, MemorySaving(Recompute.full)),
        ("recompute=none", {"gradient_checkpointing": AUTO}, MemorySaving()),
        ("offload", {"gradient_checkpointing": AUTO, "offload": AUTO}, MemorySaving(None, True)),
        ("recompute=selective:offload:mbs=2", {"gradient_checkpointing": AUTO, "offload": AUTO},
         MemorySaving(Recompute.selective, True)),
        ("offload", {"gradient_checkpointing": True, "offload": AUTO}, MemorySaving(Recompute.full, True)),
        ("recompute=none", {"gradient_checkpointing": AUTO, "offload": True}, MemorySaving(None, True)),
        ("recompute=full", {"gradient_checkpointing": True}, None),  # the option says the same
        ("mbs=2", {"gradient_checkpointing": AUTO}, None),  # the planner chooses
    ],
)  # fmt: skip
def test_named_savings(text: str, options: dict[str, Any], saving: MemorySaving | None) -> None:
    graph, roles = GRAPHS["ppo"], saving_roles(**options)
    calls = {m.name: MFCConfig() for m in graph.mfcs}
    for mode in (f"actor_train:d2:{text},critic_train:d2:{text},*:d2", f"*:d2:{text}"):
        plan = read(graph, mode, 1, calls, roles=roles, device="cuda")
        assert [plan[m.name].saving for m in graph.mfcs] == [saving if m.is_train else None for m in graph.mfcs]
    on_cpu = read(graph, f"*:d2:{text}", 1, calls, roles=roles)["actor_train"].saving
    assert on_cpu is None or not on_cpu.offload_optimizer, "all state is in host memory"


@pytest.mark.parametrize(
    ("mode", "options", "problem"),
    [
        ("actor_gen:d2:recompute=full,*:d2", {"gradient_checkpointing": AUTO},
         "actor_gen: 'recompute=full' is for training calls, and this is generate; leave it out"),
        ("ref_inf:d2:offload,*:d2", {},
         "ref_inf: 'offload' is for training calls, and this is inference; leave it out"),
        ("actor_train:d2,critic_train:d2,*:d2:offload", {},
         "'offload' is for training calls, and none of the other calls trains; leave it out"),
        ("actor_train:d2:recompute=full,*:d2", {},
         "actor_train: recompute=full contradicts actor.gradient_checkpointing=False; set "
         "actor.gradient_checkpointing=auto"),
        ("actor_train:d2:recompute=none,*:d2", {"gradient_checkpointing": True},
         "actor_train: recompute=none contradicts actor.gradient_checkpointing=True actor.recompute_granularity=full; "
         "set actor.gradient_checkpointing=auto"),
        ("actor_train:d2:offload,*:d2", {"gradient_checkpointing": AUTO},
         "actor_train: offload contradicts actor.optimizer.offload=False; set actor.optimizer.offload=auto"),
        ("actor_train:d2:offload,*:d2", {"offload": AUTO, "backend": Backend.megatron},
         "actor_train: offload is not possible with actor.backend=megatron; leave it out"),
    ],
)  # fmt: skip
def test_savings_that_a_call_cannot_have(mode: str, options: dict[str, Any], problem: str) -> None:
    graph = GRAPHS["ppo"]
    with pytest.raises(UserError) as caught:
        read(graph, mode, 1, {m.name: MFCConfig() for m in graph.mfcs}, roles=saving_roles(**options), device="cuda")
    (found,) = caught.value.problems
    assert found.removeprefix(f"allocation_mode={mode}: ") == problem


def test_a_file_with_state_on_the_device_contradicts_an_option(folder: Path) -> None:
    graph, calls = GRAPHS["ppo"], {m.name: MFCConfig() for m in GRAPHS["ppo"].mfcs}
    free = saving_roles(gradient_checkpointing=AUTO, offload=AUTO)
    plan = read(graph, "*:d2:recompute=full", 1, calls, roles=free, device="cuda")
    (folder / "s.json").write_text(to_json(plan))
    assert read(graph, str(folder / "s.json"), 1, calls, roles=free, device="cuda") == plan
    explicit = saving_roles(gradient_checkpointing=AUTO, offload=True)
    with pytest.raises(UserError, match="optimizer state on the device contradicts actor.optimizer.offload=True; set"):
        read(graph, str(folder / "s.json"), 1, calls, roles=explicit, device="cuda")


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
        (
            "*:d2:tokns=3",
            "'tokns=3' is not like tokens=4096, mbs=2, seqs=64, recompute=full or offload  did you mean tok",
        ),
        ("*:d2:recompute=half", "'recompute=half' is not like tokens=4096"),
        ("*:d2:recompute", "'recompute' is not like tokens=4096"),
        ("*:d2:offload=yes", "'offload=yes' is not like tokens=4096"),
        (
            "*:d2:ofload",
            "'ofload' is not like tokens=4096, mbs=2, seqs=64, recompute=full or offload  did you mean offload",
        ),
        ("*:d2:offload:offload", "'offload' is given twice"),
        ("*:d2:mbs=", "'mbs=' is not like tokens=4096"),
        ("*:d2:", "'' is not like tokens=4096"),
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
