"""The master's loop with simulated workers: requests, saves, evaluation, failures."""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.api.batch_meta import PROMPT, BatchMeta, ColumnMeta, RowId
from realhf.api.graph import MFC, Graph, InterfaceSpec, Kind
from realhf.api.messages import (
    Done,
    ExecuteCall,
    Failed,
    Fetch,
    FreeRows,
    Hello,
    PrepareCall,
    ReadRows,
    Ready,
    Save,
    Shutdown,
    Start,
    ToMaster,
    ToWorker,
)
from realhf.base.errors import RunFailed
from realhf.plan.compile.schedule import RowsReady
from realhf.plan.run_spec import RunSpec
from realhf.system.master import Master

SPEC = InterfaceSpec("any")
MakeRun = Callable[..., RunSpec]


def graph(batch: int) -> Graph:
    gen = MFC("gen", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), batch)
    return Graph((gen, MFC("train", "actor", Kind.TRAIN, SPEC, ("tokens",), (), batch)))


Reply = Callable[[int, ToWorker], ToMaster | None]


class Workers:
    """Simulated workers that reply immediately; ``on`` may reply first."""

    def __init__(self, run: RunSpec, on: Reply = lambda rank, message: None) -> None:
        self.run, self.on = run, on
        self.sent: list[tuple[int, ToWorker]] = []
        self.calls: dict[int, PrepareCall] = {}
        self.replies: list[ToMaster] = [Hello(r, 1, "here", 7) for r in range(run.plan.n_workers)]

    def send(self, ranks: Iterable[int], message: ToWorker) -> None:
        for rank in ranks:
            self.sent.append((rank, message))
            if (reply := self.on(rank, message) or self.reply(rank, message)) is not None:
                self.replies.append(reply)

    def reply(self, rank: int, message: ToWorker) -> ToMaster | None:
        match message:
            case Start():
                return Ready(rank)
            case Fetch(request, _, start, stop):
                at, count = self.run.fetch_ranks.index(rank), len(self.run.fetch_ranks)
                mine = [RowId(p, PROMPT) for p in range(start, stop) if p % count == at]
                return Done(request, rank, rows(mine, "prompts"))
            case PrepareCall(request):
                self.calls[request] = message
                return None if rank in self.run.plan[message.mfc].layout.mesh.ranks else Done(request, rank)
            case ExecuteCall(request):
                call = self.calls[request]
                mine = [
                    call.inputs.ids[i].prompt for i in call.assignment[self.run.plan[call.mfc].layout.coord(rank).dp]
                ]
                made = rows([RowId(p, 0) for p in mine], "tokens") if call.mfc in ("gen", "eval") else None
                return Done(request, rank, made, state={"seen": call.step} if call.mfc == "train" else None)
            case ReadRows(request, ids, _):
                return Done(request, rank, values={"rows": [{"prompt_id": i.prompt, "sample": i.sample} for i in ids]})
            case Save(request):
                return Done(request, rank)
        return None

    def receive(self, timeout_s: float) -> ToMaster | None:
        return self.replies.pop(0) if self.replies else None

    def close(self) -> None: ...

    def asked(self, kind: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]


class Recorder:
    """Telemetry that records steps, saves and evaluations."""

    logged_keys = ("tokens", "row")

    def __init__(self, accuracies: dict[int, float] | None = None) -> None:
        self.accuracies, self.evaluation = accuracies or {}, {"step": 1}
        self.bests: list[tuple[str, float, str]] = []
        self.evaluated_steps: list[int] = []
        self.steps: list[int] = []
        self.saves: list[tuple[str, str]] = []
        self.evaluations: list[tuple[int, int]] = []
        self.written: list[tuple[int, list[int]]] = []

    def step_done(self, step: int, is_evaluated: bool = False) -> None:
        self.steps.append(step)
        self.evaluated_steps += [step + 1] if is_evaluated else []

    def evaluated(self, step: int) -> dict[str, float]:
        self.evaluations.append((step, len(self.saves)))
        return {"eval/accuracy": self.accuracies.get(step, 0.0)}

    def describe(self, path: Path, evaluation: dict) -> None:
        path.mkdir(parents=True)  # workers are simulated
        (path / "weights").write_text(json.dumps(evaluation))

    def kept(self, metric: str, value: float, path: Path) -> None:
        self.bests.append((metric, value, path.name))

    def saved(self, role: str, path: Path) -> None:
        self.saves.append((role, path.name))

    def generations(self, step: int, parts: list[dict], limit: int) -> None:
        self.written.append((step, [part["prompt_id"] for part in parts]))

    def ready(self, workers: dict[int, Ready]) -> None: ...

    def event(self, event: RowsReady) -> None: ...

    def reply(self, step: int, mfc: str, done: Done) -> None: ...

    def call_done(self, call: PrepareCall, replies: list[Done]) -> None: ...


