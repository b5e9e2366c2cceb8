"""Environment processes: results, faults that harm no other episode, and replays after a process has died."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.environments import Reply, Turn
from realhf.environments.env_process import EnvOptions
from realhf.environments.pool import EnvFailure, EnvPool

FILE = Path(__file__).with_name("hostile.py")
TIMEOUT_S = 1.0


@pytest.fixture
def pools() -> Iterator[list[EnvPool]]:
    made: list[EnvPool] = []
    yield made
    for pool in made:
        pool.close()


def pool_of(pools: list[EnvPool], cls: str, workers: int = 1, timeout: float = TIMEOUT_S, **options: object) -> EnvPool:
    pools.append(EnvPool(EnvOptions(f"{FILE}:{cls}", options, workers, timeout)))
    return pools[-1]


def play(pool: EnvPool, rows: list[dict], max_turns: int = 5, pause_s: float = 0.0) -> list[list[Turn | EnvFailure]]:
    """Play the episodes of all rows at once; the caller does other work for ``pause_s`` between polls."""
    results: list[list[Turn | EnvFailure]] = [[] for _ in rows]
    for number, row in enumerate(rows):
        pool.reset(number, row, 7 * number)
    n_open, deadline = len(rows), time.monotonic() + 60
    while n_open:
        assert time.monotonic() < deadline, results
        time.sleep(pause_s)
        for answer in pool.poll(5.0):
            turns = results[answer.episode]
            turns.append(answer.result)
            if isinstance(answer.result, EnvFailure) or answer.result.done or len(turns) > max_turns:
                pool.end(answer.episode)
                n_open -= 1
            else:
                pool.step(answer.episode, Reply(f"reply {len(turns)}", [1, 2]))
    return results


def good(name: str, turns: int, seed: int) -> list[Turn]:
    last = [Turn(text=f"{name} {i} reply {i}", reward=1.0, done=i == turns) for i in range(1, turns + 1)]
    return [Turn(text=f"start {name} {seed}"), *last]


@pytest.mark.parametrize("workers", [1, 3])
def test_episodes_are_independent(workers: int, pools: list[EnvPool]) -> None:
    rows = [{"name": f"e{i}", "turns": 1 + i % 4} for i in range(20)]
    results = play(pool_of(pools, "Counter", workers), rows)
    assert results == [good(row["name"], row["turns"], 7 * i) for i, row in enumerate(rows)]


def test_a_process_executes_requests_that_wait(tmp_path: Path, pools: list[EnvPool]) -> None:
    """The caller polls between passes of the model: one request per pass would leave both waiting."""
    pool, log = pool_of(pools, "Log", timeout=20.0, path=str(tmp_path / "log")), tmp_path / "log"
    n, deadline = 100, time.monotonic() + 30
    for number in range(n):
        pool.reset(number, {"name": "e", "turns": 1}, number)
    answers = pool.poll(30.0)
    while log.stat().st_size < n:  # without a poll
        assert time.monotonic() < deadline, log.stat().st_size
        time.sleep(0.01)
    while len(answers) < n:
        answers += pool.poll(5.0)
    assert [answer.episode for answer in answers] == list(range(n))


def test_large_messages_fill_no_pipe_for_ever(pools: list[EnvPool]) -> None:
    """Both ends write more than a pipe holds, at the same time."""
    rows = [{"name": f"{i}" * 200_000, "turns": 2} for i in range(10)] * 4
    results = play(pool_of(pools, "Counter", timeout=20.0), rows)
    assert results == [good(str(row["name"]), 2, 7 * i) for i, row in enumerate(rows)]


FAULTS = {
    "hang": ("timeout", "no answer after 1 s"),
    "hang deaf to signals": ("timeout", "no answer after 1 s"),
    "crash": ("died", "exit code 3"),
    "segfault": ("died", "Segmentation fault"),
    "huge observation": ("error", "characters, more than"),
    "memory": ("error", "MemoryError"),
    "nan reward": ("error", "must be a finite number"),
    "no turn": ("error", "must return a Turn"),
    "wrong types": ("error", "must be"),
    "exit": ("error", "SystemExit"),
    "network": ("error", "ConnectionRefusedError"),
    "odd error": ("error", "OddError: it has no text"),
    "odd text of an error": ("error", "ValueError: \ufffd\ufffd"),
    "deep": ("error", "nested"),
}
HARMLESS = (
    "fork",
    "forked copies",
    "never done",
    "prints",
    "reads stdin",
    "special tokens",
    "slow close",
    "surrogates",
    "",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_its_own_episode_only(fault: str, pools: list[EnvPool]) -> None:
    rows = [{"name": f"e{i}", "turns": 3} for i in range(6)]
    rows[2]["fault"] = fault  # type: ignore[assignment]
    results = play(pool_of(pools, "Broken", timeout=TIMEOUT_S if fault.startswith("hang") else 20.0), rows)
    *turns, failure = results.pop(2)
    kind, detail = FAULTS[fault]
    assert turns == good("e2", 3, 14)[:1]
    assert isinstance(failure, EnvFailure) and failure.kind == kind and detail in failure.detail
    assert results == [good(row["name"], 3, 7 * i) for i, row in enumerate(rows) if i != 2]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", ["crash", "segfault"])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_answers_before_a_death_count_if_the_caller_reads_them_later(
    place: int, fault: str, workers: int, pools: list[EnvPool]
) -> None:
    """They and the end of the pipe are read at once, and the request at fault is the first without an answer."""
    rows = [{"name": f"e{i}", "turns": 3} for i in range(6)]
    rows[place]["fault"] = fault  # type: ignore[assignment]
    results = play(pool_of(pools, "Broken", workers, timeout=20.0), rows, pause_s=0.5)
    *turns, failure = results.pop(place)
    assert turns == good(f"e{place}", 3, 7 * place)[:1]
    assert isinstance(failure, EnvFailure) and failure.kind == "died"
    assert results == [good(row["name"], 3, 7 * i) for i, row in enumerate(rows) if i != place]


@pytest.mark.parametrize("fault", HARMLESS)
def test_odd_behaviour_harms_no_episode(fault: str, pools: list[EnvPool]) -> None:
    rows = [{"name": f"e{i}", "turns": 3} for i in range(4)]
    rows[1]["fault"] = fault  # type: ignore[assignment]
    results = play(pool_of(pools, "Broken"), rows)
    odd = results.pop(1)
    assert not any(isinstance(turn, EnvFailure) for turn in odd)
    assert results == [good(row["name"], 3, 7 * i) for i, row in enumerate(rows) if i != 1]


REPLIES = ["not JSON", "[]", "5", "{}", '{"id": 10000, "turn": {}}', '{"id": [], "turn": {}}', '{"id": null}', "\x00",
           '{"fatal": 3, "id"', '{"id": 99999, "error": "x"}']  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
def test_a_process_that_sends_invalid_replies(reply: str, pools: list[EnvPool]) -> None:
    """It is replaced; only the episode at fault fails."""
    rows = [{"name": f"e{i}", "turns": 3} for i in range(4)]
    rows[1] |= {"fault": "invalid replies", "reply": reply}
    results = play(pool_of(pools, "Broken", timeout=20.0), rows)
    failure = results.pop(1)[-1]
    assert isinstance(failure, EnvFailure) and failure.kind == "died" and "invalid reply" in failure.detail
    assert results == [good(row["name"], 3, 7 * i) for i, row in enumerate(rows) if i != 1]


FORBIDDEN = {"network": "PermissionError", "fork": "PermissionError", "fork bomb": "PermissionError"}


@pytest.mark.parametrize("fault", FORBIDDEN)
def test_a_sandbox_forbids(fault: str, pools: list[EnvPool]) -> None:
    rows = [{"name": f"e{i}", "turns": 3} for i in range(4)]
    rows[1]["fault"] = fault  # type: ignore[assignment]
    pools.append(EnvPool(EnvOptions(f"{FILE}:Broken", {}, 1, 20.0, sandbox=True)))
    results = play(pools[-1], rows)
    failure = results.pop(1)[-1]
    assert isinstance(failure, EnvFailure) and failure.kind == "error" and FORBIDDEN[fault] in failure.detail
    assert results == [good(row["name"], 3, 7 * i) for i, row in enumerate(rows) if i != 1]


@pytest.mark.parametrize("cls", ["Counter", "Async"])
def test_an_episode_goes_on_in_another_pool(cls: str, pools: list[EnvPool]) -> None:
    """Its requests are played again, in turn; if one of them fails or differs, its next request fails."""
    rows = [{"name": "a", "turns": 4}, {"name": "b", "turns": 4}]
    first = pool_of(pools, cls, timeout=20.0)
    histories = []
    for number, row in enumerate(rows):
        first.reset(number, row, 0)
        first.poll(20)
        first.step(number, Reply("x", [1]))
        first.poll(20)
        histories.append(first.history(number))
    assert [[one.op for one in history] for history in histories] == [["reset", "step"]] * 2
    for fault, problem in ((None, ""), ("a", "this environment is broken")):
        second = pool_of(pools, cls, timeout=20.0, **({"fault": fault} if fault else {}))
        for number, history in enumerate(histories):
            second.restore(number, history)
            second.step(number, Reply("y", [1]))
        answers = {}
        while len(answers) < 2:
            answers |= {answer.episode: answer.result for answer in second.poll(20)}
        assert answers[1] == Turn(text="b 2 y", reward=1.0)
        if fault:
            assert isinstance(answers[0], EnvFailure) and problem in answers[0].detail
        else:
            assert answers[0] == Turn(text="a 2 y", reward=1.0)
    third = pool_of(pools, "Random", timeout=20.0)
    third.restore(0, histories[0])
    third.step(0, Reply("y", [1]))
    (answer,) = third.poll(20)
    assert isinstance(answer.result, EnvFailure) and "not deterministic" in answer.result.detail


def test_a_request_that_has_failed_is_repeated(tmp_path: Path, pools: list[EnvPool]) -> None:
    pool, results = pool_of(pools, "Once", timeout=20.0, fault=str(tmp_path / "failed")), list[Turn | EnvFailure]()
    pool.reset(0, {"name": "e", "turns": 3}, 7)
    while len(results) < 5:
        (answer,) = pool.poll(20)
        results.append(answer.result)
        if isinstance(answer.result, EnvFailure):
            pool.retry(0)
        else:
            pool.step(0, Reply(f"reply {sum(isinstance(one, Turn) for one in results)}", [1, 2]))
    assert isinstance(results.pop(2), EnvFailure) and results == good("e", 3, 7)


def test_forked_processes_are_killed(pools: list[EnvPool]) -> None:
    pool = pool_of(pools, "Broken")
    play(pool, [{"name": "e", "turns": 1, "fault": "fork"}])
    process = pool._workers[0].process
    assert process is not None
    pool.close()
    deadline = time.monotonic() + 5
    while any(one.split(") ")[1].split()[2] == str(process.pid) for one in stats()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stats() -> list[str]:
    found = list[str]()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.append((Path("/proc") / entry / "stat").read_text())
    return found


def test_async_environments_wait_together(pools: list[EnvPool]) -> None:
    rows = [{"name": f"e{i}", "turns": 2, "seconds": 0.2} for i in range(20)]
    pool = pool_of(pools, "Async", timeout=10.0)
    play(pool, rows[:1])
    began = time.monotonic()
    results = play(pool, rows)
    assert results == [good(row["name"], 2, 7 * i) for i, row in enumerate(rows)]
    assert time.monotonic() - began < 20 * 2 * 0.2


def test_of_concurrent_requests_only_the_fault_fails(pools: list[EnvPool]) -> None:
    rows = [{"name": f"e{i}", "turns": 2, "seconds": 0.01 * i} for i in range(8)]
    rows[5]["fault"] = "crash"
    results = play(pool_of(pools, "Async", timeout=5.0), rows)
    assert isinstance(results[5][-1], EnvFailure)
    assert [r for i, r in enumerate(results) if i != 5] == [good(f"e{i}", 2, 7 * i) for i in range(8) if i != 5]


def test_a_process_that_is_killed_changes_no_turn(pools: list[EnvPool]) -> None:
    """Killed between requests and during startup; the pool does not wait for the next poll to start another one."""
    pool, rows = pool_of(pools, "Counter"), [{"name": f"e{i}", "turns": 6} for i in range(4)]
    expected, kills = play(pool, rows, 9), 0
    for number in range(4):
        pool.reset(number, rows[number], 7 * number)
    results: list[list[Turn | EnvFailure]] = [[] for _ in rows]
    began = time.monotonic()
    while any(len(turns) < 7 for turns in results):
        is_killed = False
        for answer in pool.poll(30.0):
            results[answer.episode].append(answer.result)
            if len(results[answer.episode]) in {2, 4, 6} and kills < 3 and not is_killed:
                assert (process := pool._workers[0].process) is not None
                os.kill(process.pid, signal.SIGKILL)
                kills, is_killed = kills + 1, True
            if len(results[answer.episode]) < 7:
                pool.step(answer.episode, Reply(f"reply {len(results[answer.episode])}", [1, 2]))
    assert kills == 3 and results == expected and time.monotonic() - began < 30


def test_an_episode_that_cannot_be_replayed_fails(pools: list[EnvPool]) -> None:
    """The first row's process dies in the second step of the second row."""
    pool = pool_of(pools, "Random")
    rows: list[dict] = [{"name": "a", "turns": 3}, {"name": "b", "turns": 3}]
    pool.reset(0, rows[0], 0)
    pool.poll(20)
    pool.step(0, Reply("x", []))
    assert isinstance(pool.poll(20)[0].result, Turn)
    pool.reset(1, {**rows[1], "fault": "crash"}, 0)
    pool.poll(20)
    pool.step(1, Reply("x", []))
    assert isinstance(pool.poll(20)[0].result, EnvFailure)
    pool.step(0, Reply("y", []))
    (answer,) = pool.poll(20)
    assert isinstance(answer.result, EnvFailure) and "not deterministic" in answer.result.detail


@pytest.mark.parametrize(
    "source, problem",
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("class Env: pass", "has no method 'step'"),
        ("class Other: pass", "has no class 'Env'"),
        ("import os; os._exit(4)", "exit code 4"),
    ],
)
def test_a_class_that_cannot_be_loaded_is_an_error(
    source: str, problem: str, tmp_path: Path, pools: list[EnvPool]
) -> None:
    file = tmp_path / "env.py"
    file.write_text(source)
    pools.append(EnvPool(EnvOptions(f"{file}:Env")))
    pools[-1].reset(0, {}, 0)
    with pytest.raises(UserError, match=problem):
        while True:
            pools[-1].poll(20)
