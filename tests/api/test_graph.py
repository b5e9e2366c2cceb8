"""What makes a graph, and what does not."""

from dataclasses import replace

import pytest

from realhf.api.graph import MFC, Graph, GraphError, InterfaceSpec, Kind, Sync, graph_problems

SPEC = InterfaceSpec("any")
GEN = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",))
REW = MFC("rew", None, Kind.INFERENCE, SPEC, ("tokens", "row"), ("rewards",))
REF = MFC("ref", "ref", Kind.INFERENCE, SPEC, ("tokens",), ("ref_logprobs",))
TRAIN = MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens", "rewards", "ref_logprobs"))


def names(mfcs: tuple[MFC, ...]) -> list[str]:
    return [m.name for m in mfcs]


def test_edges_run_from_the_maker_of_a_key_to_its_readers() -> None:
    graph = Graph((TRAIN, REW, GEN, REF))
    assert names(graph.parents(TRAIN)) == ["rew", "gen", "ref"]
    assert names(graph.parents(GEN)) == [] and names(graph.children(GEN)) == ["train", "rew", "ref"]
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
        ((replace(GEN, role=None),), "MFC gen: kind generate needs a role, it computes with a model"),
        ((replace(REW, inputs=("rewards",)),), "MFCs wait for each other: rew -> rew"),
        ((), "no MFC reads a key of the data set"),
        ((replace(GEN, inputs=()),), "no MFC reads a key of the data set"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_said(mfcs: tuple[MFC, ...], problem: str) -> None:
    assert graph_problems(mfcs) == [problem]
    with pytest.raises(GraphError) as caught:
        Graph(mfcs)
    assert (caught.value.problems, caught.value.mfcs) == ([problem], mfcs)


def test_a_cycle_is_named() -> None:
    one = MFC("one", None, Kind.INFERENCE, SPEC, ("b", "row"), ("a",))
    two = MFC("two", None, Kind.INFERENCE, SPEC, ("a",), ("b",))
    alone = MFC("alone", None, Kind.INFERENCE, SPEC, ("b", "c"), ("c",))
    assert graph_problems((one, two)) == ["MFCs wait for each other: one -> two -> one"]
    assert graph_problems((alone, two, one)) == [
        "MFCs wait for each other: alone -> alone",
        "MFCs wait for each other: two -> one -> two",
    ]


def test_who_follows_and_who_rests_must_be_there() -> None:
    syncs = (Sync("train", "actor", "ref", 0.5), Sync("trian", "actor", "old", 0.5), Sync("train", "x", "ref", 0.5))
    assert graph_problems((GEN, REW, REF, TRAIN), syncs[:1], ("ref",)) == []
    assert graph_problems((GEN, REW, REF, TRAIN), syncs, ("ref", "rwe")) == [
        "role 'old' follows 'actor' after 'trian', which is no MFC",
        "sync after trian: no MFC has role 'old'",
        "sync after train: no MFC has role 'x'",
        "offloaded: no MFC has role 'rwe'",
    ]


def test_all_problems_come_at_once() -> None:
    loop = replace(REF, inputs=("ref_logprobs", "tokens"))
    found = graph_problems((GEN, GEN, replace(REW, batch_size=-1), replace(REW, name="x"), loop))
    assert found == [
        "MFC name 'gen' is used twice",
        "MFC rew: batch_size must be positive, got -1",
        "key 'tokens' is produced by gen and gen",
        "key 'rewards' is produced by rew and x",
        "MFCs wait for each other: ref -> ref",
    ]


TRIAL = MFC("trial", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",))


def test_who_reads_what_is_picked() -> None:
    picker, later = replace(REW, resamples=3), replace(REF, name="later", inputs=("rewards",), outputs=("ref2",))
    graph = Graph((GEN, picker, REF, later, replace(TRAIN, inputs=("ref2", "ref", "rewards"))))
    assert graph.filter_mfc is picker and graph.after_filter == {"later", "train"}
    plain = Graph((GEN, REW, REF, TRAIN))
    assert plain.filter_mfc is None and plain.after_filter == frozenset()
    found = graph_problems((replace(GEN, resamples=1), replace(picker), REF, replace(TRAIN, inputs=("prompts",))))
    assert found == [
        "MFC rew: resamples are those of gen already",
        "MFC train trains, but reads nothing of gen, for which prompts are drawn anew",
    ]
    assert "MFC rew: resamples must not be negative" in graph_problems((GEN, replace(REW, resamples=-1), REF, TRAIN))


def test_calls_on_held_out_rows_are_a_graph_of_their_own() -> None:
    graph = Graph((GEN, REW, REF, TRAIN), evaluation=(TRIAL, replace(REW, name="judged")))
    assert graph["trial"] is TRIAL and names(graph.eval_graph.topological) == ["trial", "judged"]
    assert graph.dataset_keys == ("prompts", "row") and graph.eval_graph.roles == ("actor",)
    assert graph.trainer("actor") is TRAIN and graph.eval_graph.trainer("actor") is None


@pytest.mark.parametrize(
    ("trial", "problem"),
    [
        (replace(TRIAL, name="gen"), "MFC name 'gen' is used in the steps and in the evaluation"),
        (replace(TRIAL, kind=Kind.TRAIN), "MFC trial: an evaluation does not train"),
        (replace(TRIAL, role="judge"), "MFC trial: role 'judge' takes no part in the steps"),
        (replace(TRIAL, inputs=("tokens",)), "MFCs wait for each other: trial -> trial"),
    ],
)
def test_what_is_no_evaluation_is_said(trial: MFC, problem: str) -> None:
    with pytest.raises(GraphError) as caught:
        Graph((GEN, REW, REF, TRAIN), evaluation=(trial,))
    assert caught.value.problems == [problem]