def train(run: RunSpec, **options: Any) -> tuple[Workers, Recorder]:
    workers, recorder = Workers(run, **options), Recorder()
    master = Master(run, workers, dict, recorder)
    master.train()
    assert master.state.versions == {"actor": len(recorder.steps)}
    return workers, recorder


def test_messages_of_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    """Two epochs of seven rows, three per step: five steps, the last with two rows."""
    run = make_run(graph(3), {"gen": (0,), "train": (0,)}, tmp_path, n_rows=7, batch=3, total_train_epochs=2)
    workers, recorder = train(run)
    assert recorder.steps == [0, 1, 2, 3, 4]
    assert [(f.start, f.stop) for f in workers.asked(Fetch)] == [(0, 3), (3, 6), (6, 9), (9, 12), (12, 14)]
    calls = workers.asked(PrepareCall)
    assert [(c.mfc, c.step, c.version) for c in calls] == [(m, s, s) for s in range(5) for m in ("gen", "train")]
    assert [c.state for c in calls if c.mfc == "train"] == [{}, *({"seen": s} for s in range(4))]
    assert [len(c.inputs.ids) for c in calls[::2]] == [3, 3, 3, 3, 2]
    assert [(d.start, d.stop) for d in workers.asked(FreeRows)] == [(0, 3), (3, 6), (6, 9), (9, 12), (12, 14)]
    assert recorder.saves == [("actor", "step_5")]
    assert [type(m) for _, m in workers.sent[:2]] == [Start, Fetch] and isinstance(workers.sent[-1][1], Shutdown)
    numbers = [m.request for _, m in workers.sent if not isinstance(m, Start | ExecuteCall | FreeRows | Shutdown)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_generations_are_read_before_rows_are_freed(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(graph(2), {"gen": (0, 1), "train": (0, 1)}, tmp_path)
    run.config.n_logged_generations = 1
    workers, recorder = train(run)
    assert recorder.written == [(1, [0]), (2, [2])]
    order = [type(m) for _, m in workers.sent]
    assert order.index(ReadRows) < order.index(FreeRows)
    run.config.n_logged_generations = 0
    assert train(run)[1].written == []
    run.config.n_logged_generations = -1
    assert [sorted(ids) for _, ids in train(run)[1].written] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "control, steps",
    [
        ({}, [6]),
        ({"save_freq_steps": 2}, [2, 4, 6]),
        ({"save_freq_steps": 4}, [4, 6]),
        ({"save_freq_epochs": 1}, [2, 4, 6]),
        ({"save_freq_epochs": 2}, [4, 6]),
    ],
)
def test_save_frequency(control: dict, steps: list[int], make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(graph(2), {"gen": (0,), "train": (0,)}, tmp_path, total_train_epochs=3, **control)
    _, recorder = train(run)
    assert recorder.saves == [("actor", f"step_{step}") for step in steps]


def test_every_replica_takes_part(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(graph(2), {"gen": (0, 1, 2), "train": (0, 1)}, tmp_path)
    workers, recorder = train(run)
    assert recorder.steps == [0, 1]
    ranks = {
        kind: {rank for rank, m in workers.sent if isinstance(m, kind)} for kind in (PrepareCall, Save, Fetch, Shutdown)
    }
    assert ranks == {PrepareCall: {0, 1, 2}, Save: {0, 1}, Fetch: {0, 1, 2}, Shutdown: {0, 1, 2}}


def rows(ids: list[RowId], key: str) -> BatchMeta:
    return BatchMeta(tuple(ids), {key: ColumnMeta("int64", (4,) * len(ids))})


def test_a_worker_that_fails_ends_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(graph(2), {"gen": (0, 1), "train": (0, 1)}, tmp_path)

    def fail(rank: int, message: ToWorker) -> ToMaster | None:
        if isinstance(message, PrepareCall) and message.step == 1 and rank == 1:
            return Failed(1, "gen of step 2", "no memory", "Traceback: here\n")
        return None

    with pytest.raises(RunFailed, match="worker 1 failed during gen of step 2: no memory") as caught:
        train(run, on=fail)
    assert str(tmp_path / "logs" / "worker-1.log") in str(caught.value)


class UnresponsiveWorkers(Workers):
    """Workers that do not execute calls."""

    def reply(self, rank: int, message: ToWorker) -> ToMaster | None:
        return None if isinstance(message, PrepareCall | ExecuteCall) else super().reply(rank, message)


def test_call_timeout(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(graph(2), {"gen": (0,), "train": (1,)}, tmp_path)
    run.config.call_timeout = 0.2
    with pytest.raises(RunFailed, match="waited 0 s for gen of step 1 from worker 0"):
        Master(run, UnresponsiveWorkers(run), dict, Recorder()).train()


def test_a_death_is_reported_with_the_request(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(graph(2), {"gen": (0,), "train": (1,)}, tmp_path)
    with pytest.raises(RunFailed, match="worker 0 was ended by SIGKILL during gen of step 1"):
        Master(run, UnresponsiveWorkers(run), lambda: {0: "was ended by SIGKILL"}, Recorder()).train()


def test_a_death_during_start_up(make_run: MakeRun, tmp_path: Path) -> None:
    workers = Workers(make_run(graph(2), {"gen": (0,), "train": (1,)}, tmp_path))
    workers.replies.clear()
    with pytest.raises(RunFailed, match="worker 1 exited with code 1 during start-up; see .*worker-1.log"):
        Master(workers.run, workers, lambda: {1: "exited with code 1"}, Recorder()).train()


EVAL = MFC("eval", "actor", Kind.GENERATE, SPEC, ("prompts",), ("tokens",), 2)


@pytest.mark.parametrize(
    ("control", "steps"),
    [
        ({}, [0, 4]),
        ({"eval_freq_steps": 2}, [0, 2, 4]),
        ({"eval_freq_steps": 3, "eval_at_start": False}, [3, 4]),
        ({"eval_freq_epochs": 1, "total_train_epochs": 2, "total_train_steps": 6}, [0, 4, 6]),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_evaluation(control: dict, steps: list[int], is_async: bool, make_run: MakeRun, tmp_path: Path) -> None:
    """Eight rows, two per step; three held-out rows, which take two calls."""
    declared = replace(graph(2), evaluation=(EVAL,))
    meshes = {"gen": (0, 1), "train": (0, 1), "eval": (0, 1)}
    run = make_run(declared, meshes, tmp_path, n_rows=8, save_freq_steps=2, async_eval=is_async, **control)
    workers, recorder = train(run := replace(run, n_held_out=3))
    n, first = steps[-1], run.schedule.n_prompts
    assert recorder.steps == list(range(n)) and [step for step, _ in recorder.evaluations] == steps
    assert recorder.evaluated_steps == [step for step in steps if step]
    assert recorder.evaluations[-1][1] == n // 2 - 1 and recorder.saves[-1] == (
        "actor",
        f"step_{n}",
    )
    calls = [workers.calls[m.request] for rank, m in workers.sent if isinstance(m, ExecuteCall) and rank == 0]
    trained = 0
    for call in calls:
        if call.mfc == "eval":
            assert trained in steps
            assert {i.prompt for i in call.inputs.ids} in ({first, first + 1}, {first + 2})
            assert call.state == ({"seen": trained - 1} if trained else {})
        trained += call.mfc == "train"
    assert [c.mfc for c in calls].count("eval") == 2 * len(steps)
    assert {(d.start, d.stop) for d in workers.asked(FreeRows)} >= {(first, first + 2), (first + 2, first + 3)}


@pytest.mark.parametrize("is_async", [False, True])
def test_best_models_are_kept(is_async: bool, make_run: MakeRun, tmp_path: Path) -> None:
    """The first of equal ones; without checkpoints only the best is kept."""
    declared = replace(graph(2), evaluation=(EVAL,))
    meshes = {"gen": (0,), "train": (0,), "eval": (0,)}
    control = {"eval_freq_steps": 1, "keep_best": "eval/accuracy", "async_eval": is_async}
    run = make_run(declared, meshes, tmp_path, n_rows=8, **control)
    workers, recorder = Workers(run := replace(run, n_held_out=3)), Recorder({0: 0.1, 1: 0.3, 2: 0.2, 3: 0.5, 4: 0.5})
    Master(run, workers, dict, recorder).train()
    assert recorder.bests == [
        ("eval/accuracy", value, f"step_{step}") for step, value in ((0, 0.1), (1, 0.3), (3, 0.5))
    ]
    assert {path.name for path in run.paths.best.iterdir()} == {"best.json", "step_3"}
    stored = json.loads((run.paths.best / "best.json").read_text())
    assert (stored["step"], stored["value"], stored["folder"]) == (3, 0.5, "step_3")
    wanted = [run.paths.best / f"step_{step}.unfinished" / "actor" for step in (0, 1, 3)]
    assert [Path(m.path) for m in workers.asked(Save)] == [*wanted, run.paths.model("actor", 4)]
    order = [
        workers.calls[m.request].mfc if isinstance(m, ExecuteCall) else "save"
        for _, m in workers.sent
        if isinstance(m, ExecuteCall | Save)
    ]
    assert [name for name in order if name != "gen"] == [
        *("eval", "eval", "save", "train", "eval", "eval", "save", "train", "eval", "eval", "train"),
        *("eval", "eval", "save", "train", *(("save", "eval", "eval") if is_async else ("eval", "eval", "save"))),
    ]


def test_an_unknown_best_metric_is_reported_before_the_first_step(make_run: MakeRun, tmp_path: Path) -> None:
    declared = replace(graph(2), evaluation=(EVAL,))
    meshes = {"gen": (0,), "train": (0,), "eval": (0,)}
    run = replace(make_run(declared, meshes, tmp_path, keep_best="eval/acuracy"), n_held_out=1)
    with pytest.raises(RunFailed, match=r"keep_best=eval/acuracy: .* \(it has eval/accuracy\)  did you mean eval/acc"):
        train(run)


class Unordered(Workers):
    """Workers whose replies arrive in random order."""

    def __init__(self, run: RunSpec, seed: int) -> None:
        super().__init__(run)
        self.rng = random.Random(seed)

    def receive(self, timeout_s: float) -> ToMaster | None:
        return self.replies.pop(self.rng.randrange(len(self.replies))) if self.replies else None


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_replies_of_training_during_evaluation(seed: int, is_async: bool, make_run: MakeRun, tmp_path: Path) -> None:
    """The rollout of the next step runs when a step ends: its reply may arrive during the evaluation."""
    declared = replace(graph(2), evaluation=(EVAL,))
    meshes = {"gen": (0,), "train": (0,), "eval": (0,)}
    run = make_run(declared, meshes, tmp_path, n_rows=12, eval_freq_steps=1, async_eval=is_async)
    run.config.max_staleness = 1
    workers, recorder = Unordered(run := replace(run, n_held_out=3), seed), Recorder()
    master = Master(run, workers, dict, recorder)
    master.train()
    assert recorder.steps == list(range(6)) and [step for step, _ in recorder.evaluations] == [0, 1, 2, 3, 4, 5, 6]
    calls = [workers.calls[m.request] for _, m in workers.sent if isinstance(m, ExecuteCall)]
    assert [call.mfc for call in calls if call.mfc != "gen"] == ["eval", "eval", *["train", "eval", "eval"] * 6]
    assert [call.step for call in calls if call.mfc == "gen"] == list(range(6)) and not master.pending_events


class SlowVerdicts(Workers):
    """Workers that give the verdict on held-out rows when the next step has been trained, or the run would end."""

    def __init__(self, run: RunSpec) -> None:
        super().__init__(run)
        self.withheld: list[ToMaster] = []

    def reply(self, rank: int, message: ToWorker) -> ToMaster | None:
        reply, call = super().reply(rank, message), None
        if isinstance(message, ExecuteCall):
            call = self.calls[message.request]
        if call is not None and call.mfc == "train":
            self.replies += self.withheld
            self.withheld.clear()
        if call is None or call.mfc != "verdict":
            return reply
        self.withheld.append(reply)
        return None

    def receive(self, timeout_s: float) -> ToMaster | None:
        if not self.replies:
            self.replies, self.withheld = self.withheld, []
        return super().receive(timeout_s)


def test_training_does_not_wait_for_verdicts_of_an_evaluation(make_run: MakeRun, tmp_path: Path) -> None:
    """It waits for what reads its weights only. Every evaluation has the weights of its step, also on a kill."""
    verdict = MFC("verdict", None, Kind.INFERENCE, SPEC, ("tokens",), (), 2)
    declared = replace(graph(2), evaluation=(EVAL, verdict))
    meshes = {"gen": (0,), "train": (0,), "eval": (0,), "verdict": (1,)}
    run = make_run(declared, meshes, tmp_path, n_rows=8, eval_freq_steps=1, save_freq_steps=1, async_eval=True)
    run = replace(run, n_held_out=3)
    workers, recorder = SlowVerdicts(run), Recorder()
    Master(run, workers, dict, recorder).train()
    assert [step for step, _ in recorder.evaluations] == [0, 1, 2, 3, 4] and recorder.steps == [0, 1, 2, 3]
    assert [name for _, name in recorder.saves] == [f"step_{step}" for step in (1, 2, 3, 4)]
    calls = [workers.calls[m.request] for _, m in workers.sent if isinstance(m, ExecuteCall)]
    names = [call.mfc for call in calls]
    assert [name for name in names if name in ("train", "eval")] == ["eval", "eval", *["train", "eval", "eval"] * 4]
    first = names.index("train")
    assert names[:first].count("verdict") < 2  # the others start when the first step has been trained
