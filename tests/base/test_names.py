"""Run paths, seeds and spans."""

from pathlib import Path

import pytest

from realhf.base.paths import RunDir
from realhf.base.seeds import stable_seed
from realhf.base.timers import Spans


def test_file_names_of_a_run() -> None:
    run = RunDir(Path("runs/exp/trial"))
    paths = [run.config, run.plan, run.metrics, run.events, run.trace, run.log("master"), run.generations(3)]
    paths += [run.model("actor", 5), run.best]
    assert [path.relative_to(run.root).as_posix() for path in paths] == [
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "events.jsonl",
        "trace.json",
        "logs/master.log",
        "generations/step_3.jsonl",
        "models/actor/step_5",
        "best",
    ]


def test_seeds_depend_only_on_the_parts() -> None:
    assert stable_seed("actor", 1) == stable_seed("actor", "1") == 3335587508876187634
    seeds = {stable_seed(*parts) for parts in (("a", "bc"), ("ab", "c"), ("abc",), (), ("a", "b", "c"))}
    assert len(seeds) == 5 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_spans_are_taken_once_and_survive_errors() -> None:
    spans = Spans()
    with spans.span("outer"), spans.span("inner"):
        pass
    with pytest.raises(KeyError), spans.span("broken"):
        raise KeyError
    taken = spans.take()
    assert [name for name, _, _ in taken] == ["inner", "outer", "broken"]
    assert taken[1][1] <= taken[0][1] and all(duration >= 0 for _, _, duration in taken)
    assert spans.take() == []
