"""Valid and invalid graphs."""

from dataclasses import replace

import pytest

from realhf.api.graph import MFC, Graph, GraphError, InterfaceSpec, Kind, Sync, graph_problems
from realhf.plan.compile.program import home_mfc

SPEC = InterfaceSpec("any")
GEN = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",))
REW = MFC("rew", None, Kind.INFERENCE, SPEC, ("tokens", "row"), ("rewards",))
REF = MFC("ref", "ref", Kind.INFERENCE, SPEC, ("tokens",), ("ref_logprobs",))
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards", "ref_logprobs"))


def names(mfcs: tuple[MFC, ...]) -> list[str]:
    return [m.name for m in mfcs]


def test_edges_run_from_the_producer_of_a_key_to_its_consumers() -> None:
    graph = Graph((TRAIN, REW, GEN, REF))
    assert names(graph.parents(TRAIN)) == ["rew", "gen", "ref"]
    assert names(graph.parents(GEN)) == [] and names(graph.parents(REW)) == names(graph.parents(REF)) == ["gen"]
    assert names(graph.topological) == ["gen", "rew", "ref", "train"]
    assert graph.dataset_keys == ("row", "prompts")
    assert graph.roles == ("actor", "ref")
    assert graph["rew"] is REW and graph.producer["rewards"] is REW
    assert graph.trainer("actor") is TRAIN and graph.trainer("ref") is None
    assert TRAIN.is_train and not REF.is_train


def test_declared_order_breaks_ties() -> None:
    assert names(Graph((GEN, REF, REW, TRAIN)).topological) == ["gen", "ref", "rew", "train"]


@pytest.mark.parametrize(
    ("mfcs", "problem"),
    [
        ((GEN, replace(GEN, outputs=("other",))), "MFC name 'gen' is used twice"),
        ((GEN, REW, replace(REW, name="rew2")), "key 'rewards' is produced by rew and rew2"),
        ((replace(GEN, outputs=("a", "a")),), "key 'a' is produced by gen and gen"),
        ((GEN, replace(GEN, name="t1", kind=Kind.TRAIN, outputs=()), replace(TRAIN, inputs=("prompts",))),
         "role 'actor' is trained by t1 and train"),
        ((replace(GEN, batch_size=0),), "MFC gen: batch_size must be positive, got 0"),
        ((replace(GEN, n_minibatches=0),), "MFC gen: n_minibatches must be positive, got 0"),
        ((replace(GEN, role=None),), "MFC gen: kind generate needs a role"),
        ((replace(REW, inputs=("rewards",)),), "MFCs form a cycle: rew -> rew"),
        ((), "no MFC reads a key of the dataset"),
        ((replace(GEN, inputs=()),), "no MFC reads a key of the dataset"),
    ],
)  # fmt: skip
def test_an_invalid_graph_is_an_error(mfcs: tuple[MFC, ...], problem: str) -> None:
    assert graph_problems(mfcs) == [problem]
    with pytest.raises(GraphError) as caught:
        Graph(mfcs)
    assert (caught.value.problems, caught.value.mfcs) == ([problem], mfcs)


def test_cycles_are_listed() -> None:
    one = MFC("one", None, Kind.INFERENCE, SPEC, ("b", "row"), ("a",))
    two = MFC("two", None, Kind.INFERENCE, SPEC, ("a",), ("b",))
    loop = MFC("loop", None, Kind.INFERENCE, SPEC, ("b", "c"), ("c",))
    assert graph_problems((one, two)) == ["MFCs form a cycle: one -> two -> one"]
    assert graph_problems((loop, two, one)) == [
        "MFCs form a cycle: loop -> loop",
        "MFCs form a cycle: two -> one -> two",
    ]


def test_a_target_without_calls_is_a_moving_average() -> None:
    graph = Graph((GEN, REW, REF, TRAIN), (Sync("train", "actor", "ref", 0.5), Sync("train", "actor", "mean", 0.5)))
    assert graph.roles == (*(dict.fromkeys(m.role for m in graph.mfcs if m.role)), "mean")
    assert graph.results == ["actor", "mean"] and home_mfc(graph, "mean") is TRAIN and home_mfc(graph, "ref") is REF


def test_synced_and_offloaded_roles_must_exist() -> None:
    syncs = (Sync("train", "actor", "ref", 0.5), Sync("trian", "actor", "old", 0.5), Sync("train", "x", "ref", 0.5))
    assert graph_problems((GEN, REW, REF, TRAIN), syncs[:1], ("ref",)) == []
    assert graph_problems((GEN, REW, REF, TRAIN), syncs, ("ref", "rwe")) == [
        "role 'old' is synced with 'actor' after unknown MFC 'trian'",
        "sync after train: no MFC has role 'x'",
        "offloaded: no MFC has role 'rwe'",
    ]


def test_all_problems_are_reported_together() -> None:
    loop = replace(REF, inputs=("ref_logprobs", "tokens"))
    problems = graph_problems((GEN, GEN, replace(REW, batch_size=-1), replace(REW, name="x"), loop))
    assert problems == [
        "MFC name 'gen' is used twice",
        "MFC rew: batch_size must be positive, got -1",
        "key 'tokens' is produced by gen and gen",
        "key 'rewards' is produced by rew and x",
        "MFCs form a cycle: ref -> ref",
    ]


EVAL = MFC("eval", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",))


def test_consumers_of_a_filter() -> None:
    filter_, later = replace(REW, resamples=3), replace(REF, name="later", inputs=("rewards",), outputs=("ref2",))
    graph = Graph((GEN, filter_, REF, later, replace(TRAIN, inputs=("ref2", "ref", "rewards"))))
    assert graph.filter_mfc is filter_ and graph.after_filter == {"later", "train"}
    plain = Graph((GEN, REW, REF, TRAIN))
    assert plain.filter_mfc is None and plain.after_filter == frozenset()
    problems = graph_problems((replace(GEN, resamples=1), filter_, REF, replace(TRAIN, inputs=("prompts",))))
    assert problems == [
        "MFC rew: gen has resamples already",
        "MFC train trains on rows that are not filtered by gen",
    ]
    assert "MFC rew: resamples must not be negative" in graph_problems((GEN, replace(REW, resamples=-1), REF, TRAIN))


def test_evaluation_calls_are_a_separate_graph() -> None:
    graph = Graph((GEN, REW, REF, TRAIN), evaluation=(EVAL, replace(REW, name="judged")))
    assert graph["eval"] is EVAL and names(graph.eval_graph.topological) == ["eval", "judged"]
    assert graph.dataset_keys == ("prompts", "row") and graph.eval_graph.roles == ("actor",)
    assert graph.trainer("actor") is TRAIN and graph.eval_graph.trainer("actor") is None


@pytest.mark.parametrize(
    ("mfc", "problem"),
    [
        (replace(EVAL, name="gen"), "MFC name 'gen' is used in training and in the evaluation"),
        (replace(EVAL, kind=Kind.TRAIN), "MFC eval: a training call cannot be part of the evaluation"),
        (replace(EVAL, role="judge"), "MFC eval: role 'judge' is not in the training graph"),
        (replace(EVAL, inputs=("tokens",)), "MFCs form a cycle: eval -> eval"),
    ],
)
def test_an_invalid_evaluation_is_an_error(mfc: MFC, problem: str) -> None:
    with pytest.raises(GraphError) as caught:
        Graph((GEN, REW, REF, TRAIN), evaluation=(mfc,))
    assert caught.value.problems == [problem]
